"""`relight status`: a job's engines, trainer and orchestrator, as committed on the bus."""

from argparse import Namespace

from relight.orchestrator import looking
from relight.orchestrator.cli import printing, reach, running
from relight.orchestrator.engine_views import EngineView
from relight.orchestrator.views import JobView


def run(args: Namespace) -> int:
    async def main() -> None:
        async with reach.the_job(args) as job:
            [view] = await looking.at_jobs(job.bus, [job.name])
        if not isinstance(view, JobView):
            raise view
        if args.format == "json":
            printing.as_json(view)
        else:
            show(view)

    return running.once(main)


def show(view: JobView) -> None:
    """Print the job as a few lines and a table of engines."""
    held = f"epoch {view.epoch}, held by {view.holder}" if view.holder else "none holds the job"
    facts = {
        "job": " ".join([view.job, *_marks(view)]),
        "orchestrator": f"{held}, commit {view.commit}",
        "trainer": _trainer(view),
        "weights": f"version {view.version or printing.NONE}, published {view.published or printing.NONE}",
        "sync": f"open, waits for {', '.join(view.sync_waits_for)}" if view.sync_waits_for else None,
        "silent nodes": ", ".join(view.silent_nodes) or None,
        "parked": f"{view.parked} entries that nobody could decode" if view.parked else "0",
        "counted": " ".join(f"{kind}={count}" for kind, count in sorted(view.counters.items())) or None,
    }
    for name, text in facts.items():
        if text is not None:
            print(f"{name + ':':<14}{text}")
    print()
    head = ("ENGINE", "PHASE", "INCARNATION", "VERSION", "ROUTE", "NODE", "WAITS FOR")
    printing.table(head, [_row(engine) for engine in view.engines])


def _marks(view: JobView) -> list[str]:
    marks = {"FINISHED": view.finished, "ON HOLD": view.hold, "ONLY OBSERVED": view.mode == "observe"}
    return [mark for mark, shown in marks.items() if shown]


def _trainer(view: JobView) -> str:
    if not view.run:
        return "none yet"
    if view.trainer_silent:
        return f"run {view.run}, silent"
    if view.boundary is None:
        return f"run {view.run}, no boundary open"
    at = view.boundary
    return (
        f"run {view.run}, boundary {at.boundary} open at step {at.step} ({at.phase}, sync {at.sync},"
        f" exports {at.exports or 'nothing'})"
    )


def _row(engine: EngineView) -> tuple[object, ...]:
    waits: list[str] = []
    if not engine.approved:
        waits.append(f"`relight approve {engine.recovery}`")
    if engine.intent:
        left_s = engine.intent.left_s
        left = "withheld" if left_s is None else f"{left_s:.0f} s left"
        waits.append(f"{engine.intent.decision}, {left}")
    if engine.backoff_s is not None:
        waits.append(f"its next start, in {engine.backoff_s:.0f} s")
    if engine.why:
        since = f" for {engine.for_s:.1f} s" if engine.for_s is not None else ""
        waits.append(f"recovery{since}: {engine.why}" if engine.recovery else engine.why)
    return (
        engine.engine,
        engine.phase,
        engine.incarnation,
        engine.version,
        engine.route,
        " ".join((engine.node, *engine.parts)),
        "; ".join(waits) or None,
    )
