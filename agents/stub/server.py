"""The server process: it starts the core, binds the port, serves, and decides how the tree ends.

The port is bound before the core is up and listened on after, as in vLLM. Exit codes: 0 on SIGTERM and also
when the core died, 1 when the start failed. The socket under TMPDIR is removed on SIGTERM only.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from relight.agents.stub import part
from relight.agents.stub.processes import connected_child, end, leave_socket, spawn
from relight.agents.stub.settings import Settings, parse

if TYPE_CHECKING:
    from relight.agents.stub.engine import Engine

_TELL_S = 0.05  # streams get this long to take their last frame on SIGTERM
_CORE_END_S = 0.5
_EARLY_EXIT_S = 0.2  # a core that could not start ends within


def main() -> None:
    """Run one stub engine until it ends."""
    settings = parse(sys.argv[1:])
    if settings.headless:
        part.main(settings)
    with contextlib.ExitStack() as stack:
        listener = _bind(settings)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if settings.knobs.ignore_sigterm else _leave_early)
        core, channel = connected_child("core", f"{settings.title}::EngineCore")
        stack.callback(core.kill)
        code = asyncio.run(_run(settings, listener, core, channel))
        stack.pop_all()
    sys.stdout.flush()
    os._exit(code)


def _leave_early(*_: object) -> NoReturn:
    raise SystemExit(0)


def _fail(sentence: str) -> NoReturn:
    sys.stderr.write(f"error: {sentence}\n")
    sys.stderr.flush()
    os._exit(1)


def _bind(settings: Settings) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        _fail(_unbound(settings, error))
    return listener


def _unbound(settings: Settings, error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"[Errno {error.errno}] cannot listen on {settings.host}:{settings.port}: {reason}"


async def _run(
    settings: Settings, listener: socket.socket, core: subprocess.Popen[bytes], channel: socket.socket
) -> int:
    # The core starts while this process imports aiohttp, which is most of the server's own start.
    from aiohttp import web

    from relight.agents.stub.engine import Engine
    from relight.agents.stub.log import flood, line
    from relight.agents.stub.routes import application

    engine = Engine(settings)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_sigterm, engine, asked)
    listening = asyncio.create_task(engine.listen(channel))
    early = asyncio.create_task(asked.wait())
    starting: set[asyncio.Future[Any]] = {engine.up, early}
    await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
    if not engine.up.done():
        end(core, _CORE_END_S)
        return 0
    if settings.knobs.front_exits_in_start:
        os._exit(1)
    if error := engine.up.result():
        end(core, _EARLY_EXIT_S)
        _fail(error)
    remains = leave_socket()
    runner = web.AppRunner(application(engine), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=2048).start()
    except OSError as taken:
        end(core, _EARLY_EXIT_S)
        _fail(_unbound(settings, taken))
    if settings.knobs.hold_port:
        title = f"{settings.title}::PortHolder"
        spawn("stray", title, (listener.fileno(),), str(settings.knobs.stray_s), session=True).wait()
    line(f"INFO:     Started server process [{os.getpid()}]")
    line(f"INFO:     Application startup complete. http://{settings.host}:{listener.getsockname()[1]}")
    flood(settings.knobs.print_mib)
    lines = asyncio.create_task(_shm_lines(settings.knobs.shm_line_s))
    dead = asyncio.create_task(engine.dead.wait())
    await asyncio.wait({dead, early}, return_when=asyncio.FIRST_COMPLETED)
    lines.cancel()
    if early.done():
        engine.draining = True
        await _within(settings.shutdown_timeout_s, engine.quiet)
        core.terminate()
        engine.fail_all()
        await _within(_TELL_S, engine.quiet)
        await asyncio.wait({listening}, timeout=_CORE_END_S)
        end(core, _CORE_END_S)
    else:
        await asyncio.wait({early}, timeout=settings.death_exit_ms / 1000)
    if early.done():
        remains.unlink(missing_ok=True)
    return 0


def _on_sigterm(engine: "Engine", asked: asyncio.Event) -> None:
    if not engine.knobs.ignore_sigterm:
        asked.set()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def _shm_lines(every_s: float) -> None:
    from relight.agents.stub.log import line

    while every_s:
        await asyncio.sleep(every_s)
        line(
            "INFO [shm_broadcast.py] No available shared memory broadcast block found in 60 seconds. This "
            "typically happens when some processes are hanging or doing some time-consuming work."
        )
