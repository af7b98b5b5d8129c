"""Running one command's coroutine: to its end, or until somebody stops it.

Ctrl-C and, for lasting commands, SIGTERM cancel it; it then cleans up within its own deadlines. A cancel
scope is used and not asyncio's own answer to Ctrl-C, which cancels once: a library that swallows that one
cancellation (redis-py while it connects) would go on for ever. A second signal is not caught: it ends the
process where it stands, unless the command says what it means.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskStatus

from relight.orchestrator.cli import logs

Main = Callable[[], Awaitable[None]]


def once(main: Main) -> int:
    """Run a command that ends by itself; 0. Raises KeyboardInterrupt. There are no logs."""
    with logs.off():
        anyio.run(_until_signal, main, (signal.SIGINT,))
    return 0


def lasting(main: Main, *, again: Callable[[], None] | None = None, uvloop: bool = False) -> int:
    """Run a command that goes on until SIGTERM or until it ends; 0. Raises KeyboardInterrupt.

    Logs go to stderr. `again` is called for each further signal, in place of the process's end. `uvloop` is
    for commands that live on sockets; the node agent watches processes, and does without.
    """
    logs.to_stderr()
    signals = (signal.SIGINT, signal.SIGTERM)
    anyio.run(_until_signal, main, signals, again, backend_options={"use_uvloop": uvloop})
    return 0


def interrupted_by_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does, once."""

    def interrupt() -> None:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's script started us with `&`
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    on_first_sigterm(interrupt)


def on_first_sigterm(end: Callable[[], object]) -> None:
    """Call `end`, which raises, at the first SIGTERM, and nothing at a further one: whoever signals a whole
    process group signals its `make` as well, which passes it on.
    """

    def passed_over(*_: object) -> None:
        pass  # not SIG_IGN, which a child would inherit

    def first(*_: object) -> None:
        signal.signal(signal.SIGTERM, passed_over)
        end()

    signal.signal(signal.SIGTERM, first)


async def _until_signal(
    main: Main, numbers: tuple[signal.Signals, ...], again: Callable[[], None] | None = None
) -> None:
    caught: list[signal.Signals] = []
    async with anyio.create_task_group() as tasks:

        async def watch(*, task_status: TaskStatus[None]) -> None:
            with anyio.open_signal_receiver(*numbers) as signals:
                task_status.started()
                async for number in signals:
                    caught.append(number)
                    break
            if again is None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would end it with a traceback
            else:
                for number in numbers:
                    asyncio.get_running_loop().add_signal_handler(number, again)
            tasks.cancel_scope.cancel()

        await tasks.start(watch)
        await main()
        tasks.cancel_scope.cancel()
    if signal.SIGINT in caught:
        raise KeyboardInterrupt
