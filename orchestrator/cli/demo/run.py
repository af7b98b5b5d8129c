"""`relight demo`: plays the demo, judges what was seen, prints it, and says by its exit code what held."""

import io
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskStatus

from relight.events.errors import UsageError
from relight.orchestrator.cli.demo import layout, report
from relight.orchestrator.cli.demo.audit import audit
from relight.orchestrator.cli.demo.evidence import Evidence, Fault, Kind, Plan, RecoverAt
from relight.orchestrator.cli.demo.layout import Place
from relight.orchestrator.cli.demo.play import play
from relight.orchestrator.cli.demo.report import Progress
from relight.orchestrator.cli.demo.timeline import timeline

PASSED, FAILED = 0, 1


def run(
    *, engine: Kind | None, engines: int, fault: Fault, as_json: bool, recover_at: RecoverAt = "boundary"
) -> int:
    """Play one demo: 0 where every check passed, 1 otherwise. Raises UsageError and KeyboardInterrupt.

    `engine`: vLLM where it is installed if none is given. Its folder is removed unless something failed.
    """
    kind = engine or layout.default_kind()
    progress = report.progress(as_json=as_json)
    if engine is None:
        progress.say(f"vLLM is {'installed' if kind == 'vllm' else 'not installed: the stub stands in'}")
    if kind == "vllm" and layout.default_kind() != "vllm":
        raise UsageError("--engine vllm: vLLM is not installed in this Python; try --engine stub")
    progress.say(f"relight demo: {engines} {kind} engine(s), fault {fault}, recovery at {recover_at}")
    plan = layout.plan(kind, engines=engines, fault=fault, recover_at=recover_at)
    root = Path(tempfile.mkdtemp(prefix="relight-demo-"))
    kept = True
    try:
        evidence = anyio.run(_interruptible, plan, Place(root), progress)
        kept = not _judged(evidence, progress, as_json=as_json)
        if kept:
            (root / "evidence.json").write_bytes(msgspec.json.encode(evidence))
        else:
            shutil.rmtree(root)
    except KeyboardInterrupt:
        kept = False
        shutil.rmtree(root, ignore_errors=True)  # after a second Ctrl-C the guard is at work in it
        raise
    finally:
        if kept:
            progress.say(f"logs and evidence are kept in {root}")
    return FAILED if kept else PASSED


def _judged(evidence: Evidence, progress: Progress, *, as_json: bool) -> bool:
    findings = audit(evidence)
    phases = timeline(evidence)
    page = io.StringIO()
    report.audit(findings, page)
    report.timeline(phases, page)
    report.write(progress.stream, page.getvalue())
    if as_json:
        object_ = msgspec.json.encode(report.in_json(evidence, findings, phases)).decode()
        report.write(sys.stdout, object_ + "\n")
    return all(finding.passed for finding in findings)


async def _interruptible(plan: Plan, place: Place, progress: Progress) -> Evidence:
    """Play until Ctrl-C or SIGTERM: raises KeyboardInterrupt for either, when everything has ended."""
    async with anyio.create_task_group() as tasks:

        async def watch(*, task_status: TaskStatus[None]) -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                task_status.started()
                async for number in signals:
                    progress.say(f"{number.name}: stopping everything")
                    break
            tasks.cancel_scope.cancel()

        await tasks.start(watch)
        evidence = await play(plan, place, progress)
        tasks.cancel_scope.cancel()
        return evidence
    raise KeyboardInterrupt
