"""`delegated`: the application starts the engine, and the agent believes what the kernel confirms.

Invariant: who was asked is on disk before the question, and until that application has answered or ended
nothing is proven gone: it may still start what it was asked for.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import anyio

from relight.agents.node import environ, launch, marks, proc
from relight.agents.node.config import base_model
from relight.agents.node.delegated.desk import Answer, Application, Desk, Owing
from relight.agents.node.delegated.wire import Ended, Launch, Launched, LaunchFailed, Withdrawn
from relight.agents.node.errors import NotProven, StartFailure
from relight.agents.node.launcher import First
from relight.agents.node.marks import Marks, Role
from relight.agents.node.owned import Owned
from relight.agents.node.proc import Liveness
from relight.events.ids import EngineName
from relight.events.values import Process

log = logging.getLogger(__name__)

COME_S = 30.0
"""For an application to come that is not connected: long enough for it to be started again itself."""


class ByApplication:
    """The launcher of all delegated engines of one agent."""

    def __init__(self, desk: Desk, *, owner_of: Callable[[Process], EngineName | None]) -> None:
        """`owner_of`: the engine of this agent that a process is known to belong to."""
        self._desk = desk
        self._owner_of = owner_of

    async def launch(self, owned: Owned, weights: Path | None) -> First:
        application = await self._filler(owned)
        key = (owned.name, owned.record.incarnation)
        try:
            launch.make_folder(Path(owned.record.tmpdir))
        except OSError as error:
            raise StartFailure("resources", str(error)) from error
        owned.save(asked=application.process)
        self._desk.owed[key] = Owing(application, owned.record.began_ns)
        application.send(_order(owned, weights))
        who = f"the application (pid {application.process.pid})"
        owned.stage = f"{who} has not reported it"
        while key not in self._desk.answers:
            if application.ended:
                raise StartFailure("application", f"{who} ended before it reported the engine")
            await self._desk.changed()
        answer = self._desk.answers.pop(key)
        if isinstance(answer, LaunchFailed):
            owned.save(asked=None)
            raise StartFailure("application", f"{who}: {answer.detail}", retryable=answer.retryable)
        return self._taken(owned, answer, application.process)

    async def _filler(self, owned: Owned) -> Application:
        owned.stage = f"no application has come to {self._desk.where} to start it"
        with anyio.move_on_after(COME_S):
            while True:
                if application := self._desk.filler(owned.name):
                    return application
                await self._desk.changed()
        raise StartFailure("application", f"{owned.stage} within {COME_S:g} s")

    def _taken(self, owned: Owned, answer: Launched, application: Process) -> First:
        """Hold what was reported. Raises StartFailure where the kernel tells otherwise."""
        port = answer.port or owned.record.port
        if owned.config.port not in (None, port):
            raise StartFailure("application", f"it was reported at port {port}, not at {owned.config.port}")
        if not answer.processes:
            raise StartFailure("application", "it was reported without a process")
        wrong = self._hold(owned, answer.processes, application)
        owned.save(asked=None, port=port, members=owned.members())
        if wrong:
            raise StartFailure("application", f"it was reported with a process that {wrong}")
        return First(answer.processes, answer.host, answer.on_weights)

    def _hold(self, owned: Owned, processes: tuple[Process, ...], application: Process) -> str | None:
        """Hold those that are the engine's; what is wrong with the first one that is not."""
        wrong: str | None = None
        right: list[Process] = []
        for process in processes:
            odd = self._objection(owned, process, application)
            if odd is None:
                right.append(process)
            else:
                wrong = wrong or f"{odd} (pid {process.pid})"
        owned.note(leader=next(filter(_leads_a_session, right), None))
        tree = owned.watch()
        for place, process in enumerate(right):
            if not tree.add(process, _role(process, first=place == 0)) and process not in tree.living:
                wrong = wrong or f"is not alive (pid {process.pid})"
        return wrong

    def _objection(self, owned: Owned, process: Process, application: Process) -> str | None:
        if proc.liveness(process) is not Liveness.ALIVE:
            return "is not alive"
        if _user(process) != os.geteuid():
            return "is another user's"
        if process.pid in proc.ancestors(os.getpid()) | proc.ancestors(application.pid):
            return "is no engine but above it"
        owner = self._owner_of(process)
        if owner not in (None, owned.name):
            return f"belongs to {owner}"
        record = owned.record
        descends = application.pid in proc.ancestors(process.pid)
        if not descends and not marks.bears(process, Marks(record.tag, record.tmpdir, None)):
            return "is neither the application's child nor bears the engine's mark"
        return None

    async def withdraw(self, owned: Owned, *, within_s: float) -> None:
        if owned.record.asked is not None:
            owing = Owing(self._desk.know(owned.record.asked), owned.record.began_ns)
            self._desk.owed.setdefault((owned.name, owned.record.incarnation), owing)
        with anyio.move_on_after(within_s):
            await self._settled(owned)
            if owned.record.asked is not None:
                owned.note(asked=None)
            return
        waiting = sorted(
            {
                owed.application.process.pid
                for (name, _), owed in self._desk.owed.items()
                if name == owned.name
            }
        )
        text = (
            f"the application (pid {', '.join(map(str, waiting))}) was asked to start it and may still do so"
        )
        raise NotProven("application", text)

    async def _settled(self, owned: Owned) -> None:
        told: set[tuple[int, int]] = set()
        while True:
            for key, (application, number) in list(self._desk.owed.items()):
                name, incarnation = key
                if name != owned.name:
                    continue
                if application.ended:
                    del self._desk.owed[key]
                elif (incarnation, id(application.sending)) not in told:
                    application.send(Withdrawn(engine=name, incarnation=incarnation, number=number))
                    told.add((incarnation, id(application.sending)))
            for key in [key for key in self._desk.answers if key[0] == owned.name]:
                self._take_late(owned, self._desk.answers.pop(key))
            if not any(name == owned.name for name, _ in self._desk.owed):
                return
            await self._desk.changed()

    def _take_late(self, owned: Owned, answer: Answer) -> None:
        """What was started though nobody wants it any more: held, to be killed with the rest."""
        asked = owned.record.asked
        if isinstance(answer, LaunchFailed) or answer.incarnation != owned.record.incarnation or not asked:
            return
        if wrong := self._hold(owned, answer.processes, asked):
            log.warning("not the engine's engine=%s process=%s", owned.name, wrong)

    def ended(self, owned: Owned, incarnation: int, detail: str) -> None:
        self._desk.answers.pop((owned.name, incarnation), None)
        if application := self._desk.filler(owned.name):
            application.send(Ended(engine=owned.name, incarnation=incarnation, detail=detail))


def _order(owned: Owned, weights: Path | None) -> Launch:
    record, config = owned.record, owned.config
    assert record.port is not None
    words = launch.words_of(owned, weights)
    where = weights or base_model(config)
    return Launch(
        engine=owned.name,
        incarnation=record.incarnation,
        number=record.began_ns,
        port=record.port,
        command=tuple(environ.filled(word, words) for word in config.command),
        env=environ.environment(config, tag=record.tag, tmpdir=record.tmpdir, words=words, inherited={}),
        weights=str(where) if where else None,
        within_s=owned.seconds_until(record.start.deadline) if record.start else COME_S,
    )


def _user(process: Process) -> int | None:
    try:
        return os.stat(f"/proc/{process.pid}").st_uid  # noqa: PTH116
    except OSError:
        return None


def _leads_a_session(process: Process) -> bool:
    stat = proc.read_stat(process.pid)
    return stat is not None and stat.process == process and stat.session == process.pid


def _role(process: Process, *, first: bool) -> Role:
    role = marks.role_of(proc.command_line(process.pid))
    return role if role != "other" else "leader" if first else "worker"
