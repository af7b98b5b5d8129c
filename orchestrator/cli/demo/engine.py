"""Asking an engine directly over HTTP, past relight: references, checksums, its label.

Each request adds a query that says who asks, so that access logs tell it from a client's.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp
import anyio

from relight.events.facts import EngineStarted
from relight.orchestrator.cli.demo import processes
from relight.orchestrator.cli.demo.checks.case import GENERATE
from relight.orchestrator.cli.demo.errors import DemoFailed
from relight.orchestrator.cli.demo.evidence import Generation, Look, Mode, Plan
from relight.orchestrator.cli.demo.rollout import sampling

ASK_S = 30.0
"""Longest answer: a generation of a tiny model takes a fraction of a second, the first one some more."""


async def look(http: aiohttp.ClientSession, started: EngineStarted, plan: Plan) -> Look:
    """What one incarnation says of itself, and which of its recorded processes live; raises DemoFailed."""
    at = started.address
    generations: dict[Mode, Generation] = {}

    async def refer(mode: Mode) -> None:
        tokens = plan.prompts[mode]
        generations[mode] = await generate(http, at, tokens, max_tokens=plan.max_tokens, who="reference")

    async with anyio.create_task_group() as asking:
        for mode in plan.prompts:
            asking.start_soon(refer, mode)
    return Look(
        engine=started.engine,
        incarnation=started.incarnation,
        address=at,
        label=str((await _ask(http, "GET", f"{at}/weight_info"))["weight_version"]),
        checksums=await _checksums(http, at),
        generations=generations,
        processes=processes.living(started.processes),
    )


async def generate(
    http: aiohttp.ClientSession, address: str, token_ids: tuple[int, ...], *, max_tokens: int, who: str
) -> Generation:
    """One uninterrupted greedy generation, unstreamed; raises DemoFailed."""
    body = {"token_ids": token_ids, "sampling_params": sampling(max_tokens), "stream": False}
    answer = await _ask(http, "POST", f"{address}{GENERATE}?relight={who}", body)
    choice = answer["choices"][0]
    if choice["finish_reason"] != "length":
        raise DemoFailed(f"{address} ended a generation by {choice['finish_reason']}")
    scored = choice["logprobs"]["content"]
    return Generation(
        token_ids=tuple(choice["token_ids"]), logprobs=tuple(float(each["logprob"]) for each in scored)
    )


async def _checksums(http: aiohttp.ClientSession, address: str) -> dict[str, str]:
    answer = await _ask(http, "POST", f"{address}/weight_checker", {"action": "checksum"})
    return {str(name): str(value) for name, value in answer["checksums"].items()}


async def _ask(
    http: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        async with http.request(method, url, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise DemoFailed(
                    f"{method} {url} answered {response.status}: {(await response.text())[:200]}"
                )
            answer: dict[str, Any] = await response.json()
            return answer
    except (aiohttp.ClientError, TimeoutError) as error:
        raise DemoFailed(f"{method} {url}: {type(error).__name__} {error}") from error
