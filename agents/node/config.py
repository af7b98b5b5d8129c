"""The node file: which engines this agent owns and how each is started.

Whatever is wrong with it is found before anything is started: a UsageError of one sentence that names the
path inside the file and the value there.
"""

import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from relight.agents.node import parts
from relight.events import toml
from relight.events.errors import UsageError
from relight.events.ids import EngineName, JobName, NodeName, engine_name, job_name, node_name

log = logging.getLogger(__name__)

PLACEHOLDERS = ("{port}", "{weights}", "{incarnation}", "{head}", "{part}", "{parts}")
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that say which devices an engine may use."""

T = TypeVar("T")


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One collective_rpc."""

    method: str
    kwargs: dict[str, Any] = {}


class FurtherPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[engines.parts]]` table of a job's file: a part of the engine on another node than its head."""

    command: tuple[str, ...]
    """Argument list, as the engine's own, without a port."""
    env: dict[str, str] = {}
    """Laid over the engine's."""
    ready: str = ""
    """As `Engine.ready`."""


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[engines]]` table."""

    name: EngineName
    kind: Literal["vllm"] = "vllm"
    """The HTTP API that it speaks."""
    command: tuple[str, ...] = ()
    """Argument list; `{port}`, `{weights}` and `{incarnation}` are filled in, in `env` too, and `{head}`,
    `{part}` and `{parts}` of an engine over several nodes. An application that starts the engine gets it too,
    and may do without."""
    env: dict[str, str] = {}
    """Laid over the inherited environment."""
    launcher: Literal["process", "delegated"] = "process"
    """Who starts it: the agent, or the application."""
    how: tuple[Literal["fork", "cold"], ...] = ("cold",)
    """Ways to start it, the preferred one first. Every start is cold so far: what else stands here is passed
    over with a warning where the file is read."""
    port: int | None = None
    """A port that stays across incarnations; none takes a free one each time."""
    model: str | None = None
    """Directory of the base model; required where the command has `{weights}`."""
    cache_dir: str | None = None
    """Directory for compilation caches that outlive an incarnation."""
    evidence: tuple[str, ...] = ()
    """Command that looks at a hung engine, start, load or proof before the kill, for at most 10 s; its output
    is kept beside the log. `{pid}` is its core's process, `{pids}` all of its processes, by commas."""
    after_start: tuple[Call, ...] = ()
    """Calls made once it is up, before it is paused."""
    kv: Literal["reset", "keep", "recompute"] = "reset"
    """What becomes of cached keys and values when weights are loaded into a serving engine."""
    checksums: bool = True
    """Ask the engine for its own checksums at each proof; costs one pass over the weights."""
    stall_s: float = 10.0
    """Without progress and without an answer for so long it is dead: ten times a slow iteration."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL; vLLM needs 0.4 s when it is well."""
    start_s: float | None = None
    """Longest start; none leaves it to the decision's deadline."""
    part: int = 0
    """Which part of an engine over several nodes this node holds: 0 is the head, which has the server."""
    parts: int | tuple[FurtherPart, ...] = 1
    """How many parts it has, each on a node of its own. A job's file has the further ones themselves here,
    as `[[engines.parts]]`."""
    ready: str = ""
    """Words in the log of a further part that tell that it is up; none takes it as up once it runs."""


