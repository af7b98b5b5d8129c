"""How often and how soon an engine is started again: a sliding window, doubling waits, jitter by name."""

import zlib

from relight.events.ids import EngineName
from relight.events.schema import EngineState
from relight.orchestrator.core.job import Work

RETRY_LEAST_S = 1.0
"""Weights that were refused untouched are not offered to the same engine sooner, whatever the back-off."""


def inside_window(work: Work, engine: EngineState) -> tuple[int, ...]:
    """The restarts that still count, as bus times in ms."""
    oldest = work.now - int(work.settings.restart_window_s * 1000)
    return tuple(at for at in engine.restarts if at > oldest)


def left(work: Work, engine: EngineState) -> bool:
    """Whether one more restart is allowed now."""
    if engine.recovery is not None and not engine.recovery.budgeted:
        return True
    return len(inside_window(work, engine)) < work.settings.restarts


def wait_ms(work: Work, name: EngineName, engine: EngineState) -> int:
    """How long to wait before the next start: not at all for the first restart in the window."""
    spent = len(inside_window(work, engine))
    if spent == 0 or (engine.recovery is not None and not engine.recovery.budgeted):
        return 0
    settings = work.settings
    seconds = min(settings.backoff_s * 2.0 ** (spent - 1), settings.backoff_most_s)
    return int(seconds * 1000.0 * _jitter(name, engine.incarnation))


def retry_at(work: Work) -> int:
    """The bus time (ms) before which weights that were refused untouched are not offered again."""
    return work.now + int(max(work.settings.backoff_s, RETRY_LEAST_S) * 1000)


def _jitter(name: EngineName, incarnation: int) -> float:
    """Between 0.8 and 1.2, the same for the same engine and incarnation wherever it is computed."""
    return 0.8 + 0.4 * (zlib.crc32(f"{name}.{incarnation}".encode()) / 0xFFFFFFFF)
