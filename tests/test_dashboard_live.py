"""What a browser is told while it looks: in order, from where it was, through outages, within bounds."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis.asyncio as redis

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import Embedded, embedded, free_port
from relight.events.facts import RouteSuspected
from relight.events.ids import EngineName, JobName, Source
from relight.orchestrator.dashboard import channel, frames, hub
from relight.orchestrator.dashboard.channel import Subscription
from relight.orchestrator.dashboard.tape import LENGTH, Place, Tape
from relight.orchestrator.dashboard.trail import Began, Came, Trail
from tests import cli_job
from tests.dashboard_rig import WITHIN_S, Event, LargeJob, Page, dashboard, until

pytestmark = pytest.mark.anyio

JOB = "grpo-1"
LIVE = f"/api/jobs/{JOB}/live"


@pytest.fixture
async def bus(server: Embedded) -> AsyncIterator[Bus]:
    async with open_bus(server.url) as opened:
        yield opened


@pytest.fixture
async def page(server: Embedded) -> AsyncIterator[Page]:
    await cli_job.record(server.url, JOB)
    async with dashboard(server.url) as shown:
        yield shown


async def say(bus: Bus, *words: str) -> None:
    """Facts that are told apart by their words."""
    for word in words:
        hint = RouteSuspected(engine=EngineName("e1"), incarnation=4, error=word)
        await bus.job(JobName(JOB)).hint(hint, source=Source("client/c"))


def words(event: Event) -> list[str]:
    return [entry["data"].get("error", "") for entry in event.data["entries"]]


async def heard(told: AsyncIterator[Event], last: str) -> tuple[list[str], str | None]:
    """What is said up to this word, and the place behind it."""
    found: list[str] = []
    while last not in found:
        event = await until(told, "entries")
        found += words(event)
        place = event.place
    return found, place


async def test_a_page_begins_with_what_there_is_and_goes_on_in_order(page: Page, bus: Bus) -> None:
    async with page.live(LIVE) as told:
        begun = await until(told, "begin")
        assert [entry["type"] for entry in begun.data["entries"]][:3] == [
            "NodeUp",
            "EngineDead",
            "RouteFenced",
        ]
        said = [f"w{n}" for n in range(50)]
        await say(bus, *said)
        assert (await heard(told, "w49"))[0] == said


async def test_a_browser_that_comes_back_is_told_what_it_missed_and_no_more(page: Page, bus: Bus) -> None:
    async with page.live(LIVE) as told:
        await until(told, "begin")
        await say(bus, "one", "two")
        _, place = await heard(told, "two")
    await say(bus, "three", "four")
    async with page.live(LIVE, after=place) as told:
        missed, _ = await heard(told, "four")
        assert missed == ["three", "four"]


async def test_it_is_told_so_also_by_another_dashboard(page: Page, bus: Bus, server: Embedded) -> None:
    async with page.live(LIVE) as told:
        place = (await until(told, "begin")).place
    await say(bus, "three")
    async with dashboard(server.url) as other, other.live(LIVE, after=place) as told:
        assert (await heard(told, "three"))[0] == ["three"]


@pytest.mark.parametrize("place", ["y/1-1/1-1", "x/9999999999999-0/0-0", "nonsense", "x/1-1"])
async def test_a_place_that_is_not_known_begins_anew(page: Page, place: str) -> None:
    async with page.live(LIVE, after=place) as told:
        assert len((await until(told, "begin")).data["entries"]) == 12


async def test_the_state_comes_with_each_commit(page: Page, bus: Bus) -> None:
    large = LargeJob(bus, "large", engines=10, troubled=False)
    await large.put()
    async with page.live("/api/jobs/large/live") as told:
        first = await until(told, "view")
        assert first.data["serving"] == 10 and first.data["holder"] == "host-1"
        await large.recovered(large.names[0], 3)
        past = await until(told, "past", lambda past: past["recoveries"])
        assert past.data["recoveries"][0]["phases"]["stop"] == 210.0
        await bus.job(JobName("large")).release_lease(large.story.lease)
        gone = await until(told, "view", lambda view: view["holder"] is None)
        assert gone.data["concerns"][0]["kind"] == "orchestrator"


async def test_the_overview_tells_jobs_that_come_change_and_go(
    page: Page, bus: Bus, server: Embedded
) -> None:
    async with page.live("/api/live") as told:
        rows = (await until(told, "jobs")).data["rows"]
        assert [row["job"] for row in rows] == [JOB]
        await LargeJob(bus, "large", engines=8, troubled=False).put()
        await until(told, "changed", lambda data: [row["job"] for row in data["rows"]] == ["large"])
        async with redis.Redis.from_url(server.url, protocol=2) as raw:
            await raw.srem("relight:jobs", "large")
        await until(told, "changed", lambda data: data["gone"] == ["large"])


async def readers_of_streams(raw: Any) -> int:
    return sum(client["cmd"] == "xread" for client in await raw.client_list())


async def test_many_browsers_share_one_follower_which_ends_with_the_last_of_them(
    page: Page, server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "LINGER_S", 0.1)
    async with redis.Redis.from_url(server.url, protocol=2, decode_responses=True) as raw:
        assert await readers_of_streams(raw) == 0
        async with AsyncExitStack() as browsers:
            for _ in range(6):
                await until(await browsers.enter_async_context(page.live(LIVE)), "begin")
            with anyio.fail_after(WITHIN_S):
                while await readers_of_streams(raw) != 1:
                    await anyio.sleep(0.02)
            before = len(await raw.client_list())
            async with page.live(LIVE) as told:
                await until(told, "begin")
                assert len(await raw.client_list()) == before
            metrics = await (await page.http.get(f"{page.address}/metrics")).text()
            assert "relight_dashboard_followed_jobs 1" in metrics
        with anyio.fail_after(WITHIN_S):
            while "relight_dashboard_followed_jobs 0" not in metrics or await readers_of_streams(raw):
                await anyio.sleep(0.05)
                metrics = await (await page.http.get(f"{page.address}/metrics")).text()


async def test_a_browser_that_cannot_keep_up_is_told_to_begin_anew(
    page: Page, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "ROOM", 20_000)
    async with page.live(LIVE) as told:
        await until(told, "begin")
        await say(bus, "x" * 30_000)
        assert "could not keep up" in (await until(told, "reload")).data["why"]
        with anyio.fail_after(WITHIN_S):
            assert [event async for event in told] == []  # its stream has ended


async def test_what_waits_for_a_browser_is_bounded() -> None:
    reader = Subscription(room=1000)
    for n in range(10_000):
        reader.show("view", frames.event("view", n))
        reader.put(frames.event("entries", n))
    taken = await reader.take()
    assert reader.over and taken.count(b"event:") == 1 and b"event: reload" in taken


async def test_a_state_takes_the_place_of_one_that_was_not_sent_yet() -> None:
    reader = Subscription()
    for n in range(1000):
        reader.show("view", frames.event("view", n))
    assert await reader.take() == frames.event("view", 999)


async def test_a_bus_that_is_away_is_said_and_it_comes_back_by_itself(tmp_path: Path) -> None:
    port = free_port()
    with embedded(tmp_path / "bus", port=port) as first:
        await cli_job.record(first.url, JOB)
        async with dashboard(first.url) as page, page.live(LIVE) as told, page.live("/api/live") as all_told:
            await until(told, "begin")
            await until(all_told, "jobs")
            first.process.kill()
            first.process.wait(10)
            away = await until(told, "bus", lambda bus: bus["away"])
            assert "cannot be reached" in away.data["reason"] and away.data["for_s"] >= 0
            await until(all_told, "bus", lambda bus: bus["away"])
            async with page.http.get(f"{page.address}/health") as answer:
                assert answer.status == 503 and "cannot be reached" in (await answer.json())["error"]
            assert "relight_bus_up 0" in await (await page.http.get(f"{page.address}/metrics")).text()
            async with page.live(LIVE) as late:  # who comes now is told so too, with what was known
                assert (await until(late, "bus")).data["away"]
            with embedded(tmp_path / "bus", port=port):
                await until(told, "bus", lambda bus: not bus["away"])
                await until(all_told, "bus", lambda bus: not bus["away"])
                async with open_bus(first.url) as bus:
                    await say(bus, "again")
                assert (await heard(told, "again"))[0][-1] == "again"
                assert (await page.get("/health"))["bus"] == "serves"


async def test_an_emptied_bus_shows_the_new_truth(page: Page, server: Embedded) -> None:
    async with page.live(LIVE) as told:
        await until(told, "begin")
        await until(told, "view", lambda view: len(view["engines"]) == 2)
        async with redis.Redis.from_url(server.url, protocol=2) as raw:
            await raw.flushall()
        missing = {"begin": "entries", "view": "engines"}  # in whatever order they come
        with anyio.fail_after(WITHIN_S):
            while missing:
                event = await anext(told)
                if event.name in missing and event.data[missing[event.name]] == []:
                    del missing[event.name]
        await cli_job.record(server.url, JOB)
        await until(told, "view", lambda view: len(view["engines"]) == 2)


async def test_entries_that_were_trimmed_unread_are_said_to_be_missing(bus: Bus, server: Embedded) -> None:
    await cli_job.record(server.url, JOB)
    job = bus.job(JobName(JOB))
    trail = Trail(job, count=5)
    assert isinstance(await trail.next(), Began)
    story = cli_job.Recorder(bus, JobName(JOB))
    async with redis.Redis.from_url(server.url, protocol=2) as raw:
        await raw.delete(job.keys.lease)
        await story.begin()
        large = LargeJob(bus, JOB, engines=1)
        large.story = story
        for kind in ("one", "two", "three"):
            await large.alarm(kind, kind)
        await raw.xtrim(job.keys.decisions, maxlen=1, approximate=False)
    came = await trail.next()
    assert isinstance(came, Came) and came.missed and len(came.entries) == 1


async def test_a_tape_knows_how_far_back_it_reaches(bus: Bus, server: Embedded) -> None:
    await cli_job.record(server.url, JOB)
    job = bus.job(JobName(JOB))
    began = await Trail(job, count=200).next()
    assert isinstance(began, Began)
    tape = Tape(began.birth, began.entries)
    first = tape.newest(LENGTH)[0]
    assert tape.since(Place("x", first.entry_id, tape.place.decisions)) == [
        entry for entry in began.entries[1:] if entry.after is None
    ]
    assert tape.since(tape.place) == []
    assert tape.since(tape.place._replace(birth="y")) is None
    assert Place.parse(str(tape.place)) == tape.place
    for number in range(LENGTH):
        tape.add([entry_of(number)])
    assert tape.since(Place("x", first.entry_id, tape.place.decisions)) is None


def entry_of(number: int) -> Any:
    return codec.entry(f"9999999999999-{number}", {"type": "T", "source": "s", "data": "{}"})
