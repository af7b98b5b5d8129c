"""The commands that look at a job or wish something of it, on a bus with a recovery under way."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from relight.events import codec
from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import embedded
from relight.events.bus.journal import Journal
from relight.events.facts import (
    DrainRequested,
    Fact,
    HoldRequested,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
)
from relight.events.ids import BEGINNING, JobName
from relight.orchestrator.cli.main import main
from tests import cli_job


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bus with one job, in the middle of a recovery. Read it only."""
    with embedded(tmp_path_factory.mktemp("bus")) as server:
        anyio.run(cli_job.record, server.url)
        yield server.url


@pytest.fixture(autouse=True)
def named(bus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BUS_URL", bus)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with 0, and gives what it printed."""

    def run(*words: str) -> str:
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_status_shows_engines_trainer_orchestrator_and_what_was_parked(said: Callable[..., str]) -> None:
    text = said("status")
    head, engines = text.split("\n\n")
    assert "grpo-1" in head
    assert "held by host-1" in head
    assert "run 7, boundary 10 open at step 4 (rollout, sync stale, exports 7.4)" in head
    assert "version 7.4, published 7.4" in head
    assert "node-b" in head
    assert "1 entries that nobody could decode" in head
    title, lost, well = (line.split() for line in engines.splitlines())
    assert title[:5] == ["ENGINE", "PHASE", "INCARNATION", "VERSION", "ROUTE"]
    assert lost[:5] == ["e0", "SYNCING", "2", "-", "-"]
    assert "LoadWeights," in lost and "killed" in lost
    assert well == ["e1", "SERVING", "4", "7.4", "http://127.0.0.1:8002", "node-a", "-"]


def test_status_as_json_is_one_object(said: Callable[..., str]) -> None:
    [view] = lines(said("status", "--format", "json", "--job", "grpo-1"))
    assert view["parked"] == 1
    assert view["boundary"]["exports"] == "7.4"
    lost, well = view["engines"]
    assert lost["recovery"] == "r1" and lost["route"] is None
    assert 100 < lost["intent"]["left_s"] <= 120 and lost["for_s"] >= 4
    assert well["route"] == "http://127.0.0.1:8002"


STORY = [
    "NodeUp",
    "EngineDead",
    "RouteFenced",
    "StopEngine",
    "EngineStopped",
    "StartEngine",
    "EngineStarted",
    "SyncWeights",
    "WeightsPublished",
    "LoadWeights",
    "LoadWeights",
    "RouteSuspected",
]


def test_events_tells_both_streams_in_order(said: Callable[..., str]) -> None:
    told = lines(said("events", "--format", "json"))
    assert sorted(entry["type"] for entry in told) == sorted(STORY)
    for place, entry in enumerate(told):  # each decision stands behind its cause, each answer behind it
        if entry["stream"] == "decisions":
            assert entry["data"]["cause"] in [e["entry_id"] for e in told[:place] if e["stream"] == "facts"]
        elif answered := entry["data"].get("answers"):
            assert answered in [e["id"] for e in told[:place] if e["stream"] == "decisions"]
    assert told[2]["data"]["reason"] == "killed by signal 9"
    assert {e["stream"] for e in told} == {"facts", "decisions"}


def test_events_are_one_line_each_for_people(said: Callable[..., str]) -> None:
    text = said("events", "--type", "EngineDead", "--type", "StopEngine")
    dead, stop = text.splitlines()
    assert "F agent/node-a" in dead and "e0.1" in dead and "cause=signal signal=9 detect_ms=3.2" in dead
    assert "D orchestrator " in stop and "e0.1 " in stop and "killed by signal 9 [node=node-a " in stop


def test_events_can_be_counted_and_picked(said: Callable[..., str]) -> None:
    assert len(said("events", "--count", "3").splitlines()) == 3
    [last] = lines(said("events", "--type", "LoadWeights", "--count", "1", "--format", "json"))
    assert last["data"]["engine"] == "e1"


def test_a_type_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--type", "EngineDied"]) == 2
    assert "no fact or decision is of type 'EngineDied'; there are Alarm, " in capsys.readouterr().err


def test_explain_tells_the_chain_and_nothing_of_other_engines(said: Callable[..., str]) -> None:
    [told] = lines(said("explain", "e0", "--format", "json"))
    chain = told["chain"]
    assert [e["type"] for e in chain] == STORY[1:10]
    assert (told["recovery"], told["phase"]) == ("r1", "SYNCING")
    assert {e["data"].get("engine", "e0") for e in chain} == {"e0"}


def test_explain_gives_reasons_and_what_is_waited_for(said: Callable[..., str]) -> None:
    first, second, *chain, last = said("explain", "e0").splitlines()
    assert first == "e0 is SYNCING, incarnation 2"
    assert second == "recovery r1, under way: killed by signal 9"
    assert len(chain) == 9 and "+     0 ms F agent/node-a" in chain[0]
    assert last == "waits for an answer to LoadWeights: the weights stand"


def test_explain_of_an_engine_that_was_never_lost(said: Callable[..., str]) -> None:
    assert said("explain", "e1").splitlines() == [
        "e1 is SERVING, incarnation 4",
        "no recovery of it stands on the bus",
    ]


@pytest.mark.parametrize("command", ["explain", "restart", "drain", "release", "retire"])
def test_an_engine_that_is_not_there_is_answered_with_those_that_are(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "e9"]) == 2
    assert capsys.readouterr().err == "relight: job grpo-1 has no engine 'e9'; its engines: e0, e1\n"


