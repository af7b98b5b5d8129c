"""The actor: AsyncLLM and its own HTTP server in one process, for one incarnation of an engine.

The server is vLLM's, with every route that an agent needs, so that watching, loading and proof are those of
any engine; the methods are for the application, which calls its actor as it is used to. Shapes are those of
vLLM 0.32. Signals are left to Ray, which ends an actor on SIGTERM.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal


class EngineActor:
    """What `ray.remote` makes the actor of. Its pid is told before anything heavy is imported."""

    def __init__(self, flags: Sequence[str]) -> None:
        """`flags`: those of `vllm serve`, `--host` and `--port` among them."""
        self._flags = list(flags)
        self._llm: Any = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def whoami(self) -> tuple[int, str]:
        """Its process and the Ray node that it is on."""
        return os.getpid(), _ray().get_runtime_context().get_node_id()

    async def begin(self) -> None:
        """Start the engine and listen. Raises what vLLM raises, and OSError where the port is taken."""
        args = _parsed(self._flags)
        listener = _bound(args.host or "127.0.0.1", args.port)
        usage = _named("vllm.usage.usage_lib:UsageContext").OPENAI_API_SERVER
        engine_args = _named("vllm.engine.arg_utils:AsyncEngineArgs").from_cli_args(args)
        config = engine_args.create_engine_config(usage_context=usage)
        self._llm = _named("vllm.v1.engine.async_llm:AsyncLLM").from_vllm_config(
            vllm_config=config,
            usage_context=usage,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )
        await self._listen(args, listener)

    async def _listen(self, args: Any, listener: socket.socket) -> None:
        tasks = await self._llm.get_supported_tasks()
        app = _named("vllm.entrypoints.launchers.app:build_app")(args, tasks, self._llm.model_config)
        fill = _named("vllm.entrypoints.launchers.api_server.app_state:init_app_state")
        await fill(self._llm, app.state, args, tasks)
        web: Any = import_module("uvicorn")
        self._server = web.Server(web.Config(app, log_level=args.uvicorn_log_level, access_log=False))
        self._server.capture_signals = contextlib.nullcontext
        app.state.server = self._server  # vLLM's error handlers end it when the core is dead
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def generate(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str
    ) -> AsyncGenerator[dict[str, Any]]:
        """Stream one generation, as chunks of vLLM's token route. Raises EngineDeadError, ValueError.

        To be called with `num_returns="streaming"`: what came before a death is then with the caller.
        """
        vllm: Any = import_module("vllm.sampling_params")
        asked: dict[str, Any] = {"detokenize": False, **sampling_params}
        params = vllm.SamplingParams(**asked, output_kind=vllm.RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": list(token_ids)}
        async for output in self._llm.generate(prompt, params, request_id):
            yield {"request_id": request_id, "choices": [_delta(each) for each in output.outputs]}

    async def abort(self, request_id: str) -> None:
        """End a generation that nobody reads any more."""
        await self._llm.abort(request_id)

    async def check_health(self) -> None:
        """Raises EngineDeadError where vLLM knows that its core is dead; the agent sees one that hangs."""
        await self._llm.check_health()

    async def snapshot(self) -> dict[str, Any]:
        """What it does now; asks the core. `relight.engine(…).snapshot` tells more, without the actor."""
        return {
            "pid": os.getpid(),
            "placement_group": _ray().get_runtime_context().get_placement_group_id(),
            "version": await self._llm.get_weight_version(),
            "paused": await self._llm.is_paused(),
            "unfinished": self._llm.get_num_unfinished_requests(),
        }

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "keep") -> None:
        await self._llm.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def update_weights(self, folder: str, version: str) -> None:
        """Reload all weights from `folder` and label them, with generations held meanwhile.

        For an application that moves its weights by itself, within `trainer.syncing`. What fails leaves the
        engine paused: half-loaded weights must never be sampled from.
        """
        await self.pause("keep")
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError(
                "the prefix cache could not be reset: requests still hold blocks of old weights"
            )
        await self._llm.update_weight_version(version)
        await self.resume()

    async def shutdown(self) -> None:
        """End the engine, its listener and the actor. An agent that did not ask for it starts another one:
        to take an engine out, use `relight.engine(…).shutdown` or `relight drain`.
        """
        if self._server is not None:
            self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        if self._llm is not None:
            self._llm.shutdown()
        _ray().actor.exit_actor()


def _ray() -> Any:
    return import_module("ray")


def _named(path: str) -> Any:
    """What vLLM has at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _bound(host: str, port: int) -> socket.socket:
    """Bound before minutes are spent on the engine, and listening only once it is up. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _parsed(flags: list[str]) -> Any:
    """The arguments of `vllm serve`; workers are processes, which the agent can own, and no Ray actors."""
    parser = _named("vllm.utils.argparse_utils:FlexibleArgumentParser")()
    args = _named("vllm.entrypoints.launchers.cli_args:make_arg_parser")(parser).parse_args(flags)
    if args.model_tag is not None:
        args.model = args.model_tag
    if args.distributed_executor_backend is None:
        args.distributed_executor_backend = "mp"
    return args


def _delta(output: Any) -> dict[str, Any]:
    """One choice of a chunk, from vLLM's CompletionOutput."""
    delta: dict[str, Any] = {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        places = zip(output.token_ids, output.logprobs, strict=True)
        delta["logprobs"] = {"content": [_scored(token, scores) for token, scores in places]}
    if output.weight_versions is not None:
        delta["weight_versions"] = [
            {"version": span.version, "start": span.start, "end": span.end} for span in output.weight_versions
        ]
    return delta


def _scored(token: int, scores: Mapping[int, Any]) -> dict[str, Any]:
    """A sampled token, and every candidate that came with it, the sampled one first."""
    ordered = sorted(scores.items(), key=lambda each: each[0] != token)
    told = [
        {"token_id": name, "logprob": max(score.logprob, -9999.0), "rank": score.rank}
        for name, score in ordered
    ]
    return {**told[0], "top_logprobs": told}
