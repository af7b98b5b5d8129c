"""Scenarios for the core: a line says what is heard, and after `->` what is decided.

`python -m tests.scenario --rewrite` writes the right-hand sides anew, to be reviewed as a diff.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.events import decisions, facts
from relight.events.ids import BootId, DecisionId, EngineName, EntryId, NodeName, RecoveryId, SyncId
from relight.events.schema import Meta
from relight.events.values import Canary, Cause, EngineReport, Failed, Loaded, Process, Proof
from relight.events.version import BASE, Version
from relight.orchestrator.core.job import Job, Step
from relight.orchestrator.core.step import committed, step, take_over, tick
from relight.orchestrator.settings import Settings

SCENARIOS = Path(__file__).parent / "scenarios"


def computed(version: Version) -> Canary:
    """What an engine computes with the weights of a version."""
    return Canary(tokens=(1, 2, 3), logprobs=(-1.0, -2.0 - version.step))


class Scenario:
    """A job that hears lines."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self.entries = 0
        self.job = Job(5, Settings(), Meta(birth="born", version=BASE), {})

    def hear(self, line: str) -> str:
        """Apply one line; what was decided, in short."""
        words = line.split()
        match words:
            case ["settings", *pairs]:
                return self._settings(dict(pair.split("=") for pair in pairs))
            case ["wait", seconds]:
                self.now += int(float(seconds) * 1000)
                done = tick(self.job, now=self.now)
            case ["epoch", number, *rest]:
                stamp = rest[0] if rest else self.job.meta.bus
                done = take_over(self.job._replace(epoch=int(number)), now=self.now, bus=stamp)
            case _:
                self.entries += 1
                cause = EntryId(f"{self.entries}-0")
                done = step(self.job, self.fact(words), now=self.now, cause=cause)
        return self._take(done)

    def _settings(self, changes: dict[str, str]) -> str:
        kinds = {name: type(getattr(self.job.settings, name)) for name in changes}
        values = {name: kinds[name](text) for name, text in changes.items()}
        self.job = self.job._replace(settings=Settings(**values))
        return "-"

    def _take(self, done: Step) -> str:
        self.now += 1
        after = committed(done.job, now=self.now)
        self.job = after.job
        said = [_told(decision) for decision in (*done.decisions, *after.decisions)]
        return "; ".join(said) or "-"

    def fact(self, words: list[str]) -> facts.AnyFact:
        """The fact that a line speaks of."""
        match words:
            case ["trainer", run, ("open" | "close") as state, boundary, *options]:
                return self._boundary(int(run), state, int(boundary), _options(options))
            case ["trainer", "publishes", version, *rest]:
                return facts.WeightsPublished(
                    sync=self._sync(rest),
                    version=Version.parse(version),
                    uri=f"/w/{version}",
                    digest="sha256:d",
                )
            case ["trainer", "synced", version, *rest]:
                return self._synced(Version.parse(version), rest)
            case ["trainer", run, "silent"]:
                return facts.TrainerSilent(run=int(run), since=self.now)
            case ["trainer", run, "finished"]:
                return facts.JobFinished(run=int(run))
            case ["node", node, "silent"]:
                return facts.NodeSilent(node=NodeName(node), since=self.now)
            case ["node", node, "up", *rest]:
                return self._node_up(NodeName(node), " ".join(rest))
            case ["operator", "hold"]:
                return facts.HoldRequested()
            case ["operator", "approve", name]:
                recovery = self.job.engines[EngineName(name)].recovery
                return facts.ApprovalGiven(recovery=recovery.id if recovery else RecoveryId("none"))
            case ["operator", wish, *names]:
                kind = getattr(facts, f"{wish.capitalize()}Requested")
                return kind(engine=EngineName(names[0]) if names else None)
            case [name, said, *rest]:
                engine, _, incarnation = name.partition(".")
                told = _of_engine(EngineName(engine), int(incarnation), said, rest)
                return told if "late" in rest else self._answering(told)
            case _:
                raise ValueError(f"no such line: {' '.join(words)}")

    def _answering(self, told: facts.AnyFact) -> facts.AnyFact:
        """A proof of what is asked for now; one that is `late` answers what was asked before."""
        state = self.job.engines.get(told.engine) if isinstance(told, facts.Healthy) else None
        asked = state.intent if state else None
        return msgspec.structs.replace(told, answers=asked.id) if asked else told

    def _sync(self, rest: list[str]) -> SyncId | None:
        if rest == ["alone"]:
            return None
        return self.job.meta.sync.order.sync if self.job.meta.sync else SyncId("none-open")

    def _synced(self, version: Version, rest: list[str]) -> facts.WeightsSynced:
        loaded, failed = [], []
        for word in rest:
            name, _, how = word.partition(":")
            engine, _, incarnation = name.partition(".")
            if how:
                failed.append(Failed(EngineName(engine), int(incarnation), "left", how == "touched"))
            else:
                loaded.append(Loaded(EngineName(engine), int(incarnation)))
        sync = self._sync([]) or SyncId("none-open")
        return facts.WeightsSynced(sync=sync, version=version, loaded=tuple(loaded), failed=tuple(failed))

    def _boundary(self, run: int, state: str, boundary: int, options: dict[str, str]) -> facts.SafeBoundary:
        version = Version.parse(options.get("at", options.get("exports", f"{run}.0")))
        exports = Version.parse(options["exports"]) if "exports" in options else None
        sync = self._sync([])
        return facts.SafeBoundary(
            run=run,
            boundary=boundary,
            step=version.step,
            version=version,
            exports=exports,
            state="open" if state == "open" else "closed",
            sync="all" if "all" in options else "stale",
            release="written" if "written" in options else "routed",
            subset="whole" not in options,
            pushes={"pushes": True, "pulls": False}.get(next(iter(options.keys() & {"pushes", "pulls"}), "")),
            cut_off=sync if "cut_off" in options else None,
        )

    def _node_up(self, node: NodeName, rest: str) -> facts.NodeUp:
        reports: list[EngineReport] = []
        epoch = self.job.epoch
        spares, takes_parts = 0, False
        for part in filter(None, (part.strip() for part in rest.split(","))):
            if part.startswith("max_epoch="):
                epoch = int(part.removeprefix("max_epoch="))
                continue
            if part.startswith("spares="):
                spares = int(part.removeprefix("spares="))
                continue
            if part == "takes-parts":
                takes_parts = True
                continue
            name, condition, *version = part.split()
            engine, _, incarnation = name.partition(".")
            engine, _, of = engine.partition(":")  # `e0:1/2.3`: part 1 of 2
            number, _, parts = of.partition("/")
            reports.append(
                EngineReport(
                    engine=EngineName(engine),
                    incarnation=int(incarnation or 0),
                    state=condition,  # type: ignore[arg-type]
                    address=f"http://{engine}" if condition in ("up", "paused") and number in "0" else None,
                    version=Version.parse(version[0]) if version else None,
                    part=int(number or 0),
                    parts=int(parts or 1),
                )
            )
        return facts.NodeUp(
            node=node,
            boot=BootId("b"),
            max_epoch=epoch,
            engines=tuple(reports),
            spares=spares,
            spare_parts=takes_parts,
        )


