"""Other projects' modules, imported when they are needed."""

from importlib import import_module
from typing import Any

from relight.events.errors import UsageError

INSTALL = {
    "verl": "pip install 'verl==0.9.*'",
    "ray": "pip install 'relight[ray]'",
    "vllm": "pip install vllm",
    "omegaconf": "pip install 'verl==0.9.*'",
}


def theirs(name: str) -> Any:
    """The module of this name; raises UsageError where its package is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        how = INSTALL.get(package, f"pip install {package}")
        raise UsageError(f"{package} is not installed in this environment: {how}") from error
