"""Virtual time in place of the real one in every module of the product, for as long as a simulation runs.

The product's own code is run as it is. Only what it imports of the outside world is another: clocks, sleeps,
task groups and chance, wherever a module has taken them in, and what a caller names besides.
"""

import asyncio
import importlib
import logging
import random
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio

from tests.simulate.flow import Flow

_OUTSIDE = {"anyio": anyio, "asyncio": asyncio, "random": random, "time": time, "uuid": uuid}


@contextmanager
def staged(flow: Flow, others: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Put `flow` in place of the outside world; `others`: by module, further names and what they are."""
    put: list[tuple[Any, str, Any]] = []
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for module in [module for name, module in sys.modules.items() if name.startswith("relight.")]:
            for name, real in _OUTSIDE.items():
                if getattr(module, name, None) is real:
                    _put(put, module, name, getattr(flow, name))
        for where, values in others.items():
            for name, value in values.items():
                _put(put, importlib.import_module(where), name, value)
        yield
    finally:
        for target, name, value in reversed(put):
            setattr(target, name, value)
        logging.disable(level)


def _put(put: list[tuple[Any, str, Any]], target: Any, name: str, value: Any) -> None:
    put.append((target, name, getattr(target, name)))
    setattr(target, name, value)
