"""An application whose Ray actor has a stub for AsyncLLM: `tests.stub_actor_app BUS JOB STATE_DIR RAY_DIR`.

All else is as in `asyncllm_app`: relight's own actor class, with other ways to begin and to generate. Its
actor is killed under a call, and the next one is told to shut down. What was seen is printed as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # before Ray, whose own are not ours to judge

import aiohttp  # noqa: E402
import anyio  # noqa: E402
import ray  # noqa: E402

from relight.agents.adapters.asyncllm import ActorClient, Actors, loss_of, place  # noqa: E402
from relight.agents.adapters.asyncllm.actor import EngineActor  # noqa: E402
from relight.agents.node import marks  # noqa: E402
from tests.actor_apps import AT, Direct, living, played, sampling  # noqa: E402

PROMPT = [5, 6, 7]
LENGTH = 200
SAMPLING = sampling(LENGTH)
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
        direct = Direct(first, PROMPT, LENGTH)
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


def main() -> None:
    url, job, state_dir, ray_dir = sys.argv[1:]
    place.EngineActor = StubActor  # type: ignore[misc]
    played(partial(scenario, url, job), job=job, state_dir=state_dir, ray_dir=ray_dir, cpus=1)


if __name__ == "__main__":
    main()
