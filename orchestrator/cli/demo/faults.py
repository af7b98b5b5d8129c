"""The faults: signals to exactly the process that is meant, each one counted.

Which process is a core or a server follows from what the agent recorded on the bus and from parentage and
title in /proc; a signal goes through a pidfd whose process was compared by start time, so no other is hit.
"""

import os
import signal
import time
from collections.abc import Iterable
from typing import Literal

from relight.events.facts import EngineStarted
from relight.events.values import Process
from relight.orchestrator.cli.demo import processes
from relight.orchestrator.cli.demo.bulletin import Bulletin
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Fault, Injection, Struck
from relight.orchestrator.cli.demo.services import Services

CORE = "EngineCore"
"""In the core's title, of vLLM and of the stub."""


def inject(fault: Fault, started: EngineStarted, *, services: Services, bulletin: Bulletin) -> Injection:
    """Strike the incarnation (and relight's own process, where the fault says so); what was done.

    Raises DemoFailed where a process that is meant is not there.
    """
    core, server = core_of(started.processes), server_of(started.processes)
    facts, decisions = bulletin.facts, bulletin.decisions
    at_ms, wall_ms = time.monotonic() * 1000.0, int(time.time() * 1000)
    struck: list[Struck] = []
    match fault:
        case "kill-core":
            struck += [_strike("core", core, signal.SIGKILL)]
        case "kill-server":
            struck += [_strike("server", server, signal.SIGKILL)]
        case "stall":
            struck += [_strike("core", core, signal.SIGSTOP)]
        case "kill-agent":
            struck += [_strike("agent", services["agent"].process, signal.SIGKILL)]
            struck += [_strike("core", core, signal.SIGKILL)]
        case "kill-orchestrator":
            struck += [_strike("orchestrator", services["orchestrator"].process, signal.SIGKILL)]
            struck += [_strike("core", core, signal.SIGKILL)]
    return Injection(
        engine=started.engine,
        incarnation=started.incarnation,
        struck=tuple(struck),
        at_ms=at_ms,
        wall_ms=wall_ms,
        facts=facts,
        decisions=decisions,
    )


def core_of(recorded: Iterable[Process]) -> Process:
    """The recorded process that bears the core's title; raises DemoFailed."""
    found = [process for process in recorded if CORE in processes.title(process.pid).partition(" ")[0]]
    found = found or [process for process in recorded if CORE in processes.title(process.pid)]
    if len(found) != 1:
        raise DemoFailed(f"{len(found)} of the recorded processes are a core")
    return found[0]


def server_of(recorded: Iterable[Process]) -> Process:
    """The recorded process that no other recorded one is the parent of; raises DemoFailed."""
    all_ = list(recorded)
    pids = {process.pid for process in all_}
    found = [process for process in all_ if processes.parent(process.pid) not in pids]
    if len(found) != 1:
        raise DemoFailed(f"{len(found)} of the recorded processes are a server")
    return found[0]


def _strike(
    what: Literal["core", "server", "agent", "orchestrator"], process: Process, number: signal.Signals
) -> Struck:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise DemoFailed(f"{what} (pid {process.pid}) is gone before the fault") from None
    try:
        if not processes.alive(process):
            raise DemoFailed(f"{what} (pid {process.pid}) is gone before the fault")
        signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)
    return Struck(what=what, process=process, signal=int(number))
