"""The grammar of the command line. It names each command's module; nothing is imported for it."""

import argparse
import os
from collections.abc import Callable
from importlib.metadata import version

ENGINES = ("vllm", "stub")
MOST_ENGINES = 16
"""Of a demo."""
FAULTS = ("kill-core", "kill-server", "stall", "kill-agent", "kill-orchestrator")


class _Version(argparse.Action):
    """Prints the version; the package's metadata is read only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"relight {version('relight')}")
        parser.exit(0)


class _Help(argparse.HelpFormatter):
    """Help in two columns, the first of which is wide enough for every command's name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 16


def build() -> argparse.ArgumentParser:
    """The parser; its result has `command`, and `module`: where in this package `run(args)` is."""
    parser = argparse.ArgumentParser(
        prog="relight",
        description="Restart the dead rollout engine of a training job in flight.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    add: Add = parser.add_subparsers(dest="command", metavar="COMMAND", required=True).add_parser
    _demo(add)
    _bus(add)
    _orchestrate(add)
    _agent(add)
    _gateway(add)
    _dashboard(add)
    _ray(add)
    _status(add)
    _events(add)
    _explain(add)
    _wishes(add)
    _config(add)
    return parser


Add = Callable[..., argparse.ArgumentParser]
"""Makes the parser of one more command."""


def _command(
    add: Add, name: str, *, summary: str, bus: bool = True, module: str | None = None
) -> argparse.ArgumentParser:
    parser = add(name, help=summary, description=summary, formatter_class=_Help, allow_abbrev=False)
    parser.set_defaults(module=module or name)
    if bus:
        parser.add_argument(
            "--bus",
            metavar="URL",
            default=os.environ.get("RELIGHT_BUS_URL"),
            help="redis://HOST:PORT of the bus (default: RELIGHT_BUS_URL)",
        )
    return parser


def _shown(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")


def _of_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="NAME", help="may be left out where the bus has one job")


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds") from None
    if not 0.0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return seconds


def _positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def _engines(text: str) -> int:
    if (number := _positive(text)) > MOST_ENGINES:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_ENGINES}: they are all on this machine")
    return number


def _demo(add: Add) -> None:
    summary = "kill an engine in mid-generation and watch it come back"
    parser = _command(add, "demo", summary=summary, bus=False, module="demonstrate")
    parser.add_argument(
        "--engine", choices=ENGINES, help="default: vllm where it is installed, else the stub"
    )
    parser.add_argument("--engines", type=_engines, default=1, metavar="N", help="default: 1")
    parser.add_argument("--fault", choices=FAULTS, default="kill-core", help="default: kill-core")
    parser.add_argument("--json", action="store_true", help="print one object on standard output")


def _bus(add: Add) -> None:
    parser = _command(add, "bus", summary="run an embedded Valkey in the foreground", bus=False)
    parser.add_argument("--port", type=_port, default=6380, help="0: a free one (default: 6380)")
    parser.add_argument("--dir", help="where its data lives (default: $XDG_STATE_HOME/relight/bus)")


def _orchestrate(add: Add) -> None:
    parser = _command(add, "orchestrate", summary="decide for jobs, in the foreground")
    parser.add_argument("--job", action="append", metavar="NAME", help="default: all jobs of the bus")
    parser.add_argument("--config", metavar="FILE", help="[defaults] and [jobs.NAME]")
    parser.add_argument("--observe", action="store_true", help="decide and publish, but have nothing done")


def _agent(add: Add) -> None:
    parser = _command(add, "agent", summary="own this node's engines, in the foreground")
    parser.usage = (
        "relight agent --bus URL --config FILE [--stop-engines]\n"
        "       relight agent --bus URL --job NAME [--name ENGINE] -- COMMAND ... {port} ..."
    )
    parser.add_argument("--config", metavar="FILE", help="the node file")
    parser.add_argument("--stop-engines", action="store_true", help="stop the engines when the agent stops")
    parser.add_argument("--job", metavar="NAME", help="the job of one engine without a node file")
    parser.add_argument("--name", metavar="ENGINE", help="the engine's name (default: engine-0)")


