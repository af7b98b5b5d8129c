"""Every default of the orchestrator, in one table, each with its unit and its reason.

A configuration file has `[defaults]` and `[jobs.NAME]`; the lease holder writes what it uses to
`meta.settings`, so that two orchestrators with different files are noticed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from relight.events import toml
from relight.events.errors import UsageError
from relight.events.ids import JobName, job_name

_NEVER_0 = ("lease_s", "starts_per_node", "starts_per_job", "keep_entries")
"""Settings with which nothing would ever be decided, started or read if they were 0."""


_MOST = 1_000_000_000
"""Of seconds thirty years; above it nobody can have meant what a file says."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one job is recovered."""

    mode: Literal["act", "approve", "observe"] = "act"
    """`approve`: each recovery waits for an operator. `observe`: everything is decided and published, marked
    `dry_run`, and nothing is done."""
    recover_at: Literal["boundary", "snapshot", "either"] = "either"
    """Where a replacement's weights come from: the trainer's open boundary, a published snapshot of the
    job's version, or what comes first."""

    start_s: float = 1800.0
    """Longest start until one good start was seen: a large model compiles and loads for many minutes."""
    start_factor: float = 4.0
    """A later start may take this many times the last good one: caches may be cold again."""
    start_least_s: float = 60.0
    """No start is given less, whatever was learned: a busy host stretches short starts most."""
    stop_s: float = 30.0
    """Longest stop and proof after any draining; device memory may come back late."""
    load_s: float = 120.0
    """Longest load of pulled weights: 60 s plus 60 GB at 1 GB/s."""
    verify_s: float = 60.0
    """Longest proof: the first canary after a start may compile."""
    probe_s: float = 15.0
    """Longest probe; above the agent's own stall window, so that the agent's word comes first."""
    sync_s: float = 300.0
    """Longest sync from SyncWeights to the last member; the transport's own bound lies within it."""
    report_s: float = 5.0
    """A report not given within this is asked for again."""
    drain_s: float = 60.0
    """How long running calls may finish when an operator drains an engine."""

    lease_s: float = 3.0
    """Life of the lease; renewed each second, so that two renewals may be lost."""
    keep_entries: int = 10_000
    """Entries that each stream keeps, about: days of an ordinary job, some 10 MB. Unread facts always
    stay."""
    node_silence_s: float = 10.0
    """A node whose pulse stands still this long is fenced: ten lost pulses."""
    trainer_silence_s: float = 30.0
    """A trainer whose pulse stands still this long has lost its boundary; its threads may be starved."""

    move_after_s: float = 30.0
    """An engine of a silent node goes to a spare on another one after this: most partitions are over by then,
    and a return costs nothing."""

    restarts: int = 5
    """Restarts of one engine inside the window before it is retired."""
    restart_window_s: float = 900.0
    """The sliding window of the restart budget."""
    backoff_s: float = 10.0
    """Wait before the second restart inside the window; the first is at once; doubles after that."""
    backoff_most_s: float = 300.0
    """Longest wait between two restarts."""
    device_failures: int = 3
    """Failures on one device inside the window after which an alarm names it: two may be chance."""
    starts_per_node: int = 4
    """Starts at a time on one node: each holds host memory and loads from the same disk."""
    starts_per_job: int = 32
    """Starts at a time in the job: shared file systems feel them all."""
    floor: int = 1
    """Fewer serving engines than this raise an alarm; a drain that would leave fewer waits for an engine on
    its way back."""
    floor_s: float = 300.0
    """How long fewer may serve before that alarm, where none was retired: a cold start of a large model takes
    minutes."""
    waiting_s: float = 60.0
    """An engine that waits for weights this long is named in an alarm, with what it waits for."""

    tolerance: float = 0.25
    """Largest difference of a canary's logprobs, in nats: above what bf16 and other kernels do, far below
    what wrong weights do."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not 0 <= value <= _MOST:
                raise ValueError(f"{field.name} must be a number from 0 to {_MOST:.0e}, not {value}")
        for name in _NEVER_0:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")


class SettingsFile(msgspec.Struct, frozen=True):
    """The settings of every job: its own table over the defaults."""

    defaults: Settings
    jobs: Mapping[JobName, Settings]

    def of(self, job: JobName) -> Settings:
        return self.jobs.get(job, self.defaults)


DEFAULT = SettingsFile(Settings(), {})


def observed(file: SettingsFile) -> SettingsFile:
    """The same settings for jobs that are only observed."""
    only = {"mode": "observe"}
    return SettingsFile(
        msgspec.structs.replace(file.defaults, **only),
        {name: msgspec.structs.replace(settings, **only) for name, settings in file.jobs.items()},
    )


def load(path: Path) -> SettingsFile:
    """The orchestrator's configuration file; raises UsageError with the path of what is wrong in it."""
    tables = toml.tables(path, where=f"configuration {path}")
    unknown = sorted(set(tables) - {"defaults", "jobs"})
    if unknown:
        raise UsageError(
            f"configuration {path}: unknown table {unknown[0]!r}; there are [defaults] and [jobs.NAME]"
        )
    try:
        defaults = msgspec.convert(tables.get("defaults", {}), dict[str, Any])
        jobs = msgspec.convert(tables.get("jobs", {}), dict[str, dict[str, Any]])
    except msgspec.ValidationError as error:
        raise UsageError(
            f"configuration {path}: [defaults] and [jobs.NAME] must be tables: {error}"
        ) from error
    return SettingsFile(
        _settings(defaults, f"{path}: defaults"),
        {
            _job_name(name, path): _settings({**defaults, **table}, f"{path}: jobs.{name}")
            for name, table in jobs.items()
        },
    )


def _settings(table: dict[str, Any], where: str) -> Settings:
    try:
        return msgspec.convert(table, Settings)
    except (msgspec.ValidationError, ValueError) as error:
        key = re.search(r"`(?:\$\.)?(\w+)`$", str(error))
        value = f" (value {table[key[1]]!r})" if key and key[1] in table else ""
        raise UsageError(f"configuration {where}: {error}{value}") from error


def _job_name(text: str, path: Path) -> JobName:
    try:
        return job_name(text)
    except UsageError as error:
        raise UsageError(f"configuration {path}: jobs: {error}") from None
