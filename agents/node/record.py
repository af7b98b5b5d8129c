"""What an agent keeps on disk: who it is, the highest epoch it obeyed, and one record for each engine.

Each file is replaced atomically and fsynced before the step it speaks of is taken, so a successor that
finds the state directory can take up any step again. While the disk takes nothing, what need not be there
first waits in memory, and is written as soon as it does. One process at a time holds the directory.
"""

import fcntl
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from relight.agents.node import proc
from relight.agents.node.devices import Before
from relight.agents.node.marks import Role
from relight.agents.node.ports import QUARANTINE_S
from relight.agents.node.shm import Segment
from relight.events import codec
from relight.events.decisions import LoadWeights, StartEngine, StopEngine
from relight.events.errors import Undecodable, UsageError
from relight.events.facts import EngineStopped, StartFailed
from relight.events.ids import BootId, EngineName
from relight.events.values import Canary, Process
from relight.events.version import Version

log = logging.getLogger(__name__)

T = TypeVar("T")

RANDOM = "random"
"""In place of a folder: of weights that an engine makes up, which is started without any."""


class Member(NamedTuple):
    """A process that belonged to the incarnation."""

    process: Process
    role: Role


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as its agent last knew it."""

    engine: EngineName
    incarnation: int = 0
    phase: Literal["absent", "starting", "up", "stopping"] = "absent"
    """`up` until its stop is asked for, also when it is dead."""
    dead: bool = False
    """Its death was told."""
    paused: bool = True
    tag: str = ""
    tmpdir: str = ""
    port: int | None = None
    address: str | None = None
    """As others reach it."""
    local: str | None = None
    """As this agent reaches it."""
    host_boot: str = ""
    leader: Process | None = None
    asked: Process | None = None
    """The application that was asked to start it and has neither answered nor ended."""
    members: tuple[Member, ...] = ()
    segments: tuple[Segment, ...] = ()
    devices: tuple[Before, ...] = ()
    """The devices that it runs on, as they were before it."""
    began_ns: int = 0
    """Unix time at which it was started."""
    seconds: float = 0.0
    """That its start took."""
    good_start_s: float | None = None
    """Seconds that the engine's last good start took, of whatever incarnation."""
    started_on: Version | None = None
    version: Version | None = None
    """Of the weights that this agent loaded and labelled; none for those it started on."""
    digest: str | None = None
    uri: str | None = None
    """Of the snapshot that holds these weights; none for the base model and for weights that were pushed."""
    reloads: bool | None = None
    """Whether a reload of its weights leaves them as they are; none where that was not tried."""
    canary: Canary | None = None
    """The last one that was good: that of its start before the first proof."""
    canary_of: str | None = None
    """The folder of the weights that it was made with, or RANDOM; none where nobody knows one."""
    start: StartEngine | None = None
    stop: StopEngine | None = None
    load: LoadWeights | None = None
    """A load that may have touched the engine and is not answered yet."""
    ended: EngineStopped | StartFailed | None = None
    """How the incarnation ended, told again to whoever asks again."""
    then: Literal["restart", "drained", "retired"] = "restart"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent as a whole remembers."""

    max_epoch: int = 0
    run: int = 0
    ports: dict[int, float] = {}
    """Ports that were used, and the Unix time until which they rest."""


class Store:
    """A state directory, held by one process until `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            (directory / "engines").mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._is = directory.stat().st_ino
        except OSError as error:
            raise UsageError(f"state_dir {str(directory)!r} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UsageError(f"state_dir {str(directory)!r} is held by another running agent") from error
        self._waiting: dict[Path, bytes] = {}
        """What could not be written."""
        self.boot = self._boot()
        self.host_boot = proc.host_boot()
        self.known = self._read(directory / "agent.json", Known) or Known()

    def close(self) -> None:
        os.close(self._lock)

    def beat(self) -> None:
        """Show that this process works: the lock's file changes. What watches the agent may look at that.

        Raises UsageError where the directory was taken away: another agent may hold one of its name.
        """
        try:
            os.utime(self._lock)
        except OSError as error:  # of a disk that fails, which is no reason to let go of engines
            log.debug("no sign of life in the state directory error=%s", error)
        try:
            there = self.directory.stat().st_ino == self._is
        except FileNotFoundError:
            there = False
        if not there:
            raise UsageError(
                f"state_dir {str(self.directory)!r} was removed under this agent;"
                " its engines serve on, and the next agent takes them up"
            )
        for path, data in list(self._waiting.items()):
            self.put(path, data)

    def _boot(self) -> BootId:
        path = self.directory / "boot"
        try:
            if not path.exists():
                write(path, secrets.token_hex(16).encode())
            return BootId(path.read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be used: {error}") from error

    def put(self, path: Path, data: bytes, *, first: bool = False) -> None:
        """Write `data`, on disk when this returns, or as soon as the disk takes it.

        `first`: at once or not at all; raises OSError.
        """
        try:
            path.parent.mkdir(exist_ok=True)
            write(path, data)
        except OSError as error:
            if first:
                raise
            if not self._waiting:
                log.error("the state directory cannot be written, records wait in memory error=%s", error)
            self._waiting[path] = data
        else:
            if self._waiting.pop(path, None) is not None and not self._waiting:
                log.info("the state directory is written again")

    def keep(self, known: Known) -> None:
        """Remember `known`."""
        if known != self.known:
            self.put(self.directory / "agent.json", codec.to_json(known).encode())
            self.known = known

    def stays(self, kind: type[T], none: T) -> T:
        """What was kept of engines that are not at their own places."""
        return self._read(self.directory / "stays.json", kind) or none

    def keep_stays(self, stays: object) -> None:
        """Remember where such engines are."""
        self.put(self.directory / "stays.json", codec.to_json(stays).encode())

    def raise_epoch(self, epoch: int) -> None:
        """Remember the highest epoch, before a decision of it is obeyed."""
        if epoch > self.known.max_epoch:
            self.keep(msgspec.structs.replace(self.known, max_epoch=epoch))

    def raise_run(self, run: int) -> None:
        """Remember the highest run."""
        if run > self.known.run:
            self.keep(msgspec.structs.replace(self.known, run=run))

    def rest(self, port: int) -> None:
        """Put a port into quarantine."""
        now = time.time()
        resting = {each: until for each, until in self.known.ports.items() if until > now}
        self.keep(msgspec.structs.replace(self.known, ports={**resting, port: now + QUARANTINE_S}))

    def resting(self) -> set[int]:
        """The ports in quarantine."""
        return {port for port, until in self.known.ports.items() if until > time.time()}

    def folder(self, engine: EngineName) -> Path:
        return self.directory / "engines" / engine

    def log(self, engine: EngineName, incarnation: int) -> Path:
        """The engine's output."""
        return self.folder(engine) / str(incarnation) / "log"

    def record(self, engine: EngineName) -> Record | None:
        """The engine's record, or None where there never was one; raises UsageError where it is spoilt."""
        return self._read(self.folder(engine) / "record.json", Record)

    def save(self, record: Record, *, first: bool = False) -> None:
        """Replace the engine's record, as `put` does."""
        self.put(self.folder(record.engine) / "record.json", codec.to_json(record).encode(), first=first)

    @staticmethod
    def _read(path: Path, kind: type[T]) -> T | None:
        try:
            return codec.from_json(path.read_bytes(), kind)
        except FileNotFoundError:
            return None
        except Undecodable as error:
            raise UsageError(f"{path} is not what this relight wrote: {error}") from error


def write(path: Path, data: bytes) -> None:
    """Put `data` at `path` atomically and durably."""
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
