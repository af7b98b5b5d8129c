"""A snapshot on disk is proven whole, or the file that is wrong is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from relight.agents.snapshot import (
    MANIFEST,
    Manifest,
    SnapshotError,
    Tensor,
    check,
    describe,
    differ,
    difference,
    digest_of,
    directory_of,
    encoded,
    read_manifest,
    verify,
)
from relight.events.version import Version

VERSION = Version(7, 4)


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, str]:
    """A small snapshot in two shards, and its digest."""
    save_file(
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "model-00001-of-00002.safetensors"
    )
    save_file({"b": np.ones(4, dtype=np.int64)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "stub"}')
    manifest = describe(tmp_path, VERSION)
    (tmp_path / MANIFEST).write_bytes(encoded(manifest))
    return tmp_path, digest_of(manifest)


def test_a_whole_snapshot_passes_and_says_what_it_holds(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    manifest = check(directory, digest)
    assert manifest == read_manifest(directory) == verify(directory)
    assert manifest.version == VERSION
    assert manifest.tensors == {"a": Tensor("F32", (2, 3)), "b": Tensor("I64", (4,))}
    assert manifest.size == sum(path.stat().st_size for path in directory.iterdir() if path.name != MANIFEST)


def test_the_digest_does_not_depend_on_the_order_of_files_and_tensors(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    manifest = read_manifest(directory)
    shuffled = Manifest(
        version=manifest.version,
        files=tuple(reversed(manifest.files)),
        tensors=dict(reversed(manifest.tensors.items())),
    )
    assert digest_of(shuffled) == digest


def test_a_truncated_file_is_named(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    shard = directory / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SnapshotError, match=r"model-00001-of-00002\.safetensors: \d+ bytes, expected \d+"):
        check(directory, digest)


def test_one_flipped_bit_is_named(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    shard = directory / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SnapshotError, match=r"model-00002-of-00002\.safetensors: sha256 "):
        check(directory, digest)


def test_a_missing_file_is_named(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    (directory / "config.json").unlink()
    with pytest.raises(SnapshotError, match=r"config\.json: missing"):
        check(directory, digest)


def test_weights_beside_the_listed_ones_are_refused(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    save_file({"a": np.zeros(1)}, directory / "extra.safetensors")
    with pytest.raises(SnapshotError, match=r"extra\.safetensors: weights that the manifest does not list"):
        check(directory, digest)


def test_another_manifest_than_the_one_announced_is_refused(whole: tuple[Path, str]) -> None:
    directory, digest = whole
    (directory / MANIFEST).write_bytes(encoded(describe(directory, Version(7, 5))))
    with pytest.raises(SnapshotError, match="its digest is sha256:"):
        check(directory, digest)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "not a manifest"),
        (b'{"format":2,"version":"7.4"}', "manifest format 2 is unknown"),
        (b'{"format":1,"version":"new","files":[],"tensors":{}}', "not RUN.STEP"),
        (b'{"format":1,"version":"7.4","files":[],"tensors":{},"more":1}', "unknown field `more`"),
        (b'{"format":1,"version":"7.4","files":[["../x",1,"00"]],"tensors":{}}', "no plain file name"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(SnapshotError, match=what):
        read_manifest(tmp_path)


def test_absent_directories_and_manifests_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="no manifest in it"):
        read_manifest(tmp_path)
    with pytest.raises(SnapshotError, match="no such directory"):
        read_manifest(tmp_path / "none")


def test_a_torn_safetensors_file_cannot_be_described(tmp_path: Path) -> None:
    save_file({"a": np.zeros(9)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(SnapshotError, match=r"model\.safetensors: not a whole safetensors file"):
        describe(tmp_path, VERSION)


def test_a_directory_without_weights_cannot_be_described(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(SnapshotError, match="no safetensors file"):
        describe(tmp_path, VERSION)


def test_other_shapes_are_told(whole: tuple[Path, str]) -> None:
    directory, _ = whole
    known = read_manifest(directory)
    assert difference(known, known) is None
    other = Manifest(version=Version(7, 5), files=(), tensors={**known.tensors, "a": Tensor("F32", (3, 2))})
    assert difference(known, other) == "tensor 'a' is F32[3, 2] in 7.5, F32[2, 3] in 7.4"
    less = Manifest(version=Version(7, 5), files=(), tensors={"a": known.tensors["a"]})
    assert difference(known, less) == "tensor 'b' is absent in 7.5, I64[4] in 7.4"


def test_two_snapshots_differ_by_what_their_tensors_hold(whole: tuple[Path, str], tmp_path: Path) -> None:
    directory, _ = whole
    other = tmp_path / "other"
    other.mkdir()
    for name, values in (("a", np.arange(6, dtype=np.float32).reshape(2, 3)), ("b", np.ones(4, np.int64))):
        save_file({name: values}, other / f"{name}.safetensors")
    assert not differ(directory, other), "other files with the same tensors"
    save_file({"b": np.zeros(4, np.int64)}, other / "b.safetensors")
    assert differ(directory, other) and differ(other, directory)
    assert not differ(directory, tmp_path / "gone")


def test_the_same_weights_with_more_digits_are_not_known_to_differ(tmp_path: Path) -> None:
    for name, dtype in (("base", np.float16), ("trained", np.float32)):
        (tmp_path / name).mkdir()
        save_file({"w": np.ones(4, dtype)}, tmp_path / name / "model.safetensors")
    assert not differ(tmp_path / "base", tmp_path / "trained")


@pytest.mark.parametrize("uri", ["/a/b c", "file:///a/b%20c", "file://localhost/a/b c"])
def test_paths_and_file_uris_name_a_directory(uri: str) -> None:
    assert directory_of(uri) == Path("/a/b c")


@pytest.mark.parametrize("uri", ["s3://bucket/a", "file://elsewhere/a", "relative/path"])
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(SnapshotError, match=uri):
        directory_of(uri)
