"""Handing weights over to some replicas and no other: verl's own checkpoint manager, one for each sync.

The members of a sync are named by the orchestrator. A full sync has all that live, a recovery the stale one
alone: its group is the trainer and that replica, and nobody else's requests are aborted for it.
"""

import asyncio
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from relight.agents.adapters.verl.theirs import theirs
from relight.agents.trainer.fleet import Fleet, MembersFailed
from relight.agents.trainer.sync import Left
from relight.events.ids import EngineName
from relight.events.values import Member
from relight.events.version import Version

log = logging.getLogger(__name__)

ASK_S = 30.0
"""For stewards and receivers to answer how it went."""


class Handing:
    """Of one trainer: what a `CallbackSync` calls."""

    def __init__(self, manager: Any, config: Any, actors: Any, replicas: Sequence[Any]) -> None:
        """`manager`, verl's CheckpointEngineManager or one like it, is made with `config` and `actors`."""
        self._manager = manager
        self._config = config
        self._actors = actors
        self._replicas = tuple(replicas)
        self._names: dict[EngineName, Any] = {}

    def __call__(self, version: Version, members: tuple[Member, ...], left: Left) -> dict[str, str]:
        """Who of `members` has not loaded the live weights, and why. Raises what the transport raises."""
        failed = self._absent(members)
        reached = [member for member in members if member.engine not in failed]
        if reached:
            replicas = [self._of(member.engine) for member in reached]
            _update(self._manager(self._config, self._actors, replicas), version.step)
            failed |= self._not_loaded(reached)
            failed |= _unlabelled([member for member in reached if member.engine not in failed], version)
        if failed:
            log.warning("weights were not loaded by all version=%s failed=%s", version, failed)
        return failed

    def _of(self, engine: EngineName) -> Any:
        if engine not in self._names:
            names = _asked(replica.servers[0].relight_engine.remote() for replica in self._replicas)
            self._names = dict(zip(names, self._replicas, strict=True))
        return self._names.get(engine)

    def _absent(self, members: Iterable[Member]) -> dict[str, str]:
        """Those that are not there as they are named."""
        failed: dict[str, str] = {}
        for member in members:
            replica = self._of(member.engine)
            if replica is None:
                failed[member.engine] = "no replica of this trainer fills it"
                continue
            (there,) = _asked([replica.servers[0].relight_incarnation.remote()])
            if there != member.incarnation:
                failed[member.engine] = f"incarnation {there} is there, not {member.incarnation}"
        return failed

    def _not_loaded(self, members: Iterable[Member]) -> dict[str, str]:
        failed: dict[str, str] = {}
        for member in members:
            workers = self._of(member.engine).workers
            outcomes = _asked(worker.relight_outcome.remote() for worker in workers)
            if told := next((outcome for outcome in outcomes if outcome), None):
                failed[member.engine] = told
        return failed


def _update(manager: Any, steps: int) -> None:
    """One sync by `manager`, in this thread; its coroutine is run where verl has not done that itself."""
    came = manager.update_weights(steps)
    if inspect.isawaitable(came):
        asyncio.run(_whole(came))


async def _whole(coming: Any) -> None:
    await coming


def _unlabelled(members: Sequence[Member], version: Version) -> dict[str, str]:
    """Label what was loaded; at whom that failed. An agent proves an engine by its label, among others."""
    fleet = Fleet(members, within_s=ASK_S)
    try:
        fleet.post("/update_weight_version", lambda _: {"new_version": str(version)})
    except MembersFailed as error:
        return {str(engine): told for engine, told in error.errors.items()}
    return {}


def _asked(calls: Iterable[Any]) -> list[Any]:
    answers: list[Any] = theirs("ray").get(list(calls), timeout=ASK_S)
    return answers