class Spare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[spare]` table: room for engines whose own nodes are lost."""

    slots: int = 0
    """How many may come besides those of this node, which leave room here while they are elsewhere."""
    devices: tuple[str, ...] = ()
    """What each slot has in place of an engine's own CUDA_VISIBLE_DEVICES; none leaves that as it is."""
    each: str = ""
    """What an engine takes up here, for people: `1 GPU`."""
    engines: tuple[Engine, ...] = ()
    """Those of other nodes that may come."""


class NodeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    job: JobName
    node: NodeName
    state_dir: str
    """Directory of this agent alone, on a disk that outlives it."""
    host: str | None = None
    """Name or address under which other machines reach this one; none takes the host's name."""
    engines: tuple[Engine, ...] = ()
    spare: Spare | None = None
    """None: no engine of another node may come."""

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir).expanduser()


def load(path: Path) -> NodeFile:
    """The node file at `path`; raises UsageError."""
    where = f"node file {str(path)!r}"
    return checked(read(path, NodeFile, where=where), where=f"{where}: ")


def read(path: Path, kind: type[T], *, where: str) -> T:
    """The TOML file at `path` as a `kind`; raises UsageError, which begins with `where`."""
    raw = toml.tables(path, where=where)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {_with_value(str(error), raw)}") from error


def one_engine(job: str, name: str, command: Sequence[str]) -> NodeFile:
    """The node of `relight agent --job NAME --name ENGINE -- COMMAND`; raises UsageError.

    The command runs as it would from this shell, so the devices chosen there stay chosen.
    """
    engine_name(name)
    job_name(job)
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-") or "host"
    node = node_name(f"{host[: 62 - len(name)].rstrip('-') or 'host'}-{name}"[:63])
    engine = Engine(
        name=EngineName(name),
        command=tuple(command),
        env={variable: os.environ[variable] for variable in DEVICES if variable in os.environ},
    )
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "relight" / job / node
    file = NodeFile(job=JobName(job), node=node, state_dir=str(state), engines=(engine,))
    return checked(file, where="", engine_at="")


def checked(file: NodeFile, *, where: str, engine_at: str = "$.engines[{}].") -> NodeFile:
    """`file` where everything that it names is there; raises UsageError, led by `where` and `engine_at`."""
    _check_name(job_name, file.job, f"{where}$.job")
    _check_name(node_name, file.node, f"{where}$.node")
    if not file.state_dir:
        raise UsageError(f"{where}$.state_dir '' names no folder")
    if not file.engines and not (file.spare and file.spare.slots):
        raise UsageError(f"{where}$.engines is empty: an agent without engines has nothing to do")
    if file.spare is not None:
        _check_spare(file.spare, where)
    seen: set[object] = set()
    guests = file.spare.engines if file.spare else ()
    own = len(file.engines)
    for index, engine in enumerate((*file.engines, *guests)):
        path = engine_at.format(index) if index < own else f"$.spare.engines[{index - own}]."
        at = where + path
        _check_name(engine_name, engine.name, f"{at}name")
        this = engine.name if index < own else (engine.name, engine.part)  # a spare may take any part
        if seen & {engine.name, this}:
            raise UsageError(f"{at}name {engine.name!r} stands twice")
        seen.add(this)
        _check_engine(engine, at)
    ports = [engine.port for engine in file.engines if engine.port is not None]
    for port in ports:
        if ports.count(port) > 1:
            raise UsageError(f"{where}port {port} is given to two engines")
    return file


def _check_spare(spare: Spare, where: str) -> None:
    if spare.slots < 0:
        raise UsageError(f"{where}$.spare.slots {spare.slots} must be 0 or more")
    if spare.devices and len(spare.devices) != spare.slots:
        raise UsageError(f"{where}$.spare.devices has {len(spare.devices)} entries for {spare.slots} slots")
    if spare.slots and not spare.engines:
        raise UsageError(f"{where}$.spare.engines is empty: {spare.slots} slots, and no engine may come")


def _check_name(name: Callable[[str], str], text: str, at: str) -> None:
    try:
        name(text)
    except UsageError as error:
        raise UsageError(f"{at}: {error}") from None


def _check_engine(engine: Engine, at: str) -> None:
    if "cold" not in engine.how:
        raise UsageError(f"{at}how {list(engine.how)} is not supported: 'cold' must be among them")
    if others := [way for way in engine.how if way != "cold"]:
        log.warning("only cold starts are supported, others are passed over at=%show others=%s", at, others)
    parts.check(engine, at)
    words = (*engine.command, *engine.env.values())
    if engine.launcher == "process":
        _check_command(engine, words, at)
    if engine.port is not None and not 0 < engine.port < 65_536:
        raise UsageError(f"{at}port {engine.port} is no port")
    if engine.evidence and shutil.which(engine.evidence[0]) is None:
        raise UsageError(f"{at}evidence[0] {engine.evidence[0]!r} is no program that can be run")
    if engine.model is None and any("{weights}" in word for word in words):
        raise UsageError(f"{at}command has {{weights}} but there is no `model`, the base model's folder")
    for variable in engine.env:
        if not variable or "=" in variable:
            raise UsageError(f"{at}env {variable!r} is no name of a variable")
    for key, value in (("stall_s", engine.stall_s), ("grace_s", engine.grace_s), ("start_s", engine.start_s)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{at}{key} {value} must be a finite number of seconds above 0")
    _check_model(engine, at)
    drain = _option(engine.command, "--shutdown-timeout")
    if drain is not None and _number(drain) >= engine.grace_s:
        raise UsageError(
            f"{at}command drains for {drain} s (--shutdown-timeout), not less than grace_s {engine.grace_s}"
        )


def _check_command(engine: Engine, words: Sequence[str], at: str) -> None:
    if not engine.command:
        raise UsageError(f"{at}command is empty, and launcher is 'process'")
    program = engine.command[0]
    if shutil.which(program, path=engine.env.get("PATH")) is None:
        raise UsageError(f"{at}command[0] {program!r} is no program that can be run")
    if not engine.part and engine.port is None and not any("{port}" in word for word in words):
        raise UsageError(f"{at}command {list(engine.command)} has no {{port}}, and no `port` is given")


def _check_model(engine: Engine, at: str) -> None:
    if engine.model is not None and not (engine.model and Path(engine.model).is_dir()):
        raise UsageError(f"{at}model {engine.model!r} is no folder")
    flag, named = _named_model(engine.command)
    if named is None or any(mark in named for mark in PLACEHOLDERS):
        return
    if named.startswith(("/", "./", "../", "~")) and not Path(named).expanduser().is_dir():
        raise UsageError(f"{at}command: {flag} {named!r} is no folder")


def device(engine: Engine) -> str | None:
    """The device or devices that the engine's own `env` gives it; None where it names none."""
    return next((engine.env[name] for name in DEVICES if engine.env.get(name)), None)


def visible_devices(engine: Engine) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES that the engine's own `env` gives it."""
    return engine.env.get(DEVICES[0])


def base_model(engine: Engine) -> Path | None:
    """The folder of the weights that the engine starts on without others; None where it is no folder."""
    named = engine.model or _named_model(engine.command)[1]
    return Path(named) if named and Path(named).is_dir() else None


def takes_weights(engine: Engine) -> bool:
    """Whether the engine is started on the weights that the decision names."""
    return engine.launcher == "delegated" or any("{weights}" in word for word in engine.command)


def starts_empty(engine: Engine) -> bool:
    """Whether the command starts the engine without weights."""
    return _option(engine.command, "--load-format") == "dummy"


def _named_model(command: Sequence[str]) -> tuple[str, str | None]:
    """What `--model M` or `vllm serve M` names, behind the word that does: a folder, or a name on a hub."""
    if named := _option(command, "--model"):
        return "--model", named
    served = _option(command, "serve")
    return "serve", None if served is None or served.startswith("-") else served


def _option(command: Sequence[str], flag: str) -> str | None:
    for index, word in enumerate(command):
        if word == flag and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def listens_on(engine: Engine) -> str | None:
    """The `--host` of the command."""
    return _option(engine.command, "--host")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _with_value(message: str, raw: Mapping[str, Any]) -> str:
    """msgspec's message with the offending value: `Expected …, got … - at `$.engines[0].port``."""
    path = re.search(r"at `\$([^`]*)`", message)
    value: Any = raw
    for key, index in re.findall(r"\.([A-Za-z0-9_-]+)|\[(\d+)\]", path[1] if path else ""):
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return message
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        value = cast("dict[str, Any]", value).get(unknown[1])
    if isinstance(value, dict) and not (path and path[1].endswith("[...]")):  # whole tables are no values
        return message
    return f"{message} (value {value!r})"