def test_a_job_that_is_not_there_is_answered_with_those_that_are(
    bus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--job", "other"]) == 2
    assert capsys.readouterr().err == f"relight: bus {bus} has no job 'other'; it has 1 job: grpo-1\n"


async def _enrol(url: str, *jobs: str) -> None:
    async with open_bus(url) as bus:
        for job in jobs:
            await bus.enrol(JobName(job))


def test_with_several_jobs_one_must_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with embedded(tmp_path) as server:
        assert main(["status", "--bus", server.url]) == 2
        assert capsys.readouterr().err == f"relight: bus {server.url} has no job\n"
        anyio.run(_enrol, server.url, "b", "a")
        assert main(["status", "--bus", server.url]) == 2
        assert capsys.readouterr().err.endswith("has 2 jobs: a, b; choose one with --job\n")
        assert main(["status", "--bus", server.url, "--job", "a"]) == 0  # enrolled, nothing committed yet
        assert "none holds the job" in capsys.readouterr().out


async def _facts(url: str) -> list[tuple[str, Any]]:
    async with open_bus(url) as bus:
        entries = await bus.job(JobName("grpo-1")).read_facts(BEGINNING)
        return [(entry.source, codec.decode_fact(entry)) for entry in entries]


def test_restart_wishes_for_the_incarnation_that_stands(tmp_path: Path, said: Callable[..., str]) -> None:
    with embedded(tmp_path) as server:
        anyio.run(cli_job.record, server.url)
        text = said("restart", "e1", "--bus", server.url)
        source, fact = anyio.run(_facts, server.url)[-1]
    assert text.startswith("asked for a restart of e1 incarnation 4 (")
    assert fact == RestartRequested(engine=cli_job.E1, incarnation=4)
    assert source.startswith("operator/")


@pytest.mark.parametrize(
    ("command", "wish", "words"),
    [
        ("drain", DrainRequested, "the end of its calls and a stop"),
        ("release", ReleaseRequested, "a new start"),
        ("retire", RetireRequested, "its end for good"),
    ],
)
def test_other_wishes_are_for_the_slot_whatever_fills_it(
    tmp_path: Path, said: Callable[..., str], command: str, wish: type[Fact], words: str
) -> None:
    with embedded(tmp_path) as server:
        anyio.run(cli_job.record, server.url)
        text = said(command, "e1", "--bus", server.url)
        source, fact = anyio.run(_facts, server.url)[-1]
    assert text.startswith(f"asked for {words} of e1 incarnation 4 (")
    assert type(fact) is wish
    assert (fact.engine, fact.incarnation) == (cli_job.E1, None)
    assert source.startswith("operator/")


@pytest.mark.parametrize(
    ("line", "fact", "words"),
    [
        ("hold grpo-1", HoldRequested(), "a hold of job grpo-1: nothing is done to its engines"),
        ("hold", HoldRequested(), "a hold of job grpo-1"),
        ("release", ReleaseRequested(), "the end of the hold of job grpo-1"),
        ("restart --all", RestartRequested(), "a restart of each engine of job grpo-1, one by one"),
    ],
)
def test_some_wishes_are_for_the_whole_job(
    tmp_path: Path, said: Callable[..., str], line: str, fact: Fact, words: str
) -> None:
    with embedded(tmp_path) as server:
        anyio.run(cli_job.record, server.url)
        text = said(*line.split(), "--bus", server.url)
        assert anyio.run(_facts, server.url)[-1][1] == fact
        assert text.startswith(f"asked for {words}")
        [told] = lines(said(*line.split(), "--bus", server.url, "--format", "json"))
        assert told["job"] == "grpo-1" and "-" in told["entry_id"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("approve e0", "job grpo-1 has no recovery 'e0' that waits for an approval; waiting: none"),
        ("hold other", "has no job 'other'; it has 1 job: grpo-1"),
        ("restart", "one of the arguments ENGINE --all is required"),
        ("restart e0 --all", "argument --all: not allowed with argument ENGINE"),
        ("drain", "the following arguments are required: ENGINE"),
    ],
)
def test_a_wish_that_is_none_is_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(line.split())
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    assert code == 2
    assert words in capsys.readouterr().err


async def _tail(url: str, count: int) -> list[str]:
    async with open_bus(url) as bus:
        return [entry.type for entry in await Journal(_job(bus)).tail(count=count)]


def _job(bus: Bus) -> Any:
    return bus.job(JobName("grpo-1"))


def test_the_tail_is_the_newest_of_both_streams(bus: str) -> None:
    assert len(anyio.run(_tail, bus, 5)) == 5
