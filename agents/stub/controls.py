"""The routes that change something: pause, weights, caches, aborts, knobs."""

from typing import Any, get_args

import msgspec
from aiohttp import web

from relight.agents.stub.engine import Engine, EngineError
from relight.agents.stub.knobs import merged
from relight.agents.stub.probes import late
from relight.agents.stub.scheduler import PauseMode


class Refused(Exception):
    """A 400 with vLLM's error body."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


async def json_object(request: web.Request, **required: type) -> dict[str, Any]:
    """The body as an object with these fields; raises `Refused`."""
    try:
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise Refused(f"JSON decode error: {error}") from error
    for name, kind in required.items():
        if not isinstance(body.get(name), kind):
            param = None if name == "method" else f"body.{name}"
            raise Refused(f"Missing {name!r} in request body", param)
    return body


async def pause(request: web.Request, engine: Engine) -> web.Response:
    """Hold the queue by abort, wait or keep."""
    mode = request.query.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise Refused("1 validation error:\n  Input should be 'abort', 'wait' or 'keep'", "query.mode")
    try:
        await engine.call("pause", mode=mode)
    except EngineError as error:
        return web.json_response({"error": f"Failed to pause generation: {error}"}, status=500)
    return web.json_response({"status": "paused"})


async def resume(_: web.Request, engine: Engine) -> web.Response:
    """Go on."""
    engine.shift = engine.knobs.logprob_shift_after_resume
    try:
        await engine.call("resume")
    except EngineError as error:
        return web.json_response({"error": f"Failed to resume generation: {error}"}, status=500)
    return web.json_response({"status": "resumed"})


async def sleep(request: web.Request, engine: Engine) -> web.Response:
    """Abort all and hold."""
    await engine.call("sleep")
    return web.json_response({"status": "sleeping", "level": int(request.query.get("level", "1"))})


async def wake_up(request: web.Request, engine: Engine) -> web.Response:
    """Go on after a sleep."""
    await engine.call("wake_up")
    return web.json_response({"status": "awake", "tags": request.query.getall("tags", []) or None})


async def update_weight_version(request: web.Request, engine: Engine) -> web.Response:
    """Set the label; loads nothing."""
    body = await json_object(request, new_version=str)
    await engine.call("update_weight_version", new_version=body["new_version"])
    return web.json_response({"success": True, "new_version": body["new_version"]})


async def get_world_size(_: web.Request, _engine: Engine) -> web.Response:
    """One worker."""
    return web.json_response({"world_size": 1})


async def transfer(request: web.Request, engine: Engine) -> web.Response:
    """One call of a pushed update. The stub's transport is a folder, named in `update_info`."""
    body = await json_object(request) if request.can_read_body else {}
    await engine.call("transfer", step=request.path.strip("/"), body=body)
    return web.json_response({"message": request.path})


async def weight_checker(request: web.Request, engine: Engine) -> web.Response:
    """The tensors' hashes, alone or against a baseline."""
    body = await json_object(request, action=str)
    if body["action"] not in ("checksum", "compare"):
        raise Refused(f"action {body['action']!r} is not one of 'checksum' and 'compare'")
    checksums: dict[str, str] = await engine.call("checksums")
    if body["action"] == "checksum":
        return web.json_response({"checksums": checksums})
    baseline = body.get("baseline")
    if not isinstance(baseline, dict):
        raise Refused("action='compare' requires a 'baseline' object")
    known = msgspec.convert(baseline, dict[str, str])
    odd = sorted(name for name in {*checksums, *known} if checksums.get(name) != known.get(name))
    return web.json_response({"match": not odd, "mismatches": odd})


async def reset_prefix_cache(request: web.Request, engine: Engine) -> web.Response:
    """Forget cached prefixes."""
    preempt = request.query.get("reset_running_requests", "false").lower() in ("true", "1", "yes", "on")
    return web.json_response({"success": await engine.call("reset_prefix_cache", preempt=preempt)})


async def collective_rpc(request: web.Request, engine: Engine) -> web.Response:
    """Call the worker: check_health, reload_weights, update_config."""
    body = await json_object(request, method=str)
    if body["method"] == "check_health":
        await late(engine)
    results = await engine.call("collective_rpc", method=body["method"], kwargs=body.get("kwargs") or {})
    return web.json_response({"results": results})


async def abort_requests(request: web.Request, engine: Engine) -> web.Response:
    """End requests by the ids that their answers carried."""
    body = await json_object(request)
    aborted = engine.abort(body.get("request_ids") or None)
    return web.json_response({"status": "aborted", "aborted": aborted})


async def knobs(request: web.Request, engine: Engine) -> web.Response:
    """Read or change the faults."""
    if request.method == "POST":
        try:
            engine.set_knobs(merged(engine.knobs, await json_object(request)))
        except msgspec.ValidationError as error:
            raise Refused(str(error)) from error
    return web.json_response(msgspec.to_builtins(engine.knobs))
