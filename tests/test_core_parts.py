"""Engines over several nodes in the core: one start whatever comes first, and no proof stands for another."""

from itertools import permutations

import msgspec
import pytest

from relight.events import codec
from relight.events.decisions import StartEngine, StopEngine
from relight.events.envelope import Entry
from relight.events.facts import EngineDead, EngineStarted, NodeUp
from relight.events.ids import EngineName, EntryId, Source
from relight.events.schema import EngineState
from relight.events.values import Phase
from relight.orchestrator.core.moves import moves_at
from relight.orchestrator.core.step import step
from relight.orchestrator.core.timers import next_wake
from tests.scenario import Scenario

E0 = EngineName("e0")
REPORTS = ("node a up e0:0/3 absent", "node b up e0:1/3 absent", "node c up e0:2/3 absent")


def told(*lines: str) -> tuple[Scenario, list[str]]:
    """A job that has heard these lines, and what was decided at each."""
    scenario = Scenario()
    return scenario, [scenario.hear(line) for line in lines]


def started(*more: str) -> Scenario:
    """A job whose engine over three nodes serves, and that has heard `more`."""
    up = ("e0.1 started node=c", "e0.1 started", "e0.1 started node=b", "e0.1 healthy 0.0")
    return told(*REPORTS, REPORTS[0], *up, *more)[0]


def engine(scenario: Scenario) -> EngineState:
    return scenario.job.engines[E0]


@pytest.mark.parametrize("order", list(permutations(REPORTS)))
def test_whoever_reports_first_one_start_names_all_nodes(order: tuple[str, ...]) -> None:
    scenario, said = told(*order)
    if said[-1] == "ask a":
        said.append(scenario.hear(REPORTS[0]))
    assert said[-1] == "start e0.1 at a b c" and not any("start" in each for each in said[:-1])
    assert engine(scenario).nodes == ("a", "b", "c")


PROOFS = ("e0.1 stopped node=a", "e0.1 stopped node=b", "e0.1 stopped node=c")


@pytest.mark.parametrize("order", list(permutations(PROOFS)))
@pytest.mark.parametrize("dead", ["", " node=b", " node=c"])
def test_only_the_last_proof_starts_the_next_incarnation(order: tuple[str, ...], dead: str) -> None:
    scenario = started()
    assert scenario.hear(f"e0.1 dead{dead}") == "fence e0.1; stop e0.1 at a b c"
    said = [scenario.hear(line) for proof in order for line in (proof, "e0.1 dead node=a", proof)]
    assert said.index("start e0.2 at a b c") == 6 and said.count("-") == len(said) - 1


def test_a_proof_of_an_older_incarnation_or_of_another_node_is_none() -> None:
    scenario = started("e0.1 dead", *PROOFS, "e0.2 dead node=c")
    for line in (
        "e0.1 stopped node=a",
        "e0.1 stopped node=c",
        "e0.2 stopped node=d",
        "e0.2 start-failed x node=d",
    ):
        assert scenario.hear(line) == "-"
    assert engine(scenario).phase is Phase.STOPPING
    assert [engine(scenario).gone, *(part.gone for part in engine(scenario).parts)] == [1, 1, 1]


def test_what_a_node_shows_alive_is_not_gone_whatever_it_had_proven() -> None:
    scenario = started("e0.1 dead", "e0.1 stopped node=b", "e0.1 stopped node=a")
    assert scenario.hear("node b up e0:1/3.1 unknown") == "stop e0.1 at b c"
    assert scenario.hear("e0.1 stopped node=c") == "-"
    assert scenario.hear("e0.1 stopped node=b") == "start e0.2 at a b c"


def test_a_part_that_begins_late_begins_with_the_weights_that_the_head_began_with() -> None:
    scenario, _ = told(*REPORTS, REPORTS[0], "trainer 7 open 1 exports=7.0 all", "trainer publishes 7.0")
    for line in (
        "e0.1 started",
        "e0.1 started node=b",
        "e0.1 started node=c",
        "e0.1 loaded 7.0",
        "e0.1 healthy 7.0",
    ):
        scenario.hear(line)
    for line in ("e0.1 dead", *PROOFS):
        said = scenario.hear(line)
    assert said == "start e0.2 at a b c on 7.0"
    assert scenario.hear("e0.2 started 7.0") == "-"
    scenario.hear("trainer 7 close 1")
    scenario.hear("trainer publishes 7.1 alone")
    assert scenario.hear("node b up e0:1/3.1 absent") == "start e0.2 at a b c on 7.0"


