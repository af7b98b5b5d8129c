"""What is decided and not done: a job that is only observed, one on hold, a recovery that waits for a word.

Such an order is published with `dry_run`, which nobody obeys, and stands as the engine's open step without a
deadline. When the reason has gone it is asked for anew. Fences are no action: they say what is true, and
are real unless the job is only observed.
"""

from relight.events.decisions import LoadWeights, ProbeEngine
from relight.events.schema import EngineState, Meta
from relight.events.values import Phase
from relight.orchestrator.settings import Settings


def observes(settings: Settings) -> bool:
    """Whether nothing at all is done."""
    return settings.mode == "observe"


def withholds(settings: Settings, meta: Meta, engine: EngineState, kind: type) -> bool:
    """Whether an order of that kind is not to be obeyed. A probe changes nothing, and the trainer's own sync
    of engines that serve is not an action of ours."""
    if observes(settings):
        return True
    if kind is ProbeEngine or (kind is LoadWeights and engine.phase is Phase.SERVING):
        return False
    return meta.hold or (engine.recovery is not None and not engine.recovery.approved)


def is_withheld(engine: EngineState) -> bool:
    """Whether its open step is one that nobody obeys."""
    return engine.intent is not None and engine.intent.dry_run
