"""The picture: the tokens that each of the two calls holds, by time, and the recovery below."""

from pathlib import Path

from relight.orchestrator.cli.demo.evidence import MODES, Evidence, Piece
from relight.orchestrator.cli.demo.timeline import Phase

COLOURS = {"restart": "#ee6677", "continue": "#4477aa"}
PHASES = ("detect", "fence", "stop", "start", "boundary", "sync", "verify", "route")


def draw(evidence: Evidence, phases: list[Phase], path: Path) -> None:
    """Write a PNG of some 50 kB."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (calls, recovery) = pyplot.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, layout="constrained", height_ratios=(3, 1)
    )
    fault_ms = evidence.injections[-1].at_ms
    for mode in MODES:
        times, held = _held([piece for piece in evidence.pieces if piece.mode == mode])
        seconds = [(time - fault_ms) / 1000.0 for time in times]
        calls.plot(seconds, held, drawstyle="steps-post", color=COLOURS[mode], label=f"mode {mode}", lw=2)
    calls.axvline(0.0, color="black", linestyle=":", label=evidence.plan.fault)
    calls.set_ylabel("tokens that the caller holds")
    calls.legend(loc="center right")
    calls.grid(visible=True, alpha=0.3)
    began = 0.0
    for phase in (phase for phase in phases if phase.name in PHASES and phase.ms is not None):
        width = (phase.ms or 0.0) / 1000.0
        recovery.barh(0, width, left=began, label=f"{phase.name} {phase.ms:.0f} ms")
        began += width
    recovery.set_yticks([0], ["recovery"])
    recovery.set_xlabel("seconds after the fault")
    recovery.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=4, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _held(pieces: list[Piece]) -> tuple[list[float], list[int]]:
    """When the caller held how many tokens; one that is replayed begins anew."""
    times, held, attempt = [pieces[0].at_ms], [0], 0
    for piece in pieces:
        before = held[-1]
        if piece.attempt != attempt and piece.mode == "restart":
            before = 0
        attempt = piece.attempt
        times.append(piece.at_ms)
        held.append(before + len(piece.token_ids))
    return times, held
