"""A job for trainers of other projects: orchestrator, agent and gateway of relight, all real."""

import http.client
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from relight.agents.node.config import Engine
from relight.agents.replay.gateway import Settings, serve
from relight.events.ids import EngineName
from tests.node_support import JOB


@asynccontextmanager
async def gateway(url: str) -> AsyncIterator[str]:
    """The address of a gateway in front of the job's engines; calls under way are cut off at the end."""
    async with anyio.create_task_group() as tasks:

        async def run(*, task_status: Any) -> None:
            await serve(bus_url=url, job=JOB, settings=Settings(port=0, drain_s=0.0), task_status=task_status)

        port = await tasks.start(run)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


def stub(model: Path, *knobs: str, name: str = "e0", **changes: Any) -> Engine:
    """A stub engine that can be started on weights; `model` is its base model."""
    command = (sys.executable, "-m", "relight.agents.stub", "--model", "{weights}")
    command += ("--host", "127.0.0.1", "--port", "{port}", *knobs)
    return Engine(**{"name": EngineName(name), "command": command, "model": str(model), **changes})


async def asked(url: str, body: Mapping[str, Any] | None = None, *, status: int = 200) -> Any:
    """The JSON, or the text, of an answer to a POST of `body`, or to a GET where there is none."""
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as answer:
        content = await answer.text()
        assert answer.status == status, content
        return json.loads(content) if content[:1] in ("{", "[") else content


async def counted(address: str, metric: str) -> float:
    """What `address` says of a metric, over all labels."""
    lines = (await asked(f"{address}/metrics")).splitlines()
    found = [line for line in lines if line.startswith((f"{metric} ", f"{metric}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def running(address: str) -> float:
    """How many requests an engine works on, by its own count."""
    return await counted(address, "vllm:num_requests_running")


def posted(url: str, path: str, body: Mapping[str, Any]) -> Any:
    """What a trainer that knows nothing but the standard library is answered."""
    host, _, port = url.removeprefix("http://").partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    assert answer.status == 200, content
    return json.loads(content)
