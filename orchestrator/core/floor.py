"""The floor: how many engines must serve. Who would leave too few waits; too few for long raise an alarm."""

from relight.events.ids import EngineName
from relight.events.schema import Meta
from relight.events.values import Phase
from relight.orchestrator.core.job import ENDED_FOR_GOOD, Work
from relight.orchestrator.settings import Settings


def leaves_too_few(work: Work, name: EngineName) -> bool:
    """Whether the job had better wait for another engine, one on its way back, before `name` is taken out."""
    if len(work.serving()) > work.settings.floor:
        return False
    return any(
        other.phase not in (Phase.SERVING, Phase.DRAINING, *ENDED_FOR_GOOD) and other.then == "restart"
        for key, other in work.engines.items()
        if key != name
    )


def watch(work: Work) -> None:
    """Note since when too few engines serve, once enough did."""
    floor, meta = work.settings.floor, work.meta
    served = sum(engine.phase is Phase.SERVING for engine in work.before.engines.values())
    if len(work.serving()) >= floor or meta.finished:
        if meta.below_floor or meta.floor_alarmed:
            work.learn(below_floor=0, floor_alarmed=False)
    elif not meta.below_floor and served >= floor:
        work.learn(below_floor=work.now)


def alarm_at(settings: Settings, meta: Meta) -> int | None:
    """When too few have served for too long (bus time in ms); None where that was said, or enough serve."""
    if not meta.below_floor or meta.floor_alarmed:
        return None
    return meta.below_floor + int(settings.floor_s * 1000)


def alarm(work: Work, *, reason: str) -> None:
    """Say that too few engines serve, if so."""
    serving, floor = len(work.serving()), work.settings.floor
    if serving < floor:
        work.alarm("floor", f"{serving} engines serve, fewer than the floor of {floor}", reason=reason)
        work.learn(floor_alarmed=True)