def _options(words: list[str]) -> dict[str, str]:
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _of_engine(engine: EngineName, incarnation: int, said: str, rest: list[str]) -> facts.AnyFact:
    name = {"engine": engine, "incarnation": incarnation}
    options = _options(rest)
    node = NodeName(options["node"]) if "node" in options else None
    version = Version.parse(rest[0]) if rest and rest[0][0].isdigit() else None
    proof = Proof(port_free=True)
    said_by: dict[str, Callable[[], facts.AnyFact]] = {
        "dead": lambda: facts.EngineDead(
            **name,
            cause=Cause.SIGNAL,
            node=node,
            signal=int(options.get("signal", "9")),
            detect_ms=3,
            device=options.get("on"),
        ),
        "started": lambda: facts.EngineStarted(
            **name,
            node=node,
            address=f"http://{engine}.{incarnation}",
            weights=version,
            processes=(Process(100 + incarnation, 1),),
            seconds=20.0,
            reloads=False if "spoilt-by-a-reload" in rest else None,
        ),
        "healthy": lambda: facts.Healthy(
            **name,
            address="http://x",
            version=version or BASE,
            canary=computed(Version.parse(options.get("computes", str(version or BASE)))),
            unproven="nothing tells" if "unproven" in rest else None,
            moved="as-before" not in rest,
            labelled="unlabelled" not in rest,
            answers=DecisionId("x"),
        ),
        "stopped": lambda: facts.EngineStopped(**name, node=node or NodeName("a"), proof=proof),
        "start-failed": lambda: facts.StartFailed(
            **name,
            node=node,
            cause=rest[0],
            retryable="for-good" not in rest,
            proof=proof,
            device=options.get("on"),
        ),
        "stop-failed": lambda: facts.StopFailed(**name, node=node, cause="pid 7 lives"),
        "loaded": lambda: facts.WeightsLoaded(**name, version=version or BASE, digest="sha256:d"),
        "failed": lambda: facts.WeightsFailed(
            **name, version=version or BASE, error="bad shard", touched="touched" in rest
        ),
        "pause-expired": lambda: facts.PauseExpired(**name),
        "suspected": lambda: facts.RouteSuspected(**name, error="reset"),
    }
    return said_by[said]()


