"""What a snapshot of weights is on disk, and the proof that one is intact.

A snapshot is a flat directory that a model loader can read (safetensors shards, config, tokenizer) and a
manifest, written last, that lists every file with its size and hash and every tensor with its dtype and
shape. The digest that travels on the bus is the hash of the manifest's bytes, so it covers every byte of
the snapshot: a directory that passes `check` holds exactly what its writer handed over, or nothing is
said about it. Knows no framework; functions block and are run in a thread.
"""

import hashlib
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import msgspec

from relight.events import codec
from relight.events.errors import RelightError, Undecodable
from relight.events.version import Version

MANIFEST = "relight-manifest.json"
FORMAT = 1
"""Of the manifest. A reader refuses any other: what it does not know it cannot prove."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes that loaders take for weights: such a file that no manifest lists could be loaded unproven."""

SAMPLE_BYTES = 256 << 20
"""Of each of two snapshots that are compared: every step of an optimizer changes every tensor."""

HASHERS = 4
"""Files hashed at a time. One core does 1 to 2 GB/s; more than a few only fight for the disk."""


class SnapshotError(RelightError):
    """A snapshot is absent, torn, altered or of an unknown format; the message names the file."""


class File(NamedTuple):
    """One file of a snapshot."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


class Tensor(NamedTuple):
    """A tensor's form."""

    dtype: str
    """As safetensors writes it: `F32`, `BF16`, …"""
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a snapshot holds."""

    format: int = FORMAT
    version: Version
    files: tuple[File, ...]
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


def encoded(manifest: Manifest) -> bytes:
    """The manifest's bytes: the same for the same manifest, on every machine."""
    canonical = msgspec.structs.replace(
        manifest, files=tuple(sorted(manifest.files)), tensors=dict(sorted(manifest.tensors.items()))
    )
    return codec.to_json(canonical).encode()


def digest_of(manifest: Manifest) -> str:
    """`sha256:HEX` of the manifest's bytes."""
    return _digest(encoded(manifest))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def directory_of(uri: str) -> Path:
    """The directory that `uri` (an absolute path or a `file://` URI) names; raises SnapshotError."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = Path(unquote(parts.path))
    elif not parts.scheme:
        path = Path(uri)
    else:
        raise SnapshotError(f"snapshot {uri!r} is neither a path nor a file:// URI of this machine")
    if not path.is_absolute():
        raise SnapshotError(f"snapshot {uri!r} is not an absolute path")
    return path


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`, its files not looked at; raises SnapshotError."""
    return _parse(_manifest_bytes(directory), directory / MANIFEST)


def check(directory: Path, digest: str) -> Manifest:
    """Prove that `directory` holds exactly the snapshot of `digest`; reads every byte of it.

    Raises SnapshotError that names the file which is missing, truncated, altered or not listed.
    """
    data = _manifest_bytes(directory)
    found = _digest(data)
    if found != digest:
        raise SnapshotError(f"{directory / MANIFEST}: its digest is {found}, expected {digest}")
    manifest = _parse(data, directory / MANIFEST)
    _check_files(directory, manifest)
    return manifest


def looks_whole(directory: Path, digest: str) -> bool:
    """Whether the manifest of `digest` and files of its sizes stand there; no file is read."""
    try:
        data = _manifest_bytes(directory)
        if _digest(data) != digest:
            return False
        _check_sizes(directory, _parse(data, directory / MANIFEST))
    except SnapshotError:
        return False
    return True


def verify(directory: Path) -> Manifest:
    """Prove that `directory` is intact by its own manifest, whichever that is; raises SnapshotError."""
    manifest = read_manifest(directory)
    _check_files(directory, manifest)
    return manifest


def describe(directory: Path, version: Version) -> Manifest:
    """A manifest of what stands in `directory` now; raises SnapshotError where no readable weights do."""
    paths = sorted(path for path in _listed(directory) if not path.name.startswith(MANIFEST))
    tensors = tensors_in(path for path in paths if path.suffix == ".safetensors")
    if not tensors:
        raise SnapshotError(f"{directory}: no safetensors file in it")
    return Manifest(version=version, files=tuple(_hashed(paths)), tensors=tensors)


