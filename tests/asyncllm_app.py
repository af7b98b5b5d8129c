"""An application with AsyncLLM in its own Ray actor: `tests.asyncllm_app BUS JOB STATE_DIR RAY_DIR MODEL`.

It generates, kills the engine's core in the middle, goes on at the next incarnation, and at the end kills
the actor itself. What it saw it prints as one JSON object.
"""

import os
import signal
import sys
import warnings
from functools import partial
from typing import Any

warnings.simplefilter("ignore")  # before Ray and vLLM, whose own are not ours to judge

import anyio  # noqa: E402
import ray  # noqa: E402

from relight.agents.adapters.asyncllm import ActorClient, Actors, loss_of  # noqa: E402
from relight.events.bus.client import open_bus  # noqa: E402
from relight.events.bus.follow import Decided, Follower, reached  # noqa: E402
from relight.events.decisions import StartEngine  # noqa: E402
from relight.events.ids import JobName  # noqa: E402
from relight.orchestrator.cli.demo.faults import core_of  # noqa: E402
from tests.actor_apps import AT, ENGINE, Direct, living, played, sampling  # noqa: E402

PROMPT = list(range(20, 37))
LENGTH = 400
SAMPLING = sampling(LENGTH)
WITHIN_S = 300.0


def told(direct: Direct) -> dict[str, Any]:
    loss = loss_of(direct.error) if direct.error else None
    return {"loss": loss and str(loss), "made": len(direct.tokens)}


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
        direct = Direct(first, PROMPT, LENGTH)
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
        report["direct"] = told(direct)
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

        direct = Direct(second, PROMPT, LENGTH)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(direct.run)
            await direct.begun.wait()
            os.kill(report["second"]["pid"], signal.SIGKILL)
        report["orphaned"] = told(direct)
        await until_decided(follower, StartEngine, incarnation + 1)
    return report


def main() -> None:
    url, job, state_dir, ray_dir, model = sys.argv[1:]
    played(partial(scenario, url, job, model), job=job, state_dir=state_dir, ray_dir=ray_dir, cpus=2)


if __name__ == "__main__":
    main()
