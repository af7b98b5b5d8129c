"""The server actor of one incarnation: verl's own, at the port that the agent gave, outlived by its calls.

It is one of the incarnation's processes, so the agent watches it and kills it with the rest.
"""

# verl's classes have no types: whatever `super()` gives is unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from relight.agents.adapters.verl.ledger import Ledger
from relight.agents.adapters.verl.outliving import Outliving
from relight.agents.adapters.verl.theirs import theirs

DIED = "relight_engine_died"
"""Key in an answer's extra fields: it ends where the engine died."""


class Place(NamedTuple):
    """Where an incarnation listens and writes."""

    port: int
    ledger: str


def server_class(base: Any) -> Any:
    """A subclass of verl's server class `base`."""

    class Server(base):  # type: ignore[misc]
        """verl's server of one incarnation."""

        engine: Any

        def __init__(self, *args: Any, relight: Place, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.relight = relight

        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            engine_kwargs.setdefault("enable_scale_out", True)  # the route by which agents check engines
            super()._preprocess_engine_kwargs(engine_kwargs)

        async def launch_server(self, *args: Any, **kwargs: Any) -> None:
            _listen_at(self.relight.port, sys.modules[base.__module__])
            await super().launch_server(*args, **kwargs)
            death = getattr(base, "DEATHS", None) or deaths()
            self.engine = Outliving(self.engine, Ledger(Path(self.relight.ledger)), death=death)

        async def generate(
            self, prompt_ids: Any, sampling_params: Any, request_id: str, **kwargs: Any
        ) -> Any:
            answer = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
            if request_id in self.engine.cut_off:
                self.engine.cut_off.discard(request_id)
                answer.extra_fields[DIED] = True
            return answer

        async def relight_pid(self) -> int:
            return os.getpid()

    Server.__name__ = Server.__qualname__ = base.__name__
    return Server


def deaths() -> tuple[type[Exception], ...]:
    """By which errors vLLM says that an engine is dead."""
    return (theirs("vllm.v1.engine.exceptions").EngineDeadError,)


def _listen_at(port: int, module: Any) -> None:
    """Have the server listen there: verl's own takes whatever port is free, and relight issues ports."""

    async def run_uvicorn(
        app: Any, server_args: Any, server_address: str
    ) -> tuple[int, "asyncio.Task[None]"]:
        uvicorn = theirs("uvicorn")

        class Told(uvicorn.Server):  # type: ignore[misc,name-defined]
            """Says when it listens, or cannot."""

            came = asyncio.Event()

            async def startup(self, sockets: Any = None) -> None:
                try:
                    await super().startup(sockets=sockets)
                finally:
                    self.came.set()

        app.server_args = server_args
        server = Told(uvicorn.Config(app, host=server_address, port=port, log_level="warning"))
        serving = asyncio.create_task(server.serve())
        await server.came.wait()
        if not server.started:
            await serving  # raises what kept it from listening
            raise OSError(f"no server listens at {server_address}:{port}")
        return port, serving

    module.run_uvicorn = run_uvicorn