def _told(said: object) -> str:
    """A decision that nobody is to obey begins with `would`."""
    return f"{'would ' if getattr(said, 'dry_run', False) else ''}{short(said)}"


def short(said: object) -> str:
    """A decision in a few words."""
    match said:
        case decisions.RouteFenced():
            drained = f" drain {said.drain_s:g}" if said.drain_s else ""
            return f"fence {_name(said)}{' planned' if said.planned and not drained else ''}{drained}"
        case decisions.RouteAdded():
            return f"route {_name(said)} {said.version}"
        case decisions.StopEngine():
            nodes = (said.node, *(place.node for place in said.others))
            where = f" at {' '.join(nodes)}" if said.others else ""
            return f"stop {_name(said)}{where}" + (f" then {said.then}" if said.then != "restart" else "")
        case decisions.StartEngine():
            where = f" at {said.node}" if said.node not in ("a", "b") else ""
            where = f" at {' '.join((said.node, *said.parts))}" if said.parts else where
            weights = f" on {said.weights.version}" if said.weights else ""
            avoided = "".join(f" not {node}/{','.join(names)}" for node, names in said.avoid)
            return f"start {_name(said)}{where}{weights}{avoided}"
        case decisions.ProbeEngine():
            return f"probe {_name(said)}"
        case decisions.ReportRequested():
            return f"ask {said.node or said.run}"
        case decisions.SyncWeights():
            members = " ".join(f"{member.engine}.{member.incarnation}" for member in said.members)
            return f"sync {said.version} to {members or 'nobody'}"
        case decisions.LoadWeights():
            return f"load {_name(said)} {said.version}"
        case decisions.VerifyEngine():
            against = "reference" if said.reference else "nothing"
            return f"verify {_name(said)} {said.version} against {against}"
        case decisions.BoundaryReleased():
            return f"release {said.boundary} {said.outcome}"
        case decisions.EngineRetired():
            return f"retired {_name(said)}"
        case decisions.Alarm():
            return f"alarm {said.kind}"
        case decisions.RecoveryFinished():
            return f"recovery {_name(said)} {said.outcome}"
        case facts.NodeSilent():
            return f"silent {said.node}"
        case facts.TrainerSilent():
            return f"silent {said.run}"
        case _:
            raise TypeError(f"no short form of {said!r}")


def _name(said: decisions.ForEngine) -> str:
    return f"{said.engine}.{said.incarnation}"


def replay(text: str) -> str:
    """The scenario with its right-hand sides as the core says them now."""
    scenario = Scenario()
    lines: list[str] = []
    for line in text.splitlines():
        heard = line.split("->")[0].strip()
        if not heard or heard.startswith("#"):
            lines.append(line)
            continue
        lines.append(f"{heard:<52} -> {scenario.hear(heard)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--rewrite" not in sys.argv:
        raise SystemExit("usage: python -m tests.scenario --rewrite")
    for path in sorted(SCENARIOS.glob("*.txt")):
        path.write_text(replay(path.read_text()))
