"""A state directory that cannot be written, or is taken away: engines are kept, and nothing wrong is said."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import pytest

from relight.agents.node import record as records
from relight.agents.node.record import Record, Store
from relight.events.bus.embedded import Embedded
from relight.events.errors import UsageError
from relight.events.facts import (
    EngineDead,
    EngineStarted,
    EngineStopped,
    Healthy,
    NodeUp,
    StartFailed,
    WeightsFailed,
    WeightsLoaded,
)
from relight.events.ids import EngineName
from relight.events.version import BASE, Version
from tests.node_support import (
    E0,
    agent_process,
    alive,
    directing,
    engine,
    kill,
    node_file,
    playing,
    record,
    role,
    running,
    swept,
    write_snapshot,
)
from tests.orchestrator_support import until

pytestmark = pytest.mark.anyio
V1 = Version(7, 1)


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file of the state directory can be replaced meanwhile."""

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(records, "write", refuse)
        yield


async def test_on_a_full_disk_engines_are_kept_and_what_a_successor_must_know_is_not_begun(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, digest = write_snapshot(tmp_path / "w1", V1, seed=1)
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        with full(monkeypatch):
            failed = await player.ask(WeightsFailed, player.load(V1, uri, digest))
            assert not failed.touched and "No space left on device" in failed.error
            assert (await player.ask(Healthy, player.verify(BASE))).version == BASE
            kill(role(file, "core"))
            await player.wait(EngineDead)
            stopped = await player.ask(EngineStopped, player.stop())
            assert set(started.processes) <= set(stopped.proof.processes)
            refused = await player.ask(StartFailed, player.start(2))
            assert refused.cause == "resources" and refused.retryable
            assert "No space left on device" in refused.detail
            assert record(file).phase == "up", "the disk knows nothing of this"
        await until(lambda: record(file).phase == "absent", within_s=10)
        await player.ask(EngineStarted, player.start(3))
        assert (await player.ask(WeightsLoaded, player.load(V1, uri, digest, 3))).version == V1


async def test_on_a_full_disk_what_cannot_come_is_refused_and_nobody_is_taken_for_what_never_was(
    server: Embedded, tmp_path: Path, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    bystander = subprocess.Popen(["sleep", "60"], env={"TMPDIR": "", "RELIGHT_TAG": ""})
    try:
        async with directing(file, server.url) as player:
            with full(monkeypatch):
                stranger = await player.ask(StartFailed, player.start(engine=EngineName("x9")))
                assert (stranger.cause, stranger.retryable) == ("undefined", False)
                refused = await player.ask(StartFailed, player.start())
                assert refused.cause == "resources"
            assert bystander.poll() is None, "a record without a tag has no processes"
            await player.ask(EngineStarted, player.start(2))
    finally:
        bystander.kill()
        bystander.wait()


async def test_an_agent_whose_directory_is_taken_away_ends_and_its_successor_finds_the_engine(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    with swept(file):
        async with playing(server.url) as player:
            with agent_process(file, server.url, tmp_path / "node.json") as first:
                await player.wait(NodeUp)
                started = await player.ask(EngineStarted, player.start())
                shutil.rmtree(file.state_path)
                assert await anyio.to_thread.run_sync(first.wait, 20)
            assert all(map(alive, started.processes))
            async with running(file, server.url):
                up = await player.wait(NodeUp)
                assert [(report.state, report.incarnation) for report in up.engines] == [("unknown", 1)]
                stopped = await player.ask(EngineStopped, player.stop(processes=started.processes))
                assert set(started.processes) <= set(stopped.proof.processes)


def test_a_record_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near its end a disk takes a part of what is written, and says so by a number alone."""
    path = tmp_path / "record.json"
    records.write(path, b"before")
    whole, room = os.write, 3

    def short(fd: int, data: bytes) -> int:
        return whole(fd, bytes(data)[:room])

    monkeypatch.setattr(os, "write", short)
    records.write(path, b"all of it")
    assert path.read_bytes() == b"all of it"

    def no_more(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", no_more)
    with pytest.raises(OSError, match="No space"):
        records.write(path, b"lost")
    assert path.read_bytes() == b"all of it"


def test_what_waited_is_written_with_the_next_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    try:
        with full(monkeypatch):
            store.raise_epoch(7)
            for incarnation in (1, 2):
                store.save(Record(engine=E0, incarnation=incarnation))
            store.beat()
            with pytest.raises(OSError, match="No space"):
                store.save(Record(engine=E0, incarnation=3), first=True)
        assert caplog.text.count("records wait in memory") == 1
        assert store.record(E0) is None
        store.beat()
        found = store.record(E0)
        assert found is not None and found.incarnation == 2
    finally:
        store.close()
    again = Store(tmp_path)
    assert again.known.max_epoch == 7
    again.close()


@pytest.mark.parametrize("spoil", ["bytes", "folder"])
def test_a_spoilt_boot_is_one_sentence(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "boot"
    path.mkdir() if spoil == "folder" else path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="boot cannot be used"):
        Store(tmp_path)
