"""Starting the command of one incarnation: its port, its folder, its environment, its session, its log.

Invariant: the tag is on disk before the command is run, so whatever was started is found again.
"""

import os
import resource
import shutil
import signal
import stat
import time
from pathlib import Path

from relight.agents.node import environ, parts, ports, proc, sockets
from relight.agents.node.config import base_model
from relight.agents.node.errors import StartFailure
from relight.agents.node.logs import Pump
from relight.agents.node.marks import folder_of
from relight.agents.node.owned import Owned
from relight.events.decisions import StartEngine
from relight.events.values import Process

EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 -- read from the kernel, never listened on


def raise_file_limit() -> None:
    """Engines inherit it: the usual 1,024 descriptors are a knife's edge for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def prepare(owned: Owned, order: StartEngine) -> None:
    """Write down what is about to be started. Raises StartFailure where there is no port for it, OSError."""
    tag = owned.tag(order.incarnation)
    port = owned.config.port
    if port is None and not owned.config.part:
        try:
            port = ports.pick(owned.shared.ports())
        except ports.NoPort as error:
            raise StartFailure("EADDRINUSE", str(error)) from error
    owned.save(
        first=True,
        incarnation=order.incarnation,
        phase="starting",
        dead=False,
        paused=True,
        tag=tag,
        tmpdir=str(folder_of(tag)),
        port=port,
        address=None,
        local=None,
        host_boot=owned.shared.store.host_boot,
        leader=None,
        members=(),
        segments=(),
        devices=(),
        began_ns=time.time_ns(),
        seconds=0.0,
        started_on=None,
        version=None,
        digest=None,
        uri=None,
        asked=None,
        start=order,
        stop=None,
        load=None,
        ended=None,
        then="restart",
    )
    if owned.config.port is not None and port is not None and not ports.bindable(port):
        raise StartFailure("EADDRINUSE", f"port {port} is held by {holder(port)}")


def holder(port: int) -> str:
    """Who listens on `port`, for people."""
    inodes = {listener.inode for listener in sockets.listeners(port)}
    for pid in proc.all_stats() if inodes else ():
        if sockets.holds_socket(pid, inodes):
            return f"pid {pid} ({proc.command_line(pid)[:120]})"
    return "another user's process" if inodes else "nobody that listens"


def url(host: str, port: int | None) -> str:
    """The base URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_url(host: str, port: int | None) -> str:
    """The same from this machine, where it listens on `host`."""
    return url("127.0.0.1" if host in EVERY_ADDRESS else host, port)


def words_of(owned: Owned, weights: Path | None) -> dict[str, str]:
    """What the placeholders of the node file stand for in the prepared incarnation."""
    where, start = weights or base_model(owned.config), owned.record.start
    return {
        **({} if owned.record.port is None else {"port": str(owned.record.port)}),
        **parts.words(owned.config, (start.head if start else "") or owned.shared.host),
        "incarnation": str(owned.record.incarnation),
        **({"weights": str(where)} if where else {}),
    }


def run(owned: Owned, weights: Path | None) -> Process:
    """Run the command that was prepared; its first process. Raises StartFailure."""
    record, config = owned.record, owned.config
    words = words_of(owned, weights)
    environment = environ.environment(config, tag=record.tag, tmpdir=record.tmpdir, words=words)
    command = [environ.filled(word, words) for word in config.command]
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise StartFailure("command", f"{command[0]!r} is no program that can be run", retryable=False)
    try:
        make_folder(Path(record.tmpdir))
        owned.pump = Pump(owned.log_path)
    except OSError as error:
        raise StartFailure("resources", str(error)) from error
    try:
        pid = os.posix_spawn(
            program,
            command,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, owned.pump.writing, 1),
                (os.POSIX_SPAWN_DUP2, owned.pump.writing, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
        )
    except OSError as error:
        raise StartFailure("command", f"{program}: {error.strerror}", retryable=False) from error
    finally:
        owned.pump.handed_over()
    child = proc.read_stat(pid)
    assert child is not None, "a child stays in the process table until we reap it"
    return child.process


def make_folder(path: Path) -> None:
    """An empty folder of our own; what a crashed start of the same incarnation left is removed."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError as error:
        there = path.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
            raise StartFailure("tmpdir", f"{path} is in the way and not ours", retryable=False) from error
        shutil.rmtree(path)
        path.mkdir(mode=0o700)
