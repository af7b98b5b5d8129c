"""prime-rl: one admin address in front of all engines of a job, as prime-rl's orchestrator calls its servers.

Its trainer writes each step's weights into a directory; its orchestrator then has every server pause, load
the directory and go on. Here that is a version that is published: each engine's agent loads it, with proof,
also into an engine that is started later; and the call returns when every engine that is routed has it.

    python -m relight.agents.adapters.prime_rl --job prime-1 --port 8200
"""

import argparse
import os
import re
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import anyio
import anyio.to_thread
from aiohttp import web
from anyio.abc import TaskStatus

from relight.agents import snapshot
from relight.agents.replay.passing import models_of
from relight.agents.replay.refusals import refusal
from relight.agents.snapshot import SnapshotError
from relight.agents.trainer.api import Trainer
from relight.agents.trainer.session import trainer
from relight.events.bus.client import open_bus
from relight.events.bus.follow import Follower
from relight.events.bus.job import JobBus
from relight.events.errors import BusUnavailable, RelightError, UsageError
from relight.events.ids import job_name
from relight.events.schema import Route, Snapshot
from relight.events.version import Version

STEP = re.compile(r"step_(\d+)(?:/weight)?$")
"""How prime-rl names the directory of a step's weights: what it broadcasts, and in a checkpoint."""
ROUTED_S = 600.0
"""Longest load of all engines; prime-rl waits for 720 s, and asks again."""

Call = Callable[["Admin", web.Request], Awaitable[web.Response]]


class Overtaken(RelightError):
    """Newer weights than those that were to be loaded are the job's."""


class Admin:
    """What the calls are made of. Its session is a run of prime-rl's trainer.

    Within a run steps only grow. A step back, or other weights of the last step, are those of a trainer that
    was resumed: they begin the next run, whose every version is newer than what was published before.
    """

    def __init__(self, session: Callable[[], Trainer], job: JobBus, http: aiohttp.ClientSession) -> None:
        self._new = session
        self._session: Trainer | None = None
        self._last: tuple[int, str] | None = None
        """The step and directory that this run published last."""
        self._turn = anyio.Lock()
        self._job = job
        self._http = http

    async def begin(self) -> None:
        """Begin a run, behind which the one before it ends. Raises BusUnavailable, UsageError."""
        session = self._new()
        with anyio.CancelScope(shield=True):  # what was begun must be ended
            await anyio.to_thread.run_sync(session.__enter__)
            before, self._session, self._last = self._session, session, None
            if before is not None:
                await _left(before)

    async def end(self) -> None:
        """End the run. The job is not finished by it: another one may follow, of another life."""
        with anyio.CancelScope(shield=True):
            if self._session is not None:
                await _left(self._session)

    async def publish(self, directory: str) -> Version:
        """Have every engine load `directory`; returns when those that are routed have it.

        Raises SnapshotError for what holds no weights, or others than were published from there; UsageError
        for a name without a step; Overtaken; BusUnavailable; TimeoutError.
        """
        directory = directory.rstrip("/")
        named = STEP.search(directory)
        if named is None:
            raise UsageError(f"weight_dir {directory!r} ends neither in step_N nor in step_N/weight")
        with anyio.fail_after(ROUTED_S):
            async with self._turn:
                version = await self._published(int(named[1]), directory)
            await self._routed(version)
        return version

    async def _published(self, step: int, directory: str) -> Version:
        if self._last is not None and step <= self._last[0] and not await self._stands(step, directory):
            await self.begin()
        assert self._session is not None
        await anyio.to_thread.run_sync(self._session.published, step, directory)
        self._last = step, directory
        return Version(self._session.run, step)

    async def _stands(self, step: int, directory: str) -> bool:
        """Whether the same was published last and every byte is what it was: then it is only asked again."""
        assert self._session is not None
        if self._last != (step, directory):
            return False
        try:
            manifest = await anyio.to_thread.run_sync(snapshot.verify, snapshot.directory_of(directory))
        except SnapshotError:
            return False
        return manifest.version == Version(self._session.run, step)

    async def _routed(self, version: Version) -> None:
        follower = Follower(self._job)
        while True:
            state = await self._state(follower)
            routes = [route.version for route in routes_of(state)]
            if routes and set(routes) == {version}:
                return
            published = state.meta.published if state.meta is not None else None
            newest = max([*routes, published.version if published is not None else version])
            if newest > version:
                raise Overtaken(
                    f"engines are given {newest}, not {version}, which this call published: another call or"
                    " another trainer of the job came after it; end that one, or load what it published"
                )

    async def models(self, request: web.Request) -> web.Response:
        """What a routed engine says, waiting for one that answers; 503 where none came in ROUTED_S."""
        follower = Follower(self._job)
        answer = refusal(
            503, f"no engine of this job was routed for {ROUTED_S:g} s", "ServiceUnavailableError"
        )
        with anyio.move_on_after(ROUTED_S):
            while answer.status == 503:
                addresses = [route.address for route in routes_of(await self._state(follower))]
                if addresses:
                    answer = await models_of(addresses, request, http=self._http)
        return answer

    async def _state(self, follower: Follower) -> Snapshot:
        """The state as it stands at first, and then after whatever is decided."""
        while True:
            await follower.next()
            with suppress(BusUnavailable):
                return await self._job.snapshot()