def _gateway(add: Add) -> None:
    parser = _command(add, "gateway", summary="serve generation with replay over HTTP")
    parser.epilog = (
        "Give programs http://HOST:PORT as their engine (OpenAI's library: base_url http://HOST:PORT/v1)."
        " Served: POST /v1/completions, /v1/chat/completions and /inference/v1/generate; GET /v1/models,"
        " /health and /metrics. A call whose engine dies goes on from its tokens; one that cannot go on"
        " exactly is replayed, or fails with an error event once its first byte is out. Engines need vLLM's"
        " --enable-scale-out. SIGTERM lets calls under way finish, a second one cuts them off."
    )
    parser.add_argument("--job", required=True, metavar="NAME", help="whose engines answer")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8100, help="0: a free one (default: 8100)")
    parser.add_argument(
        "--drain",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="for calls under way at its end (default: 30)",
    )
    parser.add_argument(
        "--recovery-timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="how long a call waits for an engine, and for tokens after a death (default: 300)",
    )
    parser.add_argument(
        "--max-engine-failures",
        type=_positive,
        default=3,
        metavar="N",
        help="that one call may meet (default: 3)",
    )


def _dashboard(add: Add) -> None:
    parser = _command(add, "dashboard", summary="show every job of the bus on a page, live")
    parser.epilog = (
        "Open http://HOST:PORT. Nothing can be changed there; programs read /api/jobs, /api/jobs/JOB,"
        " /metrics and /health. It has no passwords: beyond this machine it is for networks that you trust."
    )
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8266, help="0: a free one (default: 8266)")
    parser.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="a name under which browsers ask for it, such as a proxy's; may be repeated",
    )


def _ray(add: Add) -> None:
    parser = _command(add, "ray", summary="begin or end a job's agents in a Ray cluster")
    parser.add_argument(
        "action", choices=("up", "down"), help="up: one agent a bundle, at work; down: none left"
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the job's file")
    parser.add_argument(
        "--within", type=_seconds, default=120.0, metavar="S", help="the longest wait (default: 120)"
    )
    _shown(parser)


def _status(add: Add) -> None:
    parser = _command(add, "status", summary="show a job: its engines, trainer and orchestrator")
    _of_job(parser)
    _shown(parser)


def _events(add: Add) -> None:
    parser = _command(add, "events", summary="show facts and decisions in the order of the bus")
    _of_job(parser)
    parser.add_argument("--follow", action="store_true", help="go on with what comes")
    parser.add_argument("--type", action="append", metavar="T", help="only this type; may be repeated")
    parser.add_argument("--count", type=_positive, default=50, metavar="N", help="the last N (default: 50)")
    _shown(parser)


def _explain(add: Add) -> None:
    parser = _command(add, "explain", summary="show why an engine was recovered, step by step")
    parser.add_argument("engine", metavar="ENGINE")
    _of_job(parser)
    _shown(parser)


def _wishes(add: Add) -> None:
    restart = _wish(add, "restart", summary="restart one engine, or all of them one by one")
    which = restart.add_mutually_exclusive_group(required=True)
    which.add_argument("engine", metavar="ENGINE", nargs="?")
    which.add_argument("--all", action="store_true", help="each that serves, one after the other")
    drain = _wish(add, "drain", summary="take one engine out: let its calls finish, stop it, start no other")
    drain.add_argument("engine", metavar="ENGINE")
    drain.add_argument(
        "--wait", type=_seconds, metavar="S", help="until it is out, for S at most; exit 1 where it is not"
    )
    release = _wish(add, "release", summary="take a drained or retired engine back in, or end a job's hold")
    release.add_argument("engine", metavar="ENGINE", nargs="?", help="left out: the job's hold ends")
    retire = _wish(add, "retire", summary="take one engine out for good")
    retire.add_argument("engine", metavar="ENGINE")
    approve = _wish(add, "approve", summary="let a recovery that waits for an approval go on")
    approve.add_argument("recovery", metavar="RECOVERY", help="its name, or that of its engine")
    hold = _command(
        add, "hold", summary="do nothing to any engine of a job until it is released", module="wish"
    )
    hold.add_argument("job", metavar="JOB", nargs="?", help="may be left out where the bus has one job")
    _shown(hold)


def _wish(add: Add, name: str, *, summary: str) -> argparse.ArgumentParser:
    parser = _command(add, name, summary=summary, module="wish")
    _of_job(parser)
    _shown(parser)
    return parser


def _config(add: Add) -> None:
    parser = _command(add, "config", summary="check configuration files", bus=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="say what a node file or an orchestrator's file holds")
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--snapshots", metavar="DIR", help="measure what a snapshot of each model takes to be written there"
    )
    _shown(check)