def test_starts_count_on_every_node_that_they_touch() -> None:
    scenario, said = told(
        "settings starts_per_node=1", *REPORTS, REPORTS[0], "node b up e0:1/3 starting, e1 absent"
    )
    assert said[-1] == "start e0.1 at a b c" and engine(scenario).phase is Phase.STARTING
    assert scenario.job.engines[EngineName("e1")].phase is Phase.BACKOFF
    for line in ("e0.1 started", "e0.1 started node=b"):
        assert scenario.hear(line) == "-"
    assert scenario.hear("e0.1 started node=c") == "verify e0.1 0.0 against nothing; start e1.1"


def test_an_answer_is_due_as_long_as_anybody_who_owes_one_speaks() -> None:
    scenario = started("e0.1 dead", "node b silent")
    stop = engine(scenario).intent
    assert isinstance(stop, StopEngine) and next_wake(scenario.job, ticked=scenario.now) == stop.deadline
    scenario.hear("e0.1 stopped")
    scenario.hear("e0.1 stopped node=c")
    job = scenario.job
    assert next_wake(job, ticked=scenario.now) == moves_at(job.settings, job.meta, engine(scenario))


def test_a_device_counts_at_the_node_that_it_is_of() -> None:
    scenario = started()
    dead = facts_of("e0.1 dead node=c on=3", scenario)
    after = step(scenario.job, dead, now=scenario.now, cause=EntryId("9-0"))
    worn = {name: record.worn for name, record in after.job.meta.nodes.items() if record.worn}
    assert {name: list(times) for name, times in worn.items()} == {"c": ["3"]}
    recovery = after.job.engines[E0].recovery
    assert recovery is not None and recovery.why == "signal (signal 9) at c"


def facts_of(line: str, scenario: Scenario) -> EngineDead:
    fact = scenario.fact(line.split())
    assert isinstance(fact, EngineDead)
    return fact


def test_messages_of_before_there_were_parts_are_understood() -> None:
    def decoded(kind: str, data: str) -> object:
        entry = Entry(entry_id=EntryId("1-0"), type=kind, source=Source("agent/a"), time=0, data=data)
        return codec.decode_decision(entry) if kind.endswith("Engine") else codec.decode_fact(entry)

    up = decoded("NodeUp", '{"type":"NodeUp","node":"a","boot":"b","engines":[{"engine":"e0","state":"up"}]}')
    assert isinstance(up, NodeUp) and (up.host, up.engines[0].part, up.engines[0].parts) == ("", 0, 1)
    head = '{"type":"StartEngine","id":"1-1","epoch":1,"reason":"r",'
    start = decoded("StartEngine", head + '"engine":"e0","incarnation":1,"node":"a","deadline":1}')
    assert isinstance(start, StartEngine) and (start.parts, start.head) == ((), "")
    told = decoded(
        "EngineStarted", '{"type":"EngineStarted","engine":"e0","incarnation":1,"address":"http://x"}'
    )
    assert isinstance(told, EngineStarted) and told.node is None
    state = codec.from_json('{"phase":"SERVING","node":"a","incarnation":3}', EngineState)
    assert state.nodes == ("a",) and msgspec.structs.replace(state, parts=()) == state


def test_the_number_of_parts_changes_only_where_nothing_runs() -> None:
    scenario = started()
    scenario.hear("node a up e0:0/2.1 up 0.0")
    assert len(engine(scenario).parts) == 2
    for line in ("operator drain e0", *PROOFS):
        scenario.hear(line)
    assert engine(scenario).phase is Phase.STOPPED
    scenario.hear("node a up e0:0/2.1 drained")
    scenario.hear("node c up")
    assert scenario.hear("operator release e0") == "start e0.2 at a b"