async def _left(session: Trainer) -> None:
    await anyio.to_thread.run_sync(session.__exit__, SystemExit, SystemExit(), None)


def routes_of(state: Snapshot) -> list[Route]:
    return [engine.route for engine in state.engines.values() if engine.route is not None]


async def _update_weights(admin: Admin, request: web.Request) -> web.Response:
    directory = (await request.json()).get("weight_dir")
    if not directory:
        return _refused(501, "weights over NCCL are not taken: set weight_broadcast.type = 'filesystem'")
    try:
        version = await admin.publish(directory)
    except UsageError as error:
        return _refused(400, str(error))
    except SnapshotError as error:  # a directory that is not whole on this machine yet: it is asked for again
        return _refused(500, str(error))
    except Overtaken as error:
        return _refused(409, str(error))
    except BusUnavailable as error:
        return _refused(503, str(error))
    except TimeoutError:
        return _refused(504, f"{directory} is not with every engine after {ROUTED_S:g} s")
    return web.json_response({"status": "ok", "version": str(version)})


async def _models(admin: Admin, request: web.Request) -> web.Response:
    """prime-rl asks once, as soon as `/health` answers, and ends where no model is named: so it waits."""
    return await admin.models(request)


async def _done(_: Admin, __: web.Request) -> web.Response:
    """Each engine is paused by its agent, for its own load alone."""
    return web.json_response({"status": "ok"})


async def _no_group(_: Admin, __: web.Request) -> web.Response:
    return _refused(501, "a broadcaster's group is made once and holds no replacement: use the file system")


async def _no_adapter(_: Admin, __: web.Request) -> web.Response:
    return _refused(501, "adapters that are not merged are not supported")


def _refused(status: int, why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "code": status}}, status=status)


ROUTES: tuple[tuple[str, str, Call], ...] = (
    ("GET", "/health", _done),
    ("GET", "/liveness", _done),
    ("GET", "/v1/models", _models),
    ("POST", "/pause", _done),
    ("POST", "/resume", _done),
    ("POST", "/update_weights", _update_weights),
    ("POST", "/init_broadcaster", _no_group),
    ("POST", "/load_lora_adapter", _no_adapter),
)


@asynccontextmanager
async def _admin(url: str, job: str) -> AsyncGenerator[Admin]:
    async with open_bus(url) as bus, aiohttp.ClientSession() as http:
        admin = Admin(partial(trainer, url, job=job, ranks="one"), bus.job(job_name(job)), http)
        await admin.begin()
        try:
            yield admin
        finally:
            await admin.end()


async def serve(
    url: str,
    *,
    job: str,
    host: str = "127.0.0.1",
    port: int = 8200,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; `task_status` is told the port. Raises BusUnavailable, UsageError, OSError."""
    async with _admin(url, job) as admin:
        app = web.Application()
        for method, path, route in ROUTES:
            app.router.add_route(method, path, partial(route, admin))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            task_status.started(int(runner.addresses[0][1]))
            await anyio.sleep_forever()
        finally:
            await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="relight.agents.adapters.prime_rl", description=serve.__doc__)
    parser.add_argument("--bus", default=os.environ.get("RELIGHT_BUS_URL"), help="default: RELIGHT_BUS_URL")
    parser.add_argument("--job", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8200)
    args = parser.parse_args(argv)
    if not args.bus:
        parser.error("no bus is named: give --bus URL or set RELIGHT_BUS_URL")

    async def served() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(serve, args.bus, job=args.job, host=args.host, port=args.port))
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    break
            tasks.cancel_scope.cancel()

    anyio.run(served)


if __name__ == "__main__":
    main()
