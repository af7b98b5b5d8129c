"""What a job has in a Ray cluster, by its names: the placement group, the overseer, a holder a bundle."""

from importlib import import_module
from typing import Any

from relight.agents.adapters.ray.jobfile import JobFile


def api(module: str = "ray") -> Any:
    """A module of Ray's, imported when it is needed; what it gives is not typed here."""
    return import_module(module)


def group(file: JobFile) -> str:
    return f"relight/{file.job}"


def overseer(file: JobFile) -> str:
    return f"relight/{file.job}/overseer"


def holder(file: JobFile, bundle: int, number: int) -> str:
    """Each one that is made for a bundle has a number of its own."""
    return f"{_holders(file, bundle)}{number}"


def _holders(file: JobFile, bundle: int) -> str:
    return f"relight/{file.job}/bundle-{bundle}/"


def numbers(file: JobFile, bundle: int) -> list[int]:
    """Of the bundle's holders that live."""
    ray = api()
    lead = _holders(file, bundle)
    there = [str(name) for name in ray.util.list_named_actors()]
    return [int(name.removeprefix(lead)) for name in there if name.startswith(lead)]


def actors(file: JobFile) -> list[str]:
    """Every actor of the job that lives."""
    ray = api()
    lead = f"relight/{file.job}/"
    return [str(name) for name in ray.util.list_named_actors() if str(name).startswith(lead)]


def group_of(file: JobFile) -> Any:
    """The job's placement group; None where there is none."""
    ray = api()
    try:
        return ray.util.get_placement_group(group(file))
    except ValueError:
        return None


def reserve(file: JobFile) -> Any:
    """Ask for the job's placement group; it may take its time."""
    ray = api()
    bundles = [dict(file.ray.resources) for _ in range(file.all_bundles)]
    return ray.util.placement_group(
        bundles, strategy=file.ray.strategy, name=group(file), lifetime="detached"
    )


def reason(error: Exception) -> str:
    """The last line of what Ray says, which is the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
