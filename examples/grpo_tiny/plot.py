"""The picture: reward by step, without faults on the left, with them on the right, each kill marked."""

from pathlib import Path

import numpy as np
from verdict import Line, Verdict

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def draw(verdict: Verdict, path: Path) -> None:
    """Write a PNG of some 60 kB."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    kills = {(kill.seed, kill.step) for kill in verdict.kills}
    for panel, faults, title in zip(panels, (False, True), ("without faults", "with faults"), strict=True):
        curves = _curves(verdict.lines, faults=faults)
        for number, (seed, rewards) in enumerate(curves.items()):
            colour = COLOURS[number % len(COLOURS)]
            panel.plot(rewards, color=colour, linewidth=1.0, label=f"seed {seed}")
            struck = [step for step in range(len(rewards)) if faults and (seed, step) in kills]
            panel.plot(struck, rewards[struck], "v", color=colour, markersize=8, markeredgecolor="black")
        if len(curves) > 1:
            panel.plot(np.mean(list(curves.values()), axis=0), color="black", linewidth=2.0, label="mean")
        panel.set_title(f"{title} (▼: an engine is killed)" if faults else title)
        panel.set_xlabel("step")
        panel.set_ylim(0.0, 1.02)
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("mean reward of a step")
    panels[0].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(lines: tuple[Line, ...], *, faults: bool) -> dict[int, np.ndarray]:
    """Rewards by step, by seed."""
    mine = [line for line in lines if line["faults"] == faults]
    seeds = sorted({line["seed"] for line in mine})
    return {seed: np.array([line["reward"] for line in mine if line["seed"] == seed]) for seed in seeds}
