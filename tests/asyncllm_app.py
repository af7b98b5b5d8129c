"""An application with AsyncLLM in its own Ray actor: `asyncllm_app.py BUS JOB STATE_DIR RAY_DIR MODEL`.

It generates, kills the engine's core in the middle, goes on at the next incarnation, and at the end kills
the actor itself. What it saw it prints as one JSON object.
"""

import asyncio
import json
import os
import signal
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")  # before Ray and vLLM, whose own are not ours to judge

import anyio  # noqa: E402
import ray  # noqa: E402

from relight.agents.adapters.asyncllm import ActorClient, Actors, Bundle, actors, loss_of  # noqa: E402
from relight.events.bus.client import open_bus  # noqa: E402
from relight.events.bus.follow import Decided, Follower, reached  # noqa: E402
from relight.events.decisions import StartEngine  # noqa: E402
from relight.events.ids import EngineName, JobName  # noqa: E402
from relight.orchestrator.cli.demo.faults import core_of  # noqa: E402

PROMPT = list(range(20, 37))
LENGTH = 400
SAMPLING = {"max_tokens": LENGTH, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
AT = 24
"""Tokens after which is struck."""
ENGINE = EngineName("e0")
WITHIN_S = 300.0


class Direct:
    """A caller of the actor's own method, without relight: how its call ends, and what it has by then."""

    def __init__(self, handle: Any) -> None:
        self.tokens: list[int] = []
        self.loss: str | None = None
        self.begun = asyncio.Event()
        self._handle = handle

    async def run(self) -> None:
        generate = self._handle.generate.options(num_returns="streaming")
        try:
            async for ref in generate.remote(PROMPT, SAMPLING, f"direct-{id(self)}"):
                (delta,) = (await ref)["choices"]
                self.tokens += delta["token_ids"]
                if len(self.tokens) >= AT:
                    self.begun.set()
        except Exception as error:  # noqa: BLE001 -- which one it is, is what is asked
            loss = loss_of(error)
            self.loss = str(loss) if loss else None

    def told(self) -> dict[str, Any]:
        return {"loss": self.loss, "made": len(self.tokens)}


async def the_core(url: str, job: str) -> int:
    async with open_bus(url, reached=False) as bus:
        state = await reached(bus.job(JobName(job)), within_s=WITHIN_S)
        return core_of(state.engines[ENGINE].processes).pid


async def until_decided(follower: Follower, kind: type, incarnation: int) -> None:
    with anyio.fail_after(WITHIN_S):
        while True:
            match await follower.next():
                case Decided(decision=decision) if isinstance(decision, kind):
                    if decision.incarnation == incarnation:
                        return
                case _:
                    pass


async def scenario(url: str, job: str, model: str, there: Actors) -> dict[str, Any]:
    report: dict[str, Any] = {}
    async with (
        open_bus(url, reached=False) as bus,
        ActorClient(url, job=job, recovery_timeout_s=WITHIN_S) as client,
    ):
        follower = Follower(bus.job(JobName(job)))
        reference = await client.generate(PROMPT, SAMPLING)
        report["reference"] = reference.token_ids
        _, first = living(there)
        report["first"] = await first.snapshot.remote()
        await first.check_health.remote()

        core = await the_core(url, job)
        direct = Direct(first)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(direct.run)
            await direct.begun.wait()
            async with client.stream(PROMPT, SAMPLING) as pieces:
                async for _ in pieces:
                    if len(pieces.turn.token_ids) >= AT and not pieces.turn.attempts:
                        os.kill(core, signal.SIGKILL)
                        break
                async for _ in pieces:
                    pass
            turn = pieces.turn
        report["direct"] = direct.told()
        report["turn"] = {
            "token_ids": turn.token_ids,
            "logprobs": len(turn.logprobs or ()),
            "finish": turn.finish_reason,
            "attempts": [
                [each.engine, each.incarnation, each.kept, str(each.reason), each.detail]
                for each in turn.attempts
            ],
        }
        incarnation, second = living(there)
        report["incarnation"] = incarnation
        report["named"] = ray.get_actor(f"{job}.e0.{incarnation}", namespace="relight") == second
        report["second"] = await second.snapshot.remote()
        await second.check_health.remote()
        await second.pause.remote()
        report["paused"] = (await second.snapshot.remote())["paused"]
        await second.resume.remote()
        await second.update_weights.remote(model, "0.0")
        report["updated"] = (await client.generate(PROMPT, SAMPLING)).token_ids

        direct = Direct(second)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(direct.run)
            await direct.begun.wait()
            os.kill(report["second"]["pid"], signal.SIGKILL)
        report["orphaned"] = direct.told()
        await until_decided(follower, StartEngine, incarnation + 1)
    return report


def living(there: Actors) -> tuple[int, Any]:
    found = there.handle(ENGINE)
    assert found is not None
    return found


def main() -> None:
    url, job, state_dir, ray_dir, model = sys.argv[1:]
    os.environ.update(RAY_worker_niceness="0")  # Ray's own 15 would have it wait for everything else here
    ray.init(
        num_cpus=2, include_dashboard=False, _temp_dir=ray_dir, log_to_driver=False,
        object_store_memory=100 * 1024 * 1024, namespace="app",
    )  # fmt: skip
    try:
        group = ray.util.placement_group([{"CPU": 1}])
        with actors(state_dir, {ENGINE: Bundle(group)}, job=job, connect_s=60.0) as there:
            print("ready", flush=True)
            report = asyncio.run(scenario(url, job, model, there))
        print(json.dumps({**report, "group": group.id.hex()}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
