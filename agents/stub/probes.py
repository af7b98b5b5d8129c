"""The routes that only look: health, pause state, load, counters, models, labels."""

import asyncio
from typing import Any

from aiohttp import web

from relight.agents.stub.engine import Engine, EngineError
from relight.agents.stub.metrics import exposition

VERSION = "0.32.0"
"""The vLLM version whose answers these are."""


async def late(engine: Engine) -> None:
    """Wait as the knob for late probes says."""
    if engine.knobs.probe_delay_s:
        await asyncio.sleep(engine.knobs.probe_delay_s)


async def health(_: web.Request, engine: Engine) -> web.Response:
    """200 while the core lives; a stopped one lives."""
    await late(engine)
    return web.Response(status=503 if engine.ended else 200)


async def is_paused(_: web.Request, engine: Engine) -> web.Response:
    """Asks the core."""
    await late(engine)
    try:
        if engine.draining:
            raise EngineError("the engine is shutting down")
        return web.json_response({"is_paused": await engine.call("is_paused")})
    except EngineError as error:
        return web.json_response({"error": f"Failed to fetch pause status: {error}"}, status=500)


async def is_sleeping(_: web.Request, engine: Engine) -> web.Response:
    """Asks the core."""
    return web.json_response({"is_sleeping": await engine.call("is_sleeping")})


async def load(_: web.Request, engine: Engine) -> web.Response:
    """Generations in flight."""
    return web.json_response({"server_load": engine.load})


async def metrics(_: web.Request, engine: Engine) -> web.Response:
    """Counters as the core told them last."""
    if engine.knobs.no_metrics:
        return web.Response(status=404)
    return web.Response(
        body=exposition(engine).encode(), headers={"Content-Type": "text/plain; version=1.0.0"}
    )


async def models(_: web.Request, engine: Engine) -> web.Response:
    """One model."""
    settings = engine.settings
    card: dict[str, Any] = {
        "id": settings.served_model_name,
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": settings.model,
        "parent": None,
        "max_model_len": settings.max_model_len,
        "permission": [],
    }
    return web.json_response({"object": "list", "data": [card]})


async def version(_: web.Request, _engine: Engine) -> web.Response:
    """vLLM's version."""
    return web.json_response({"version": VERSION})


async def weight_info(_: web.Request, engine: Engine) -> web.Response:
    """The label of the weights."""
    return web.json_response({"weight_version": await engine.call("weight_info")})
