"""Why an engine is dead, where a failing call and the end of a process race to say so."""

from collections.abc import Callable
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from relight.agents.node import inquest, proc, shortage
from relight.agents.node.inquest import Inquest, Verdict
from relight.agents.node.owned import Owned
from relight.agents.node.pidfd import Status
from relight.agents.node.shortage import Shortage
from relight.agents.node.tree import Exit
from relight.events.ids import EngineName, JobName
from relight.events.values import Cause, Process

pytestmark = pytest.mark.anyio

CORE = Process(4_000_000, 1)
"""A process that is gone: whatever has its pid now was not started in the first tick after the boot."""


class _Tree:
    def __init__(self, *living: Process) -> None:
        self.living = living
        self.vital = living


class _Owned:
    name = EngineName("e0")
    job = JobName("job")

    def __init__(self, *living: Process) -> None:
        self.tree = _Tree(*living)
        self.shortage = Shortage()


def _inquest(owned: _Owned, *, tell: Callable[[Verdict], None]) -> Inquest:
    return Inquest(cast("Owned", owned), tell=tell)


async def test_a_failing_call_waits_for_the_end_of_the_process_that_made_it_fail() -> None:
    told: list[str] = []

    def end(verdict: Verdict) -> None:
        told.append(verdict.cause.value)

    heard = _inquest(_Owned(CORE), tell=end)
    heard.if_nothing_ends(lambda: told.append("stall"))
    assert told == []
    heard.hear(Exit(CORE, "core", Status(signal=9), 0.0))
    await anyio.wait_all_tasks_blocked()
    await anyio.lowlevel.checkpoint()
    assert told == [Cause.SIGNAL]


@pytest.mark.parametrize(
    ("looks_s", "ended_s", "cause"),
    [
        ((0, 30, 60), 60.5, Cause.SIGNAL),  # the kernel's kill of long ago was another engine's
        ((0, 30, 60, 64.9, 65.1, 69, 73), 74, Cause.OOM),  # it took nine seconds to free what it held
        ((0,), 80, Cause.OOM),
        ((), 80, Cause.SIGNAL),
    ],
)
async def test_a_kill_for_memory_is_told_apart_also_where_the_end_comes_late(
    looks_s: tuple[float, ...], ended_s: float, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def look(at_s: float) -> None:
        nonlocal now_s
        now_s = at_s
        owned.shortage.look()

    monkeypatch.setattr(shortage, "monotonic_ms", lambda: 1000.0 * now_s)
    monkeypatch.setattr(proc, "oom_kills", lambda: (now_s >= 20) + (now_s >= 65))
    owned = _Owned(CORE)
    for each_s in looks_s:
        look(each_s)
    now_s = ended_s
    told: list[Cause] = []
    heard = _inquest(owned, tell=lambda verdict: told.append(verdict.cause))
    heard.hear(Exit(CORE, "core", Status(signal=9), 0.0))
    await anyio.wait_all_tasks_blocked()
    await anyio.lowlevel.checkpoint()
    assert told == [cause]


async def test_a_process_that_never_ends_does_not_hold_a_stall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquest, "ENDING_S", 0.01)
    told = anyio.Event()
    heard = _inquest(_Owned(CORE), tell=lambda verdict: None)
    heard.if_nothing_ends(told.set)
    assert not told.is_set()
    with anyio.fail_after(5.0):
        await told.wait()


async def test_a_stall_of_living_processes_is_told_at_once() -> None:
    told: list[str] = []
    heard = _inquest(_Owned(), tell=lambda verdict: None)
    heard.if_nothing_ends(lambda: told.append("stall"))
    assert told == ["stall"]
