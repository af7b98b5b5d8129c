"""The settings, which stand in the router's YAML file beside `router_class`, the one key that verl reads."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from relight.agents.adapters.verl.theirs import theirs
from relight.events.errors import UsageError
from relight.events.ids import JobName, job_name

KEY = "actor_rollout_ref.rollout.router_config_path"
ROUTER = "relight.agents.adapters.verl.LoadBalancer"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One verl job's."""

    router_class: str = ROUTER
    job: JobName
    """Name of the job at the orchestrator."""
    node_file: str
    """Path of the agent's node file, the same on each node with rollout engines."""
    bus: str | None = None
    """None: RELIGHT_BUS_URL, in every process of verl's."""
    wait_s: float = 300.0
    """Longest wait of a call for a route: twice a long recovery, so that only a lost job ends it."""
    max_engine_failures: int = 3
    """Deaths that one turn of a client without partial rollout may meet; the third may be its own fault."""
    stuck_s: float = 60.0
    """Longest that an engine may leave a bucket of weights unread: an engine loads one in milliseconds."""
    connect_s: float = 60.0
    """How long a replica waits for its node's agent, which may be starting beside it."""
    start_s: float = 1800.0
    """How long verl waits for a replica's first start."""

    @property
    def bus_url(self) -> str:
        url = self.bus or os.environ.get("RELIGHT_BUS_URL")
        if not url:
            raise UsageError("the router's YAML file has no `bus`, and RELIGHT_BUS_URL is not set")
        return url


def read(raw: Mapping[str, Any], *, where: str) -> Settings:
    """The settings in the router's YAML file `where`; raises UsageError."""
    try:
        found = msgspec.convert(dict(raw), Settings)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error
    if found.router_class != ROUTER:
        raise UsageError(f"{where}: router_class is {found.router_class!r}; relight's engines need {ROUTER}")
    try:
        job_name(found.job)
    except UsageError as error:
        raise UsageError(f"{where}: job: {error}") from None
    for name in ("wait_s", "stuck_s", "connect_s", "start_s"):
        if not 0 < getattr(found, name) < float("inf"):
            raise UsageError(
                f"{where}: {name} {getattr(found, name)} must be a finite number of seconds above 0"
            )
    if found.max_engine_failures < 1:
        raise UsageError(f"{where}: max_engine_failures {found.max_engine_failures} must be at least 1")
    return found


def of(rollout: Any) -> Settings:
    """Those that verl's rollout config points to; raises UsageError."""
    path = rollout.get("router_config_path") if hasattr(rollout, "get") else rollout.router_config_path
    if not path:
        raise UsageError(f"{KEY} is not set: it names the YAML file with {ROUTER} and relight's settings")
    omega: Any = theirs("omegaconf").OmegaConf
    try:
        full = Path(theirs("verl.utils.import_utils").resolve_config_path(str(path)))
        raw: Any = omega.to_container(omega.load(full), resolve=True)
    except OSError as error:
        raise UsageError(f"{KEY} {path!r} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{full}: holds no table of settings")
    return read(cast("dict[str, Any]", raw), where=str(full))
