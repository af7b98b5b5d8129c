"""Whatever is said, in whatever order, the core goes on: a fact that it fails on would end term after term.

Most facts answer what was asked, so that histories get somewhere; the others are arbitrary ones of every
type, with names, incarnations and versions of the job and of no job.
"""

import random
import types
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from relight.events import codec, facts
from relight.events.decisions import LoadWeights, StartEngine, StopEngine, VerifyEngine
from relight.events.ids import BootId, DecisionId, EngineName, EntryId, NodeName, RecoveryId, SyncId
from relight.events.schema import EngineState, Meta
from relight.events.values import EngineCondition, EngineReport, Loaded, Phase, Proof
from relight.events.version import BASE, Version
from relight.orchestrator.core.job import Job, Step
from relight.orchestrator.core.step import committed, step, take_over, tick
from relight.orchestrator.settings import Settings

SEEDS, STEPS = 100, 400
ARBITRARY = 0.1
RARE = {facts.HoldRequested, facts.JobFinished}
"""After these little happens."""
ENGINES = [EngineName(f"e{number}") for number in range(4)]
NODES = [NodeName(name) for name in "abc"]
PROOF = Proof(processes=(), port=None, port_free=True, took_ms=1)


class Speaker:
    """Says one fact after the other to a job."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 1_000_000
        self.entries = 0
        settings = Settings(
            restarts=self.draw.choice([1, 3, 100]),
            floor=self.draw.choice([0, 1, 2]),
            recover_at=self.draw.choice(["boundary", "snapshot", "either"]),
            move_after_s=self.draw.choice([0.5, 60.0]),
            mode=self.draw.choice(["act", "act", "approve", "observe"]),
        )
        self.job = Job(5, settings, Meta(birth="born", version=BASE), {})

    def turn(self) -> str:
        """What was heard."""
        self.now += self.draw.choice([0, 1, 10, 100, 1_000, 20_000])
        chance = self.draw.random()
        if chance < 0.1:
            self.now += self.draw.choice([0, 0, 900_000])
            return self._takes("tick", tick(self.job, now=self.now))
        if chance < 0.11:
            job, stamp = self.job._replace(epoch=self.job.epoch + 1), self.draw.choice(["one", "other"])
            return self._takes("an epoch", take_over(job, now=self.now, bus=stamp))
        if chance < 1.0 - ARBITRARY:
            fact = self.draw.choice(list(self._answers()))
        else:
            kinds = [
                each for each in get_args(facts.AnyFact) if each not in RARE or self.draw.random() < 0.05
            ]
            fact = self._arbitrary(self.draw.choice(kinds))
        self.entries += 1
        return self._takes(repr(fact), step(self.job, fact, now=self.now, cause=EntryId(f"{self.entries}-0")))

    def _takes(self, heard: str, done: Step) -> str:
        self.job = committed(done.job, now=self.now).job
        return heard

    # --- facts -------------------------------------------------------------------------------------

    def _answers(self) -> Any:
        """What would be said next if all went well, and the reports of agents."""
        yield self._report(self.draw.choice(NODES))
        if self.job.meta.hold:
            yield facts.ReleaseRequested()
        for name, engine in self.job.engines.items():
            yield from self._answer(name, engine)
        if self.job.engines and self.draw.random() < 0.1:
            yield facts.RetireRequested(engine=self.draw.choice(list(self.job.engines)))
        if self.draw.random() < 0.3:
            yield from self._trained()

    def _trained(self) -> Any:
        sync, run = self.job.meta.sync, self.job.meta.run or 7
        if sync is not None:
            loaded = tuple(Loaded(member.engine, member.incarnation) for member in sync.order.members)
            told = {"sync": sync.order.sync, "version": sync.order.version}
            yield facts.WeightsSynced(**told, loaded=loaded)
            yield facts.WeightsPublished(**told, uri="/w", digest="d")
        version = Version(run, self.draw.randint(0, 4))
        boundary = self.job.meta.boundary.boundary if self.job.meta.boundary else self.draw.randint(1, 9)
        yield self._boundary(run, boundary, version)

    def _boundary(self, run: int, boundary: int, version: Version) -> facts.SafeBoundary:
        return facts.SafeBoundary(
            run=run,
            boundary=boundary,
            step=version.step,
            version=version,
            exports=self.draw.choice([version, None]),
            state=self.draw.choice(["open", "open", "closed"]),
            sync=self.draw.choice(["all", "stale"]),
            pushes=self.draw.choice([True, False, None]),
            subset=self.draw.random() < 0.7,
        )

    def _answer(self, name: EngineName, engine: EngineState) -> Any:
        told: dict[str, Any] = {"engine": name, "incarnation": engine.incarnation}
        asked = engine.intent
        if asked is not None:
            told["answers"] = asked.id
        match asked:
            case StartEngine():
                for node in engine.nodes:
                    yield facts.EngineStarted(**told, node=node, address="http://x")
            case StopEngine():
                for node in engine.nodes:
                    yield facts.EngineStopped(**told, node=node, proof=PROOF)
            case LoadWeights(version=version, digest=digest, sync=sync):
                yield facts.WeightsLoaded(**told, version=version, digest=digest, sync=sync)
            case VerifyEngine(version=version):
                yield facts.Healthy(**told, version=version, address="http://x")
            case _:
                pass

    def _report(self, node: NodeName) -> facts.NodeUp:
        """Most engines of the node, and sometimes one of another."""
        engines = [name for name, engine in self.job.engines.items() if node in engine.nodes]
        names = {name for name in engines if self.draw.random() < self._listed(self.job.engines[name])}
        if self.draw.random() < 0.3:
            names.add(self.draw.choice(ENGINES))
        reports = [self._arbitrary(EngineReport, engine=name) for name in sorted(names)]
        reports = [self._true(report, node) if self.draw.random() < 0.9 else report for report in reports]
        return facts.NodeUp(
            node=node,
            boot=BootId(node),
            max_epoch=self.job.epoch,
            engines=tuple(reports),
            spares=self.draw.randint(0, 1),
        )

    def _listed(self, engine: EngineState) -> float:
        return 0.6 if engine.phase in (Phase.RETIRED, Phase.STOPPED) else 0.97

    def _true(self, report: EngineReport, node: NodeName) -> EngineReport:
        engine = self.job.engines.get(report.engine)
        if engine is None or node not in engine.nodes:
            return report
        kept: dict[Phase, EngineCondition] = {
            Phase.STOPPED: "drained",
            Phase.RETIRED: "retired",
            Phase.BACKOFF: "absent",
            Phase.NEW: "absent",
        }
        return EngineReport(
            engine=report.engine,
            incarnation=engine.incarnation,
            state=kept.get(engine.phase, "up"),
            address="http://x",
            version=engine.version,
            part=engine.nodes.index(node),
            parts=len(engine.nodes),
        )

    def _arbitrary(self, kind: type, **given: Any) -> Any:
        """Any value of a struct; fields that are `given` are as they are."""
        hints = get_type_hints(kind)
        name = given.get("engine") or self.draw.choice(ENGINES)
        made = {
            field: given.get(field, name if field == "engine" else self._value(field, hints[field], name))
            for field in getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))
        }
        if kind is EngineReport:
            made["parts"] = self.draw.choice([1, 1, 2])
            made["part"] = self.draw.randrange(made["parts"])
        return kind(**made)

    def _value(self, field: str, kind: Any, name: EngineName) -> Any:
        engine = self.job.engines.get(name)
        if get_origin(kind) in (Union, types.UnionType):
            options = get_args(kind)
            if type(None) in options and self.draw.random() < 0.4:
                return None
            return self._value(
                field, self.draw.choice([each for each in options if each is not type(None)]), name
            )
        if get_origin(kind) is Literal:
            return self.draw.choice(get_args(kind))
        if get_origin(kind) is tuple:
            of = get_args(kind)[0]
            return tuple(
                self._value(field, of, self.draw.choice(ENGINES)) for _ in range(self.draw.randint(0, 2))
            )
        if get_origin(kind) is dict or kind is dict:
            return {}
        if kind is Version:
            known = [self.job.meta.version, engine and engine.version, Version(7, 1), Version(8, 0), BASE]
            return self.draw.choice([each for each in known if each is not None])
        if kind is int:
            return self._number(field, engine)
        if kind is EngineName:
            return name
        if kind is NodeName:
            return self.draw.choice(NODES)
        if kind is DecisionId:
            return engine.intent.id if engine and engine.intent else DecisionId("5-1")
        if kind is SyncId:
            sync = self.job.meta.sync
            return sync.order.sync if sync and self.draw.random() < 0.7 else SyncId("7.1-1")
        if kind is RecoveryId:
            return engine.recovery.id if engine and engine.recovery else RecoveryId("none")
        if kind in (str, BootId):
            return self.draw.choice(["", "x", "weights", "application"])
        if kind is bool:
            return self.draw.random() < 0.5
        if kind is float:
            return self.draw.uniform(0.0, 10.0)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return self.draw.choice(list(kind))
        return self._arbitrary(kind)

    def _number(self, field: str, engine: EngineState | None) -> int:
        if field == "incarnation":
            return max(0, (engine.incarnation if engine else 1) + self.draw.choice([0, 0, 0, 0, -1, 1, 5]))
        if field == "run":
            return self.draw.choice([self.job.meta.run, 7, 8])
        if field == "max_epoch":
            return self.job.epoch
        return self.draw.randint(0, 5)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_fact_is_failed_on(seed: int) -> None:
    speaker, heard = Speaker(seed), list[str]()
    for _ in range(STEPS):
        before = speaker.job
        try:
            heard.append(speaker.turn())
        except Exception as error:  # whatever it is, with what led to it
            said = "\n".join(heard[-12:])
            raise AssertionError(f"after\n{said}\nto {before}") from error
    for name, engine in speaker.job.engines.items():
        assert codec.encode_engine(name, engine)
    assert codec.encode_meta(speaker.job.meta)
