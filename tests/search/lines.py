"""A history as lines: facts and decisions as in the scenarios, the rest as what somebody does (`·`)."""

from typing import Any

from relight.events.decisions import Decision
from relight.events.facts import (
    DrainRequested,
    EngineDead,
    EngineStarted,
    EngineStopped,
    Fact,
    Healthy,
    HoldRequested,
    NodeSilent,
    NodeUp,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
    SafeBoundary,
    StartFailed,
    StopFailed,
    TrainerSilent,
    WeightsFailed,
    WeightsLoaded,
    WeightsPublished,
    WeightsSynced,
)
from relight.events.ids import NodeName
from tests.scenario import short
from tests.search.model import Model
from tests.search.world import BORN, Happening, World


def fact_line(fact: Any) -> str:
    """The fact as a scenario's line."""
    match fact:
        case NodeUp():
            parts = [f"max_epoch={fact.max_epoch}"]
            for each in fact.engines:
                name = f"{each.engine}.{each.incarnation}" if each.incarnation else each.engine
                parts.insert(0, f"{name} {each.state} {each.version or ''}".strip())
            return f"node {fact.node} up {', '.join(parts)}"
        case EngineStarted():
            return f"{_name(fact)} started {fact.weights or ''}".strip()
        case Healthy():
            return f"{_name(fact)} healthy {fact.version}"
        case EngineDead():
            return f"{_name(fact)} dead"
        case EngineStopped():
            return f"{_name(fact)} stopped" + (f" node={fact.node}" if fact.node != "a" else "")
        case StartFailed():
            return f"{_name(fact)} start-failed {fact.cause}"
        case StopFailed():
            return f"{_name(fact)} stop-failed"
        case WeightsLoaded():
            return f"{_name(fact)} loaded {fact.version}"
        case WeightsFailed():
            return f"{_name(fact)} failed {fact.version}{' touched' if fact.touched else ''}"
        case WeightsPublished():
            return f"trainer publishes {fact.version}{'' if fact.sync else ' alone'}"
        case WeightsSynced():
            loaded = [f"{each.engine}.{each.incarnation}" for each in fact.loaded]
            failed = [
                f"{each.engine}.{each.incarnation}:{'touched' if each.touched else 'untouched'}"
                for each in fact.failed
            ]
            return f"trainer synced {fact.version} {' '.join((*loaded, *failed))}"
        case SafeBoundary():
            return _boundary(fact)
        case NodeSilent():
            return f"node {fact.node} silent"
        case TrainerSilent():
            return f"trainer {fact.run} silent"
        case DrainRequested() | RetireRequested() | ReleaseRequested() | RestartRequested() | HoldRequested():
            wish = type(fact).__name__.removesuffix("Requested").lower()
            return f"operator {wish} {getattr(fact, 'engine', None) or ''}".strip()
        case _:
            raise TypeError(f"no line for {fact!r}")


def _name(fact: Any) -> str:
    return f"{fact.engine}.{fact.incarnation}"


def _boundary(fact: SafeBoundary) -> str:
    words = ["trainer", str(fact.run), "open" if fact.state == "open" else "close", str(fact.boundary)]
    words += [f"exports={fact.exports}"] if fact.exports else [f"at={fact.version}"]
    words += [word for word, holds in (("all", fact.sync == "all"), ("cut_off", fact.cut_off)) if holds]
    return " ".join(words)


def said(message: Fact | Decision) -> str:
    return short(message) if isinstance(message, Decision) else fact_line(message)


def line(model: Model, before: World, happening: Happening) -> str:
    """One step of a history."""
    what, *rest = happening
    mind, messages = model.mind, model.messages
    match what:
        case "reads":
            done = mind.hear(before.job, rest[0])
            return _decided(model, fact_line(messages[rest[0]]), done.decisions)
        case "takes over":
            done = mind.take_over(before.job, before.top + 1, before.stamp)
            stamp = f" bus-{before.stamp}" if mind[before.job].meta.bus != str(before.stamp) else ""
            return _decided(model, f"epoch {before.top + 1}{stamp}", done.decisions)
        case "waits for" | "! waits for":
            done = mind.fire(before.job, tuple(rest))
            return _decided(
                model, f"{'! ' if what[0] == '!' else ''}the {rest[0]} of {rest[1]} is due", done.decisions
            )
        case "is silent" | "! seems silent":
            fact = messages.of(NodeSilent(node=NodeName("ab"[rest[0]]), since=0))
            return _decided(model, f"node {'ab'[rest[0]]} silent", mind.hear(before.job, fact).decisions)
        case "trainer is silent" | "! trainer seems silent":
            fact = messages.of(TrainerSilent(run=model.trainers[before.trainer].barrier.run, since=0))
            return _decided(model, fact_line(messages[fact]), mind.hear(before.job, fact).decisions)
        case "hears":
            heard = "that the bus is another one" if rest[1] == BORN else said(messages[rest[1]])
            return f"·  agent {'ab'[rest[0]]} hears {heard}"
        case "trainer hears":
            heard = "that the bus is another one" if rest[0] == BORN else said(messages[rest[0]])
            return f"·  trainer hears {heard}"
        case "trainer opens" | "trainer closes" | "trainer exports" | "trainer has exported":
            return f"·  {what} ({model.trainers[before.trainer].barrier.run})"
        case "! is doubled" | "is read again" | "! reply is lost" | "! orchestrator freezes":
            return f"·  {what}: {fact_line(messages[rest[0]])}"
        case "! orchestrator dies before its records":
            done = mind.hear(before.job, rest[0])
            return (
                _decided(model, fact_line(messages[rest[0]]), done.decisions) + "  (dies before its records)"
            )
        case "! cannot append" | "appends at last":
            return f"·  {('agent a', 'agent b', 'trainer')[rest[0]]} {what}"
        case "takes up" | "finishes" | "begins" | "notices" | "restarts":
            return f"·  agent {'ab'[rest[0]]} {what}{_doing(model, before, rest[0])}"
        case "! an operator says" | "an operator says":
            return f"·  {fact_line(messages[rest[0]])}"
        case "! dies":
            return f"·  ! engine of {'ab'[rest[0]]} dies"
        case _:
            where = f" ({'ab'[rest[0]]})" if rest and isinstance(rest[0], int) and rest[0] < 2 else ""
            return f"·  {what}{where}"


def _decided(model: Model, heard: str, decisions: tuple[int, ...]) -> str:
    told = "; ".join(short(model.messages[each]) for each in decisions)
    return f"{heard:<52} -> {told or '-'}"


def _doing(model: Model, before: World, index: int) -> str:
    agent = model.agents[before.agents[index]]
    doing = agent.running or (agent.pending[0] if agent.pending else None)
    return f" {short(doing)}" if doing is not None else ""
