"""SnapshotSync: what stands under a version's name is whole, whatever happened while it was written."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relight.agents.snapshot import (
    MANIFEST,
    Manifest,
    SnapshotError,
    check,
    describe,
    digest_of,
    read_manifest,
)
from relight.agents.trainer import places
from relight.agents.trainer.snapshot import SnapshotSync, adopt
from relight.agents.trainer.sync import Context
from relight.events.errors import UsageError
from relight.events.ids import EngineName
from relight.events.values import Member
from relight.events.version import Version

ARRAYS: dict[str, Any] = {
    "embed.weight": np.arange(32, dtype=np.float32).reshape(4, 8),
    "norm.weight": np.ones(8, dtype=np.float16),
    "scale": np.float64(3.0) * np.ones(()),
    "strided": np.arange(64, dtype=np.int64).reshape(8, 8)[::2, ::2],
    "empty": np.zeros((0, 3), dtype=np.float32),
    "big endian": np.arange(4, dtype=">i4"),
    "mask": np.array([True, False]),
}


def loaded(directory: Path) -> dict[str, Any]:
    return {
        name: array
        for file in sorted(directory.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_other_readers_load_what_was_written(tmp_path: Path) -> None:
    sync = SnapshotSync(ARRAYS, tmp_path, config={"model_type": "stub"})
    weights = sync.write(Version(7, 0))
    directory = Path(weights.uri)
    assert directory == tmp_path / "7.0"
    assert names(directory) == ["config.json", "model.safetensors", MANIFEST]
    found = loaded(directory)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("=")
    manifest = check(directory, weights.digest)
    assert manifest.tensors == describe(directory, Version(7, 0)).tensors
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "stub"}
    sync.close()


def test_large_models_are_sharded_with_an_index(tmp_path: Path) -> None:
    arrays = {f"layer.{i}": np.full(100, i, dtype=np.float32) for i in range(5)}
    sync = SnapshotSync(lambda: arrays, tmp_path, max_shard_bytes=900)
    directory = Path(sync.write(Version(7, 0)).uri)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(directory) == [*shards, "model.safetensors.index.json", MANIFEST]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(directory / file)[name], arrays[name])
    sync.close()


def test_a_version_that_stands_is_not_written_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def model() -> dict[str, Any]:
        calls.append(1)
        return ARRAYS

    sync = SnapshotSync(model, tmp_path)
    first = sync.write(Version(7, 0))
    assert sync.write(Version(7, 0)) == first
    assert len(calls) == 1
    sync.close()
    again = SnapshotSync(model, tmp_path)
    assert again.write(Version(7, 0)) == first
    assert len(calls) == 1
    again.close()


def test_a_damaged_version_is_written_again(tmp_path: Path) -> None:
    first = SnapshotSync(ARRAYS, tmp_path)
    weights = first.write(Version(7, 0))
    first.close()
    shard = Path(weights.uri) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    second = SnapshotSync(ARRAYS, tmp_path)
    assert second.write(Version(7, 0)) == weights
    check(Path(weights.uri), weights.digest)
    second.close()


def test_only_the_newest_versions_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    sync = SnapshotSync(ARRAYS, tmp_path, keep=2)
    for step in range(4):
        sync.write(Version(7, step))
    sync.close()
    assert names(tmp_path) == ["7.2", "7.3", "notes"]
    later = SnapshotSync(ARRAYS, tmp_path, keep=2)
    later.write(Version(8, 0))
    later.close()
    assert names(tmp_path) == ["7.3", "8.0", "notes"]


def test_a_version_that_an_engine_is_loading_is_never_removed(tmp_path: Path) -> None:
    used = {Version(7, 0)}
    sync = SnapshotSync(ARRAYS, tmp_path, keep=2)
    sync.bind(Context(in_use=lambda: used))
    for step in range(4):
        sync.write(Version(7, step))
    sync.close()
    assert names(tmp_path) == ["7.0", "7.2", "7.3"]
    used.clear()
    sync.write(Version(7, 4))
    sync.close()
    assert names(tmp_path) == ["7.3", "7.4"]


def test_a_standing_version_that_lost_bytes_is_written_again_when_it_is_asked_for(tmp_path: Path) -> None:
    sync = SnapshotSync(ARRAYS, tmp_path)
    weights = sync.write(Version(7, 0))
    shard = Path(weights.uri) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert sync.write(Version(7, 0)) == weights
    check(Path(weights.uri), weights.digest)
    sync.close()


def elsewhere(host: str) -> Member:
    return Member(EngineName("e0"), 1, f"http://{host}:8000")


def test_a_directory_of_this_machine_is_refused_where_engines_run_elsewhere(tmp_path: Path) -> None:
    if places.file_system(tmp_path) not in places.LOCAL:
        pytest.skip(f"{tmp_path} may be shared: it is on {places.file_system(tmp_path)}")
    sync = SnapshotSync(ARRAYS, tmp_path)
    away = elsewhere("192.0.2.7")  # of the block for documentation: nobody has it
    for _ in range(2):  # nothing stands afterwards that could be handed out the second time
        with pytest.raises(UsageError, match=r"only this machine reaches, and e0 \(http://192.0.2.7:8000\)"):
            sync.write(Version(7, 0), members=[elsewhere("127.0.0.1"), away])
    sync.write(Version(7, 0), members=[elsewhere("127.0.0.1"), elsewhere(socket.gethostname())])
    with pytest.raises(UsageError, match="shared=True"):
        sync.write(Version(7, 0), members=[away])
    sync.close()
    shared = SnapshotSync(ARRAYS, tmp_path, shared=True)
    assert shared.write(Version(7, 1), members=[away]).version == Version(7, 1)
    shared.close()


def test_a_name_that_nobody_knows_is_left_to_the_agents(tmp_path: Path) -> None:
    assert places.told(tmp_path, [elsewhere("no-such-host.invalid")]) is None


def test_what_a_killed_life_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "7.3-0a1b2c3d.partial").mkdir()
    (tmp_path / "9.0-0a1b2c3d.partial").mkdir()
    sync = SnapshotSync(ARRAYS, tmp_path)
    sync.write(Version(8, 0))
    sync.close()
    assert names(tmp_path) == ["8.0", "9.0-0a1b2c3d.partial"]


def test_a_dtype_that_no_file_holds_leaves_nothing_behind(tmp_path: Path) -> None:
    sync = SnapshotSync({"a": np.zeros(2), "b": np.array(["text"])}, tmp_path)
    with pytest.raises(UsageError, match="tensor 'b' has dtype"):
        sync.write(Version(7, 0))
    assert names(tmp_path) == []


def test_a_full_disk_is_told_before_a_byte_is_written(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.float64(0), (1 << 45,))
    sync = SnapshotSync({"huge": huge}, tmp_path)
    with pytest.raises(SnapshotError, match=r"needs 281474976710656 bytes, .* has \d+ free"):
        sync.write(Version(7, 0))
    assert names(tmp_path) == []


def test_a_write_that_fails_halfway_is_told_and_removed(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: the same error from the same call."""
    program = f"""
import resource, sys
import numpy as np
from pathlib import Path
from relight.agents.snapshot import SnapshotError
from relight.agents.trainer.snapshot import SnapshotSync
from relight.events.version import Version
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
sync = SnapshotSync({{"a": np.zeros(1_000_000)}}, {str(tmp_path)!r})
try:
    sync.write(Version(7, 0))
except SnapshotError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("snapshot 7.0 cannot be written to ")
    assert "File too large" in done.stdout
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "below").write_text("a file where the directory should be")
    with pytest.raises(SnapshotError, match="cannot be written"):
        SnapshotSync(ARRAYS, tmp_path / "below").write(Version(7, 0))


def test_config_and_tokenizer_are_copied_without_weights(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
        MANIFEST,
    ):
        (base / name).write_text(name)
    sync = SnapshotSync(ARRAYS, tmp_path / "out", config=base)
    directory = Path(sync.write(Version(7, 0)).uri)
    sync.close()
    assert names(directory) == ["config.json", "model.safetensors", MANIFEST, "tokenizer.json"]
    assert [file.name for file in read_manifest(directory).files] == [*names(directory)[:2], "tokenizer.json"]
    assert loaded(directory).keys() == ARRAYS.keys()


def test_wrong_arguments_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=1"):
        SnapshotSync(ARRAYS, tmp_path, keep=1)
    with pytest.raises(UsageError, match="max_shard_bytes=0"):
        SnapshotSync(ARRAYS, tmp_path, max_shard_bytes=0)
    with pytest.raises(UsageError, match="publish_every=0"):
        SnapshotSync(ARRAYS, tmp_path, publish_every=0)
    with pytest.raises(UsageError, match="not int"):
        SnapshotSync(3, tmp_path)


def test_the_applications_own_weights_are_adopted(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    digest = adopt(tmp_path, Version(7, 3))
    assert check(tmp_path, digest).version == Version(7, 3)
    assert adopt(tmp_path, Version(7, 3)) == digest == digest_of(read_manifest(tmp_path))
    with pytest.raises(SnapshotError, match=r"holds version 7\.3, not 7\.4"):
        adopt(tmp_path, Version(7, 4))


def test_what_an_older_run_published_is_taken_up_with_every_byte_read(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    older = adopt(tmp_path, Version(7, 3))
    files = read_manifest(tmp_path).files
    with pytest.raises(SnapshotError, match=r"holds version 7\.3, not 6\.3"):
        adopt(tmp_path, Version(6, 3))

    digest = adopt(tmp_path, Version(8, 2))
    assert check(tmp_path, digest) == Manifest(
        version=Version(8, 2), files=files, tensors=read_manifest(tmp_path).tensors
    )
    assert names(tmp_path) == ["config.json", "model.safetensors", MANIFEST]
    with pytest.raises(SnapshotError, match=r"its digest is .*, expected"):
        check(tmp_path, older)

    for name, data in (("config.json", "[]"), ("more.safetensors", "")):
        kept = (tmp_path / name).read_text() if (tmp_path / name).exists() else None
        (tmp_path / name).write_text(data)
        with pytest.raises(SnapshotError, match=rf"not what was published as 8\.2 \(.*{name}: .*remove its"):
            adopt(tmp_path, Version(9, 0))
        assert digest_of(read_manifest(tmp_path)) == digest
        if kept is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_text(kept)
    (tmp_path / MANIFEST).unlink()
    assert check(tmp_path, adopt(tmp_path, Version(9, 0))).version == Version(9, 0)
