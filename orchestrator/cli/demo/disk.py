"""The published snapshot as it stands on disk, read and hashed by the demo itself."""

import hashlib
import json
from typing import Any

from relight.agents.snapshot import MANIFEST, directory_of
from relight.orchestrator.cli.demo.evidence import Snapshot, Tensor


def read(uri: str) -> Snapshot:
    """Every byte of the snapshot at `uri`. Raises OSError where it cannot be read."""
    directory = directory_of(uri)
    raw = (directory / MANIFEST).read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    listed = {name: (int(size), str(sha256)) for name, size, sha256 in manifest["files"]}
    standing = {path.name for path in directory.iterdir()} - {MANIFEST}
    wrong = [f"{name} is not there" for name in sorted(listed.keys() - standing)]
    wrong += [f"{name} is not in the manifest" for name in sorted(standing - listed.keys())]
    tensors: dict[str, Tensor] = {}
    for name in sorted(listed.keys() & standing):
        content = (directory / name).read_bytes()
        size, sha256 = listed[name]
        if len(content) != size:
            wrong.append(f"{name} has {len(content)} bytes, not {size}")
        elif hashlib.sha256(content).hexdigest() != sha256:
            wrong.append(f"{name} has another sha256")
        if name.endswith(".safetensors"):
            tensors |= _tensors(content)
    return Snapshot(
        uri=uri,
        digest=f"sha256:{hashlib.sha256(raw).hexdigest()}",
        wrong_files=tuple(wrong),
        files=len(listed),
        tensors=tensors,
    )


def _tensors(content: bytes) -> dict[str, Tensor]:
    """The tensors of one safetensors file: eight bytes of length, a JSON header, then their bytes."""
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        sha256 = hashlib.sha256(content[start + first : start + last]).hexdigest()
        found[name] = Tensor(dtype=entry["dtype"], shape=tuple(entry["shape"]), sha256=sha256)
    return found