def tensors_in(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Names and forms of the tensors in some safetensors files, by their headers; raises SnapshotError."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with cast(Any, safe_open)(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 -- not a mapping
                    if name in tensors:
                        raise SnapshotError(f"{path}: tensor {name!r} stands in an earlier file too")
                    part = file.get_slice(name)
                    tensors[name] = Tensor(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path}: not a whole safetensors file: {error}") from error
    return tensors


def tensor_digests(directory: Path, names: Collection[str], *, most_bytes: int) -> dict[str, str]:
    """sha256 of the bytes of those tensors, in the order of files and offsets, as far as `most_bytes` go.

    Raises SnapshotError.
    """
    digests: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with path.open("rb", buffering=0) as file:
                length = int.from_bytes(file.read(8), "little")
                entries = codec.from_json(file.read(length), dict[str, _Place])
                for name, place in sorted(entries.items(), key=lambda item: item[1].data_offsets):
                    size = place.data_offsets[1] - place.data_offsets[0]
                    if name in names and size <= most_bytes:
                        most_bytes -= size
                        file.seek(8 + length + place.data_offsets[0])
                        digests[name] = _sha256_of(file, size)
        except (OSError, Undecodable) as error:
            raise SnapshotError(f"{path}: its tensors cannot be read: {error}") from error
    return digests


def differ(one: Path, other: Path) -> bool:
    """Whether the tensors of two folders are known to differ; False where one of them is gone.

    Of another dtype they may be the same weights: a trainer may hold and write more digits than the base has.
    """
    try:
        forms = [tensors_in(sorted(folder.glob("*.safetensors"))) for folder in (one, other)]
        names = {name for name, form in forms[0].items() if forms[1].get(name) == form}
        found = [tensor_digests(folder, names, most_bytes=SAMPLE_BYTES) for folder in (one, other)]
    except SnapshotError:
        return False
    return any(found[0][name] != found[1][name] for name in found[0].keys() & found[1].keys())


class _Place(msgspec.Struct):
    """Where a tensor lies behind a safetensors header; empty for the header's own metadata."""

    data_offsets: tuple[int, int] = (0, 0)


def _sha256_of(file: BinaryIO | FileIO, size: int) -> str:
    digest = hashlib.sha256()
    while size and (piece := file.read(min(size, 1 << 20))):
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()


def difference(known: Manifest, other: Manifest) -> str | None:
    """The first way in which `other` has not the tensors of `known`; None where names and forms agree."""
    for name in sorted(known.tensors.keys() | other.tensors.keys()):
        left, right = known.tensors.get(name), other.tensors.get(name)
        if left != right:
            return f"tensor {name!r} is {_form(right)} in {other.version}, {_form(left)} in {known.version}"
    return None


def _form(tensor: Tensor | None) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}" if tensor else "absent"


def _manifest_bytes(directory: Path) -> bytes:
    path = directory / MANIFEST
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        what = "no manifest in it" if directory.is_dir() else "no such directory"
        raise SnapshotError(f"{directory}: {what}") from error
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Header(msgspec.Struct):
    format: int


def _parse(data: bytes, path: Path) -> Manifest:
    try:
        seen = codec.from_json(data, _Header).format
        if seen != FORMAT:
            raise SnapshotError(f"{path}: manifest format {seen} is unknown, this relight reads {FORMAT}")
        manifest = codec.from_json(data, Manifest)
    except Undecodable as error:
        raise SnapshotError(f"{path}: not a manifest: {error}") from error
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name in ("", ".", "..", MANIFEST):
            raise SnapshotError(f"{path}: lists {file.name!r}, which is no plain file name")
    return manifest


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        path = directory / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise SnapshotError(f"{path}: missing: {error.strerror or error}") from error
        if size != file.size:
            raise SnapshotError(f"{path}: {size} bytes, expected {file.size}")


def _check_files(directory: Path, manifest: Manifest) -> None:
    """Sizes first: a truncated file is found out before a byte is hashed."""
    _check_sizes(directory, manifest)
    names = {file.name for file in manifest.files}
    for path in _listed(directory):
        if path.suffix in WEIGHTS and path.name not in names:
            raise SnapshotError(f"{path}: weights that the manifest does not list")
    for file, found in zip(
        manifest.files, _hashed([directory / file.name for file in manifest.files]), strict=True
    ):
        if found.sha256 != file.sha256 or found.size != file.size:
            raise SnapshotError(f"{directory / file.name}: sha256 {found.sha256}, expected {file.sha256}")


def _listed(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_file()]
    except OSError as error:
        raise SnapshotError(f"{directory}: cannot be listed: {error.strerror or error}") from error


def _hashed(paths: list[Path]) -> Iterable[File]:
    if not paths:
        return []
    with ThreadPoolExecutor(min(HASHERS, len(paths))) as pool:
        return list(pool.map(hashed, paths))


def hashed(path: Path) -> File:
    """`path` by name, size and hash, in one pass; raises SnapshotError."""
    try:
        with path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256")
            return File(path.name, os.fstat(file.fileno()).st_size, digest.hexdigest())
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror or error}") from error
