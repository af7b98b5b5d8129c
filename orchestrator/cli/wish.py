"""`relight restart|drain|release|retire|hold|approve`: a wish on the bus; the orchestrator acts by its rules.

A restart is meant for the incarnation that stands, so that one asked for twice is one. What else is said of
an engine is meant for the slot, whatever fills it by the time it is read.
"""

from argparse import Namespace
from typing import NamedTuple

from relight.agents.control import outcome
from relight.agents.control.outcome import operator
from relight.events.bus.job import JobBus
from relight.events.errors import UsageError
from relight.events.facts import (
    ApprovalGiven,
    DrainRequested,
    Fact,
    HoldRequested,
    ReleaseRequested,
    RestartRequested,
    RetireRequested,
)
from relight.events.ids import JobName
from relight.events.schema import Snapshot
from relight.orchestrator.cli import printing, reach, running


class Wish(NamedTuple):
    """What is written, whom it is about, and what it asks for, in words."""

    fact: Fact
    about: dict[str, object]
    words: str


def wish(args: Namespace, job: JobName, snapshot: Snapshot) -> Wish:
    """What `args` ask for. Raises UsageError where there is no such engine or recovery."""
    if args.command == "approve":
        return _approval(args.recovery, job, snapshot)
    if args.command == "hold":
        return Wish(HoldRequested(), {"job": job}, f"a hold of job {job}: nothing is done to its engines")
    if args.engine is None:
        if args.command == "release":
            return Wish(ReleaseRequested(), {"job": job}, f"the end of the hold of job {job}")
        return Wish(RestartRequested(), {"job": job}, f"a restart of each engine of job {job}, one by one")
    return _of_engine(args, job, snapshot)


def _of_engine(args: Namespace, job: JobName, snapshot: Snapshot) -> Wish:
    name, engine = reach.the_engine(args.engine, job, snapshot)
    at = engine.incarnation
    fact: Fact
    match args.command:
        case "restart":
            fact, what = RestartRequested(engine=name, incarnation=at), "a restart"
        case "drain":
            fact, what = DrainRequested(engine=name), "the end of its calls and a stop"
        case "release":
            fact, what = ReleaseRequested(engine=name), "a new start"
        case "retire":
            fact, what = RetireRequested(engine=name), "its end for good"
        case _:
            raise ValueError(f"no such wish: {args.command}")
    return Wish(fact, {"engine": name, "incarnation": at}, f"{what} of {name} incarnation {at}")


def _approval(text: str, job: JobName, snapshot: Snapshot) -> Wish:
    """The recovery that `text` names, by its own name or its engine's."""
    waiting = {
        engine.recovery.id: name
        for name, engine in snapshot.engines.items()
        if engine.recovery is not None and not engine.recovery.approved
    }
    for recovery, name in waiting.items():
        if text in (recovery, name):
            words = f"recovery {recovery} of {name} to go on"
            return Wish(ApprovalGiven(recovery=recovery), {"engine": name, "recovery": recovery}, words)
    known = ", ".join(sorted(waiting)) or "none"
    raise UsageError(f"job {job} has no recovery {text!r} that waits for an approval; waiting: {known}")


async def _drained(job: JobBus, wish: DrainRequested, *, within_s: float) -> str:
    """Drain an engine and say where it stands once it is out; raises NotYet."""
    state = await outcome.wished(
        job, wish, until=lambda state: state.phase in outcome.ENDED, within_s=within_s
    )
    return state.phase.value


def run(args: Namespace) -> int:
    async def main() -> None:
        async with reach.the_job(args) as job:
            wished = wish(args, job.name, await job.snapshot())
            came: dict[str, object]
            if isinstance(wished.fact, DrainRequested) and args.wait is not None:
                came = {"phase": await _drained(job, wished.fact, within_s=args.wait)}
            else:
                came = {"entry_id": await job.hint(wished.fact, source=operator())}
        if args.format == "json":
            printing.as_json({**wished.about, **came})
        elif "phase" in came:
            print(f"{wished.about['engine']} is {came['phase']}")
        else:
            print(f"asked for {wished.words} ({came['entry_id']})")

    return running.once(main)
