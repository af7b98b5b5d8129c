"""The demo as a service manager: it starts relight's commands, starts a killed one again, stops all in order.

Each service is a child in a session of its own with a log file; none outlives the demo, since a guard is
told of each. A service that may not end and does fails the demo.
"""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from relight.events.values import Process
from relight.orchestrator.cli.demo import processes
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.guard import Guard

LIVES = 4
"""Lives of a service that is started again: a fault takes one, more mean that it cannot run."""
STOP_S = 60.0
"""Longest wait for a service's end after SIGTERM: an agent stops its engines within it."""
SHOWN_LINES = 5


class Service:
    """One command, and the processes that run it one after another."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, env: dict[str, str], guard: Guard
    ) -> None:
        self.name = name
        self.log = log
        self.starting = False
        self._guard = guard
        self._command = command
        self._env = env
        self._process: asyncio.subprocess.Process | None = None
        self._codes: dict[int, int] = {}
        self._turn = anyio.Lock()
        self._stopping = False

    @property
    def exits(self) -> tuple[int, ...]:
        """Exit codes of its lives so far; -N: ended by signal N."""
        return tuple(self._codes.values())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def process(self) -> Process:
        """The process of its present life; raises DemoFailed where there is none."""
        found = processes.named(self.pid) if self.pid else None
        if found is None:
            raise DemoFailed(f"{self.name} does not run")
        return found

    async def start(self, *, fds: Sequence[int] = (), pipes: bool = False) -> None:
        """Start one life. `pipes`: standard input and output are ours, otherwise none and the log."""
        self.starting = True
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipes else log,
                stderr=log,
                env=self._env,
                pass_fds=fds,
                start_new_session=True,
            )
        self.starting = False
        if process := processes.named(self._process.pid):
            self._guard.note(process)

    async def say(self, line: str) -> None:
        """Write one line to its standard input."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended: its watcher tells
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()

    async def line(self, *, within_s: float) -> str:
        """The next line of its standard output; raises DemoFailed."""
        assert self._process is not None and self._process.stdout is not None
        with anyio.move_on_after(within_s):
            if line := await self._process.stdout.readline():
                return line.decode().rstrip("\n")
            await self._process.wait()
            raise DemoFailed(self._ended(self._process.returncode))
        raise DemoFailed(f"{self.name} said nothing within {within_s:g} s; see {self.log}")

    async def watch(self, *, again: bool) -> None:
        """Wait for its end; start it again as long as it may be, else fail where nobody asked for the end."""
        while True:
            code = await self._wait()
            async with self._turn:
                if self._stopping or (code == 0 and not again):
                    return
                if not again or len(self._codes) >= LIVES:
                    raise DemoFailed(self._ended(code))
                await self.start()

    async def stop(self) -> None:
        """SIGTERM, once, and SIGKILL where that does not help; returns when it has ended.

        A second SIGTERM would tell it to end at once, as a second Ctrl-C does.
        """
        async with self._turn:
            asked, self._stopping = self._stopping, True
        if self._process is None:
            return
        if process := processes.named(self._process.pid):
            self._guard.stopping(process)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if number is signal.SIGKILL or not asked:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
            with anyio.move_on_after(STOP_S):
                await self._wait()
                return
        raise DemoFailed(f"{self.name} (pid {self._process.pid}) does not end")

    async def wait(self, *, within_s: float) -> int:
        """Wait for its end by itself; the exit code. Raises DemoFailed."""
        with anyio.move_on_after(within_s):
            return await self._wait()
        raise DemoFailed(f"{self.name} does not end within {within_s:g} s; see {self.log}")

    async def _wait(self) -> int:
        process = self._process
        assert process is not None
        self._codes[process.pid] = await process.wait()
        return self._codes[process.pid]

    def _ended(self, code: int | None) -> str:
        last = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        said = "\n  ".join(last) or "nothing"
        return f"{self.name} ended with code {code}; its log {self.log} ends with:\n  {said}"


class Services:
    """All services of one demo, in the order of their start."""

    def __init__(self, tasks: TaskGroup, *, directory: Path, env: dict[str, str], guard: Guard) -> None:
        self._tasks = tasks
        self._directory = directory
        self._env = env
        self._guard = guard
        self._all: dict[str, Service] = {}

    def __getitem__(self, name: str) -> Service:
        return self._all[name]

    @property
    def exits(self) -> dict[str, tuple[int, ...]]:
        return {name: service.exits for name, service in self._all.items()}

    async def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        again: bool = False,
        fds: Sequence[int] = (),
        pipes: bool = False,
    ) -> Service:
        """Start a service and watch it. `again`: it is started again when it ends by itself or is killed."""
        service = Service(
            name, command, log=self._directory / f"{name}.log", env=self._env, guard=self._guard
        )
        self._all[name] = service
        await service.start(fds=fds, pipes=pipes)
        self._tasks.start_soon(_watch, service, again)
        return service

    def reap(self) -> None:
        """Take the exits of adopted orphans, as an init would; services are waited for by their watchers."""
        if not any(service.starting for service in self._all.values()):
            processes.reap([self._guard.pid, *(each.pid for each in self._all.values() if each.pid)])

    async def stop(self) -> None:
        """Stop all that still run, the last one first; safe to call twice."""
        for service in reversed(self._all.values()):
            await service.stop()


async def _watch(service: Service, again: bool) -> None:
    await service.watch(again=again)
