"""What is read for those who look: many jobs at once, on every kind of server; and what is wrong in them."""

from typing import Any

import msgspec
import pytest

from relight.events.bus.client import open_bus
from relight.events.bus.survey import Found, Glance
from relight.events.decisions import StopEngine
from relight.events.ids import BEGINNING, BootId, DecisionId, EngineName, JobName, NodeName, RecoveryId
from relight.events.schema import EngineState, Left, Meta, NodeRecord, Recovery, Snapshot
from relight.events.values import Phase
from relight.orchestrator.annals import TYPES
from relight.orchestrator.concerns import Concern, Seen, concerns
from relight.orchestrator.settings import Settings
from tests import cli_job
from tests.dashboard_rig import LargeJob

JOB = JobName("grpo-1")
E0, A = EngineName("e0"), NodeName("a")
NOW = 1_000_000


@pytest.mark.anyio
async def test_jobs_are_read_together_on_every_kind_of_server(bus_url: str) -> None:
    await cli_job.record(bus_url, "small")
    async with open_bus(bus_url) as bus:
        await LargeJob(bus, "large", engines=9).put()
        survey, jobs = bus.survey(), [JobName("large"), JobName("none"), JobName("small")]
        large, none, small = await survey.glance(jobs)
        assert isinstance(large, Glance) and isinstance(small, Glance)
        assert none == Glance(0, 0, BEGINNING, None, None, 0, 0)
        assert (small.parked, small.behind, large.parked) == (1, 6, 0)
        assert small.holder is not None and small.holder.endswith(":host-1")
        assert small.lease_left_s is not None and 500 < small.lease_left_s <= 600
        states = await survey.states(jobs)
        assert [len(state.engines) for state in states if isinstance(state, Snapshot)] == [9, 0, 2]
        [found] = await survey.decisions({JobName("large"): BEGINNING}, types=TYPES)
        assert isinstance(found, Found) and not found.more
        assert [entry.type for entry in found.entries].count("RecoveryFinished") == 9
        assert found.last == large.tail
        [again] = await survey.decisions({JobName("large"): found.last}, types=TYPES)
        assert again == Found([], found.last, more=False)


def found(*, holder: str | None = "5:host", meta: Meta | None = None, **fields: Any) -> list[Concern]:
    """What is to be looked at in a job with one engine like that."""
    engine = EngineState(**{"node": A, "phase": Phase.SERVING, "since": NOW - 2000, **fields})
    snapshot = Snapshot(meta=meta or Meta(birth="x", bus="s"), engines={E0: engine})
    seen = Seen(now_ms=NOW, holder=holder, stamp="s")
    return list(concerns(JOB, snapshot, Settings(), seen))


def test_a_job_that_is_well_asks_for_nothing() -> None:
    assert found() == []
    assert found(phase=Phase.STARTING) == []


def told(**what: Any) -> tuple[str, str, str | None]:
    [concern] = found(**what)
    return concern.level, concern.kind, concern.do


def test_what_is_wrong_is_named_with_the_command_that_ends_it() -> None:
    recovery = Recovery(
        id=RecoveryId("e0.1-5-7"), incarnation=1, why="died", approved=False, began=NOW - 9000
    )
    stop = StopEngine(
        id=DecisionId("5-1"), epoch=5, reason="r", engine=E0, incarnation=1, node=A, deadline=NOW - 100
    )
    meta = Meta(birth="x", bus="s")
    release = "relight release e0 --job grpo-1"
    silent = NodeRecord(boot=BootId("b"), silent=True)
    old = Left(incarnation=1, node=A)
    assert told(holder=None) == ("alarm", "orchestrator", "relight orchestrate --job grpo-1")
    assert told(recovery=recovery) == ("alarm", "approval", "relight approve e0.1-5-7 --job grpo-1")
    assert told(phase=Phase.RETIRED, retired_because="its budget is spent") == ("alarm", "retired", release)
    assert told(phase=Phase.STOPPED, wished=True) == ("note", "stopped", release)
    assert told(phase=Phase.STALE) == ("look", "stale", None)
    assert told(phase=Phase.STALE, alarmed=True) == ("alarm", "stale", None)
    assert told(phase=Phase.STOPPING, alarmed=True) == ("alarm", "stop", None)
    assert told(intent=stop) == ("look", "overdue", None)
    assert told(suspected=True) == ("look", "suspected", None)
    assert told(left=(old,)) == ("look", "left", None)
    assert told(meta=replaced(meta, hold=True)) == ("note", "hold", "relight release --job grpo-1")
    assert told(meta=replaced(meta, trainer_silent=True)) == ("alarm", "trainer", None)
    assert told(meta=replaced(meta, nodes={A: silent})) == ("alarm", "node", None)
    assert told(meta=replaced(meta, bus="another")) == ("alarm", "bus", None)
    low = replaced(meta, below_floor=NOW - 5000, floor_alarmed=True)
    assert told(phase=Phase.STARTING, meta=low) == ("alarm", "floor", None)


def replaced(meta: Meta, **fields: Any) -> Meta:
    return msgspec.structs.replace(meta, **fields)


def test_a_job_that_has_ended_waits_for_nobody() -> None:
    assert found(holder=None, phase=Phase.STALE, meta=Meta(birth="x", bus="s", finished=True)) == []
