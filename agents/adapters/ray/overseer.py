"""The one actor of a job that looks after its holders: in each bundle there is one, and one only.

It starts no engine and no agent by itself, so Ray may restart it as it likes. A holder that has died gets a
successor under the next number; what does not answer is not taken for dead.
"""

import logging
import threading
import time
from typing import Any

from relight.agents.adapters.ray import names
from relight.agents.adapters.ray.holder import Held, Holder
from relight.agents.adapters.ray.jobfile import JobFile
from relight.agents.adapters.ray.names import api
from relight.events import codec

log = logging.getLogger(__name__)

ROUND_S = 1.0
AGAIN_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the next holder of a bundle whose holders keep dying."""


class Overseer:
    """Plain Python; `cluster.oversee` makes an actor of it."""

    def __init__(self, job_file: str, bus_url: str) -> None:
        self._spec = job_file
        self._file = codec.from_json(job_file, JobFile)
        self._bus_url = bus_url
        self._holders: dict[int, Any] = {}
        self._last: dict[int, int] = {}
        """The highest number of each bundle's holders."""
        self._deaths: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._view: dict[int, Held] = {}
        self._asked: dict[int, Any] = {}
        """Questions that are not answered yet: one a bundle, however long Ray takes to place its holder."""
        threading.Thread(target=self._keep, name="keeps the holders", daemon=True).start()

    def spec(self) -> str:
        """The job's file that it goes by."""
        return self._spec

    def view(self) -> list[Held]:
        """What each holder last told, by bundle."""
        return [self._view[bundle] for bundle in sorted(self._view)]

    def _keep(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self._round()
            except Exception:  # Ray raises many things while its GCS is away; the next round tries again
                log.exception("a round came to nothing")
            time.sleep(max(0.0, ROUND_S - (time.monotonic() - began)))

    def _round(self) -> None:
        ray = api()
        group = names.group_of(self._file) or names.reserve(self._file)
        for bundle in range(self._file.all_bundles):
            if bundle not in self._holders and time.monotonic() >= self._not_before.get(bundle, 0.0):
                self._holders[bundle] = self._found(bundle) or self._make(bundle, group)
        for bundle in self._holders.keys() - self._asked.keys():
            self._asked[bundle] = self._holders[bundle].held.remote()
        bundles = {answer: bundle for bundle, answer in self._asked.items()}
        if bundles:
            ready, _ = ray.wait(list(bundles), num_returns=len(bundles), timeout=ROUND_S)
            for answer in ready:
                del self._asked[bundles[answer]]
                self._hear(bundles[answer], answer)

    def _hear(self, bundle: int, answer: Any) -> None:
        ray = api()
        errors = api("ray.exceptions")
        dead = (errors.ActorDiedError, errors.ActorPlacementGroupRemoved, errors.ActorUnschedulableError)
        try:
            self._view[bundle] = Held(*ray.get(answer))
            self._deaths[bundle] = 0
        except dead as error:
            deaths = self._deaths.get(bundle, 0)
            self._deaths[bundle] = deaths + 1
            self._not_before[bundle] = time.monotonic() + AGAIN_S[min(deaths, len(AGAIN_S) - 1)]
            del self._holders[bundle]
            log.warning("a holder has died bundle=%d error=%s", bundle, error)
            last = self._view.get(bundle) or Held(bundle, "", "", "", (), (), None, None)
            self._view[bundle] = last._replace(problem=f"its actor has died: {names.reason(error)}")
        except errors.RayError as error:
            log.warning("a holder does not answer bundle=%d error=%s", bundle, error)

    def _found(self, bundle: int) -> Any:
        """The holder that an earlier life of the overseer has made."""
        ray = api()
        for number in sorted(names.numbers(self._file, bundle), reverse=True):
            try:
                return ray.get_actor(names.holder(self._file, bundle, number))
            except ValueError:  # it has just died
                continue
        return None

    def _make(self, bundle: int, group: Any) -> Any:
        ray = api()
        strategies = api("ray.util.scheduling_strategies")
        number = max((self._last.get(bundle, 0), *names.numbers(self._file, bundle))) + 1
        self._last[bundle] = number
        rest = dict(self._file.ray.resources)
        cpus, gpus, memory = rest.pop("CPU", 0), rest.pop("GPU", 0), rest.pop("memory", None)
        remote: Any = ray.remote(Holder)
        return remote.options(
            name=names.holder(self._file, bundle, number),
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            num_cpus=cpus,
            num_gpus=gpus,
            memory=memory,
            resources=rest or None,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        ).remote(self._spec, bundle, self._bus_url)
