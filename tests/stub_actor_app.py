"""An application whose Ray actor has a stub for AsyncLLM: `stub_actor_app.py BUS JOB STATE_DIR RAY_DIR`.

All else is as in `asyncllm_app`: relight's own actor class, with other ways to begin and to generate. Its
actor is killed under a call, and the next one is told to shut down. What was seen is printed as JSON.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # before Ray, whose own are not ours to judge

import aiohttp  # noqa: E402
import anyio  # noqa: E402
import ray  # noqa: E402

from relight.agents.adapters.asyncllm import ActorClient, Actors, Bundle, actors, loss_of, place  # noqa: E402
from relight.agents.adapters.asyncllm.actor import EngineActor  # noqa: E402
from relight.agents.node import marks  # noqa: E402
from relight.events.ids import EngineName  # noqa: E402

PROMPT = [5, 6, 7]
LENGTH = 200
SAMPLING = {"max_tokens": LENGTH, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
AT = 24
"""Tokens after which is struck."""
ENGINE = EngineName("e0")
WITHIN_S = 90.0


class StubLLM:
    """What the actor asks of AsyncLLM, over the HTTP of a stub that is its child."""

    def __init__(self, flags: Sequence[str]) -> None:
        port = flags[flags.index("--port") + 1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "relight.agents.stub", *flags, "--token-interval-ms", "10"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    async def asked(self, method: str, path: str) -> Any:
        async with aiohttp.ClientSession() as http, http.request(method, self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json() if answer.content_type == "application/json" else None

    async def check_health(self) -> None:
        await self.asked("GET", "/health")

    async def get_weight_version(self) -> str:
        return str((await self.asked("GET", "/weight_info"))["weight_version"])

    async def is_paused(self) -> bool:
        return bool((await self.asked("GET", "/is_paused"))["is_paused"])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self.asked("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume_generation(self) -> None:
        await self.asked("POST", "/resume")

    def get_num_unfinished_requests(self) -> int:
        return 0

    def shutdown(self) -> None:
        Path(os.environ["RELIGHT_TEST_SHUT_DOWN"]).touch()
        self.process.terminate()
        self.process.wait(30)


class StubActor(EngineActor):
    """relight's actor, whose engine is a stub."""

    async def begin(self) -> None:
        self._llm = StubLLM(self._flags)

    async def tag(self) -> str | None:
        return os.environ.get(marks.TAG)

    async def generate(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str
    ) -> AsyncGenerator[dict[str, Any]]:
        body = {"token_ids": token_ids, "sampling_params": sampling_params, "request_id": request_id}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self._llm.url + "/inference/v1/generate", json={**body, "stream": True}) as answer,
        ):
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


class Direct:
    """A caller of the actor's own method: how its call ends, and what it has by then."""

    def __init__(self, handle: Any) -> None:
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.begun = asyncio.Event()
        self._handle = handle

    async def run(self) -> None:
        generate = self._handle.generate.options(num_returns="streaming")
        try:
            async for ref in generate.remote(PROMPT, SAMPLING, "direct"):
                self.tokens += (await ref)["choices"][0]["token_ids"]
                if len(self.tokens) >= AT:
                    self.begun.set()
        except Exception as error:  # noqa: BLE001 -- which one it is, is what is asked
            self.error = error


async def scenario(url: str, job: str, there: Actors) -> dict[str, Any]:
    report: dict[str, Any] = {}
    async with ActorClient(url, job=job, recovery_timeout_s=WITHIN_S) as client:
        report["reference"] = (await client.generate(PROMPT, SAMPLING)).token_ids
        report["incarnations"] = [living(there)[0]]
        first = living(there)[1]
        report["first"] = await first.snapshot.remote()
        report["tag"] = await first.tag.remote()
        await first.check_health.remote()
        await first.pause.remote()
        report["paused"] = (await first.snapshot.remote())["paused"]
        await first.resume.remote()

        # Killed under two calls: one of the actor's own method, and one that goes on elsewhere.
        direct = Direct(first)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(direct.run)
            async with client.stream(PROMPT, SAMPLING) as pieces:
                async for _ in pieces:
                    if len(pieces.turn.token_ids) >= AT:
                        break
                await direct.begun.wait()
                os.kill(report["first"]["pid"], signal.SIGKILL)
                async for _ in pieces:
                    pass
        turn = pieces.turn
        report["direct"] = [type(direct.error).__name__, str(loss_of(direct.error or OSError()))]
        report["had"] = direct.tokens
        report["turn"] = turn.token_ids
        report["attempts"] = [[each.incarnation, each.kept, str(each.reason)] for each in turn.attempts]
        number, second = living(there)
        report["incarnations"].append(number)
        report["named"] = ray.get_actor(f"{job}.e0.{number}", namespace="relight") == second
        report["second"] = await second.snapshot.remote()

        # The engine, its listener and the actor end by its own word.
        try:
            await second.shutdown.remote()
        except ray.exceptions.RayActorError as error:
            report["ended"] = str(loss_of(error))
        again = await client.generate(PROMPT, SAMPLING)
        report["again"] = [again.token_ids, living(there)[0]]
    return report


def living(there: Actors) -> tuple[int, Any]:
    found = there.handle(ENGINE)
    assert found is not None
    return found


def main() -> None:
    url, job, state_dir, ray_dir = sys.argv[1:]
    os.environ.update(RAY_worker_niceness="0")  # Ray's own 15 would have it wait for everything else here
    place.EngineActor = StubActor  # type: ignore[misc]
    ray.init(
        num_cpus=1, include_dashboard=False, _temp_dir=ray_dir, log_to_driver=False,
        object_store_memory=100 * 1024 * 1024, namespace="app",
    )  # fmt: skip
    try:
        group = ray.util.placement_group([{"CPU": 1}])
        with actors(state_dir, {ENGINE: Bundle(group)}, job=job, connect_s=60.0) as there:
            print("ready", flush=True)
            report = asyncio.run(scenario(url, job, there))
        print(json.dumps({**report, "group": group.id.hex()}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
