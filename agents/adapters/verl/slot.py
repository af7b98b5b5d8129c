"""A delegated slot of the node's agent, filled by this process as long as it lives.

The node file names the slots; which replica takes which is settled by the agent, which lets nobody fill one
that another process fills.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import anyio

from relight.agents.adapters.verl.settings import Settings
from relight.agents.control.outcome import operator
from relight.agents.node import config
from relight.agents.node.delegated.application import Delegate, Start, delegate
from relight.events.bus.client import open_bus
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import ReleaseRequested
from relight.events.ids import EngineName
from relight.events.values import Phase

log = logging.getLogger(__name__)

BUS_S = 10.0
"""For a bus to tell whether the slot's engine was given up."""
BY_OPERATOR = "an operator asked for it"


class Slot:
    """Made by `take`."""

    def __init__(self, engine: EngineName, delegated: Delegate) -> None:
        self.engine = engine
        self._delegate = delegated

    def leave(self) -> None:
        """Fill it no more; what runs in it goes on."""
        self._delegate.__exit__(None, None, None)


def take(settings: Settings, start: Start, *, ended: Callable[[str, int, str], None]) -> Slot:
    """Fill a free slot of this node; `start` is called for each incarnation that is due.

    Raises UsageError where there is none, and AgentUnreachable.
    """
    path = Path(settings.node_file)
    file = config.load(path)
    if file.job != settings.job:
        raise UsageError(f"{path}: job is {file.job!r}, and the router's YAML file says {settings.job!r}")
    slots = [each.name for each in file.engines if each.launcher == "delegated"]
    if not slots:
        raise UsageError(f'{path}: no engine there has launcher = "delegated", so no replica fits this node')
    refused: list[str] = []
    for name in slots:
        waiting = delegate(file.state_path, {name: start}, ended=ended, connect_s=settings.connect_s)
        try:
            return Slot(name, waiting.__enter__())
        except UsageError as error:
            refused.append(f"{name}: {error}")
    raise UsageError(f"{path}: no slot is free for one more replica: {'; '.join(refused)}")


async def wanted_again(settings: Settings, engine: EngineName) -> None:
    """Ask for an engine that was given up, as one is that nobody came to start; not against an operator."""
    try:
        with anyio.move_on_after(BUS_S):
            async with open_bus(settings.bus_url, reached=False) as bus:
                job = bus.job(settings.job)
                state = (await job.snapshot()).engines.get(engine)
                if (
                    state is not None
                    and state.phase is Phase.RETIRED
                    and state.retired_because != BY_OPERATOR
                ):
                    await job.hint(ReleaseRequested(engine=engine), source=operator())
    except BusUnavailable as error:
        log.warning("whether it was given up cannot be told engine=%s error=%s", engine, error)
