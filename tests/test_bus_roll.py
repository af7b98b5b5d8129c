"""Calls over many jobs at once, on every kind of server: each job has its own answer."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from relight.events import keys
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.job import Lease, Numbered, Pulse
from relight.events.bus.roll import Asked, Beat, Held, Looked, Presence
from relight.events.errors import BusUnavailable
from relight.events.facts import NodeUp
from relight.events.ids import BEGINNING, BootId, JobName, NodeName, Source

pytestmark = pytest.mark.anyio

ONE, TWO, THREE = JobName("one"), JobName("two"), JobName("three")
AGENT, BOOT = Source("agent/a"), BootId("b")
UP = NodeUp(node=NodeName("a"), boot=BOOT)
TTL_MS = 60_000


@pytest.fixture
async def bus(bus_url: str) -> AsyncIterator[Bus]:
    async with open_bus(bus_url) as opened:
        yield opened


@pytest.fixture
async def raw(bus: Bus) -> Any:
    """The server behind relight's back."""
    return bus.reader()


async def taken(bus: Bus, *jobs: JobName, holder: str = "me") -> list[Lease]:
    leases, _ = await bus.roll().take([Asked(job, TTL_MS, 0) for job in jobs], holder=holder)
    assert all(isinstance(lease, Lease) for lease in leases)
    return [lease for lease in leases if isinstance(lease, Lease)]


def held(job: JobName, lease: Lease, **more: Any) -> Held:
    return Held(job, lease, **{"ttl_ms": TTL_MS, "anchor": BEGINNING, **more})


def shown(look: Looked | BusUnavailable) -> tuple[Any, ...]:
    assert isinstance(look, Looked)
    return look.renewed, look.pulses, look.seen


async def test_leases_are_taken_where_they_are_free_and_the_jobs_are_enrolled(bus: Bus) -> None:
    await taken(bus, TWO, holder="other")
    (one, two, three), stamp = await bus.roll().take(
        [Asked(ONE, TTL_MS, 0), Asked(TWO, TTL_MS, 0), Asked(THREE, TTL_MS, 10**15)], holder="me"
    )
    assert isinstance(one, Lease) and two is None
    assert isinstance(three, Lease) and three.epoch == 10**15 + 1
    assert stamp == await bus.stamp()
    assert await bus.roll().holders([ONE, TWO, THREE, JobName("four")]) == ["me", "other", "me", None]
    assert await bus.jobs() == [ONE, THREE, TWO]


async def test_a_look_renews_and_shows_each_jobs_pulses(bus: Bus, raw: Any) -> None:
    one, two = await taken(bus, ONE, TWO)
    await bus.job(TWO).append([Numbered(3, UP, 0)], source=AGENT, boot=BOOT)
    await bus.job(TWO).pulse(AGENT, Pulse(BOOT, 7))
    looks = await bus.roll().look(
        [
            held(ONE, one, ttl_ms=2 * TTL_MS),
            held(TWO, Lease("other", 1), trim=10, seen=True),
            held(TWO, two, trim=10, seen=True),
        ]
    )
    pulses = {AGENT: Pulse(BOOT, 7)}
    assert [shown(look) for look in looks] == [
        (True, {}, None),
        (False, pulses, {AGENT: "3:b"}),
        (True, pulses, {AGENT: "3:b"}),
    ]
    assert await raw.pttl(bus.job(ONE).keys.lease) > TTL_MS


async def test_what_is_wrong_with_one_jobs_keys_is_that_jobs_answer(bus: Bus, raw: Any) -> None:
    leases = await taken(bus, ONE, TWO, THREE)
    await raw.set(bus.job(ONE).keys.pulse, "no hash")
    await raw.delete(bus.job(TWO).keys.lease)
    await raw.hset(bus.job(TWO).keys.lease, "no", "string")
    one, two, three = await bus.roll().look(
        [held(job, lease) for job, lease in zip((ONE, TWO, THREE), leases, strict=True)]
    )
    assert shown(one) == (True, None, None)
    assert isinstance(two, BusUnavailable) and "two" in str(two)
    assert shown(three) == (True, {}, None)


async def test_values_that_nobody_of_ours_wrote_are_left_out(bus: Bus, raw: Any) -> None:
    [one] = await taken(bus, ONE)
    job = bus.job(ONE)
    await job.pulse(AGENT, Pulse(BOOT, 1))
    await raw.hset(job.keys.pulse, "agent/deep", '{"seq":' + "[" * 100_000 + "]" * 100_000 + "}")
    await raw.hset(job.keys.state, "commit", "no number")
    await raw.hset(job.keys.seen, AGENT, "no boot")
    [look] = await bus.roll().look([held(ONE, one)])
    assert isinstance(look, Looked) and look.pulses == {AGENT: Pulse(BOOT, 1)} and look.commit is None
    await job.append([Numbered(1, UP, 0)], source=AGENT, boot=BOOT)
    assert await job.seen(AGENT) == (BOOT, 1)


async def test_scripts_that_were_flushed_are_loaded_again(bus: Bus, raw: Any) -> None:
    [one] = await taken(bus, ONE)
    await raw.script_flush()
    [look] = await bus.roll().look([held(ONE, one)])
    assert shown(look) == (True, {}, None)


async def test_leases_are_given_up_where_they_are_ours(bus: Bus) -> None:
    [one] = await taken(bus, ONE)
    await taken(bus, TWO, holder="other")
    await bus.roll().release([(ONE, one), (TWO, Lease("me", 5))])
    assert await bus.roll().holders([ONE, TWO]) == [None, "other"]


async def test_a_source_is_forgotten_only_while_it_has_not_spoken(bus: Bus, raw: Any) -> None:
    [one] = await taken(bus, ONE)
    job, roll = bus.job(ONE), bus.roll()
    other = Source("agent/z")
    for source in (AGENT, other):
        await job.append([Numbered(1, UP, 0)], source=source, boot=BOOT)
        await job.pulse(source, Pulse(BOOT, 1))
    await job.append([Numbered(2, UP, 0)], source=other, boot=BOOT)
    assert await roll.forget(ONE, Lease("other", 1), sources={AGENT: "1:b"}) == -1
    assert await roll.forget(ONE, one, sources={AGENT: "1:b", other: "1:b"}) == 1
    assert await raw.hkeys(job.keys.seen) == await raw.hkeys(job.keys.pulse) == [other]


async def test_a_beat_shows_who_is_there_and_removes_who_is_gone(bus: Bus, raw: Any) -> None:
    roll = bus.roll()
    await roll.beat("other", Presence(4, jobs=(ONE,)), gone=[])
    await roll.beat("gone", Presence(1), gone=[])
    await raw.hset(keys.ORCHESTRATORS, "strange", "{")
    await bus.enrol(ONE)
    beat = await roll.beat("me", Presence(9), gone=["gone"])
    there = {"me": Presence(9), "other": Presence(4, jobs=(ONE,)), "strange": Presence(0)}
    assert beat == Beat(there, jobs=1)
    await roll.leave("me")
    assert set(await raw.hkeys(keys.ORCHESTRATORS)) == {"other", "strange"}
