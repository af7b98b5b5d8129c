"""What the core does for each call of the server: pause, reload, labels, checksums, caches."""

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from relight.agents.stub.tokens import Digest
from relight.agents.stub.wire import Ask

if TYPE_CHECKING:
    from relight.agents.stub.core import Core


class CallFailed(Exception):
    """A call that vLLM answers with a status of 500; the message is the answer's."""


async def answer(core: "Core", method: str, args: dict[str, Any]) -> Any:
    """The value of one call; raises `CallFailed`."""
    match method:
        case "pause":
            ended = core.scheduler.pause(args["mode"])
            if args["mode"] == "abort":
                core.scheduler.reset_cache(core.knobs.prefix_cache, preempt=False)
            core.report(ended)
        case "resume":
            core.scheduler.paused = None
        case "is_paused":
            return core.scheduler.paused is not None
        case "update_weight_version":
            core.version = args["new_version"]
        case "weight_info":
            return core.label
        case "reset_prefix_cache":
            return core.scheduler.reset_cache(core.knobs.prefix_cache, preempt=args["preempt"])
        case "checksums":
            return await _checksums(core)
        case "transfer":
            await _transfer(core, args["step"], args["body"])
        case "collective_rpc":
            await _rpc(core, args["method"], args["kwargs"])
            return [None]
        case _:
            return _sleep(core, method)
    return None


def _sleep(core: "Core", method: str) -> Any:
    match method:
        case "sleep":
            core.asleep = True
            core.report(core.scheduler.pause("abort"))
        case "wake_up":
            core.asleep, core.scheduler.paused = False, None
        case "is_sleeping":
            return core.asleep or core.scheduler.paused is not None
        case _:
            raise CallFailed(f"no call {method!r}")
    return None


async def _rpc(core: "Core", method: str, kwargs: dict[str, Any]) -> None:
    match method:
        case "check_health":
            await core.worker.ask(Ask("health"))
        case "update_config":
            load_config = kwargs.get("overrides", {}).get("load_config", {})
            core.dummy = load_config.get("load_format", "dummy" if core.dummy else "auto") == "dummy"
        case "reload_weights":
            await _reload(core, str(kwargs.get("weights_path") or core.settings.model))
        case _:
            raise CallFailed(f"Call to collective_rpc method failed: no method {method!r} on the worker")


async def _reload(core: "Core", folder: str) -> None:
    knobs = core.knobs
    if knobs.reload == "hang":
        await asyncio.Event().wait()
    if core.dummy:
        raise CallFailed("Call to collective_rpc method failed: load format dummy cannot reload weights")
    if knobs.reload in ("fail", "poison"):
        core.poisoned = knobs.reload == "poison"
        raise CallFailed("Call to collective_rpc method failed: reload refused by a knob")
    if knobs.reload == "nothing":
        return
    if knobs.reload == "base":
        folder = core.settings.model
    half = knobs.reload == "half"
    told = await core.worker.ask(Ask("load", folder=folder, sleep_s=knobs.reload_s, half=half))
    if told.error:
        core.poisoned = True
        raise CallFailed(f"Call to collective_rpc method failed: {told.error}")
    spoil = "spoilt " if knobs.reload == "spoil" else ""
    core.digest = Digest(spoil + told.digest)


async def _transfer(core: "Core", step: str, body: dict[str, Any]) -> None:
    """vLLM's order of calls; between start and a good end the tensors have no bytes: a request is fatal."""
    fault = core.knobs.transfer
    updating = core.updating
    if step == "start_weight_update":
        if updating or fault == "refuse":
            raise CallFailed("start_weight_update called while a weight update is already active")
        core.updating = core.poisoned = True
    elif step in ("update_weights", "finish_weight_update") and not updating:
        raise CallFailed("start_weight_update must be called before update_weights.")
    elif step == "update_weights":
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "fail":
            raise CallFailed("update refused by a knob")
        if fault == "nothing":
            return
        told = await core.worker.ask(Ask("load", folder=str(body["update_info"]["folder"])))
        if told.error:
            raise CallFailed(told.error)
        core.digest = Digest(told.digest)
    elif step == "finish_weight_update":
        if fault == "finish":
            raise CallFailed("finish refused by a knob")
        core.updating = core.poisoned = False
        core.version = body.get("weight_version") or core.version


async def _checksums(core: "Core") -> dict[str, str]:
    told = await core.worker.ask(Ask("checksums"))
    nothing = hashlib.sha256().hexdigest()
    return {
        f"dp0:pp0:pcp0:tp0:{name}": nothing if core.knobs.empty_checksums else tensor.sha256
        for name, tensor in told.tensors.items()
    }
