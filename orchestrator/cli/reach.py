"""From a command's arguments to the bus and the job that are meant."""

from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from relight.events.bus.client import Bus, open_bus
from relight.events.bus.errors import shown
from relight.events.bus.job import JobBus
from relight.events.errors import UsageError
from relight.events.ids import EngineName, JobName, engine_name, job_name
from relight.events.schema import EngineState, Snapshot


def bus_url(args: Namespace) -> str:
    """The bus that `args` names; raises UsageError where they and the environment name none."""
    if not args.bus:
        raise UsageError("no bus is named: give --bus URL or set RELIGHT_BUS_URL")
    return str(args.bus)


@asynccontextmanager
async def the_job(args: Namespace) -> AsyncGenerator[JobBus]:
    """The job that `args.job` names, or the only one; raises UsageError, or BusUnavailable."""
    url = bus_url(args)
    wanted = job_name(args.job) if args.job else None
    async with open_bus(url, reached=False) as bus:
        await bus.check_kind()  # who asks how things stand is answered on any server that serves
        yield bus.job(await _chosen(bus, wanted))


async def _chosen(bus: Bus, wanted: JobName | None) -> JobName:
    jobs = await bus.jobs()
    where = f"bus {shown(bus.url)}"
    if wanted is not None:
        if wanted not in jobs and (await bus.job(wanted).snapshot()).meta is None:
            raise UsageError(f"{where} has no job {wanted!r}; it has {_listed(jobs)}")
        return wanted
    if len(jobs) != 1:
        raise UsageError(f"{where} has {_listed(jobs)}" + ("; choose one with --job" if jobs else ""))
    return jobs[0]


def _listed(jobs: list[JobName]) -> str:
    return f"{len(jobs)} job{'s' * (len(jobs) > 1)}: {', '.join(jobs)}" if jobs else "no job"


def the_engine(name: str, job: JobName, snapshot: Snapshot) -> tuple[EngineName, EngineState]:
    """The engine called `name`; raises UsageError that lists the job's engines."""
    engine = engine_name(name)
    if engine not in snapshot.engines:
        known = ", ".join(sorted(snapshot.engines)) or "none"
        raise UsageError(f"job {job} has no engine {name!r}; its engines: {known}")
    return engine, snapshot.engines[engine]
