"""`relight config check FILE`: what a node file or an orchestrator's file holds, or what is wrong in it."""

from argparse import Namespace
from pathlib import Path

import msgspec

from relight.events import toml
from relight.events.errors import UsageError
from relight.orchestrator import settings
from relight.orchestrator.cli import printing

_OF_NODE = {"job", "node", "state_dir", "engines"}
_OF_JOB = "ray"
_OF_ORCHESTRATOR = {"defaults", "jobs"}


def run(args: Namespace) -> int:
    path = Path(args.file)
    snapshots = Path(args.snapshots) if args.snapshots else None
    keys = _keys(path)
    if _OF_JOB in keys:
        found = _job(path)
    else:
        found = _node(path, snapshots) if _is_node_file(path, keys) else _orchestrator(path)
    if args.format == "json":
        printing.as_json(found)
    else:
        for name, value in found.items():
            print(f"{name}: {value}")
    return 0


def _keys(path: Path) -> set[str]:
    return set(toml.tables(path, where=f"configuration {path}"))


def _is_node_file(path: Path, keys: set[str]) -> bool:
    if keys & _OF_NODE:
        return True
    if keys & _OF_ORCHESTRATOR:
        return False
    raise UsageError(
        f"configuration {path} is neither a node file (job, node, state_dir, [[engines]])"
        " nor a job's file for Ray ([[engines]], [ray]) nor an orchestrator's file ([defaults], [jobs.NAME])"
    )


def _job(path: Path) -> dict[str, object]:
    from relight.agents.adapters.ray import jobfile

    file = jobfile.load(path)
    bundles = range(file.all_bundles)
    return {
        "file": str(path),
        "kind": "job",
        "job": file.job,
        "each bundle": jobfile.shown(file.ray.resources),
        "bundles": [[engine.name for engine in file.dealt(bundle)] or "spare" for bundle in bundles],
    }


def _node(path: Path, snapshots: Path | None) -> dict[str, object]:
    from relight.agents.node import config, sizing

    file = config.load(path)
    models = {engine.name: config.base_model(engine) for engine in file.engines}
    sizes = {
        name: sizing.snapshot_of(model, snapshots) for name, model in models.items() if model is not None
    }
    return {
        "file": str(path),
        "kind": "node",
        "job": file.job,
        "node": file.node,
        "engines": [engine.name for engine in file.engines],
        "snapshots": {name: size._asdict() for name, size in sizes.items() if size is not None},
    }


def _orchestrator(path: Path) -> dict[str, object]:
    file = settings.load(path)
    plain = settings.Settings()
    return {
        "file": str(path),
        "kind": "orchestrator",
        "defaults": _changed(file.defaults, plain),
        "jobs": {name: _changed(of_job, file.defaults) for name, of_job in file.jobs.items()},
    }


def _changed(mine: settings.Settings, base: settings.Settings) -> dict[str, object]:
    """The settings in which `mine` differs from `base`."""
    theirs = msgspec.structs.asdict(base)
    return {name: value for name, value in msgspec.structs.asdict(mine).items() if value != theirs[name]}
