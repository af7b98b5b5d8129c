"""What the demo writes before it starts anything, plan and configuration files, and the commands it runs."""

import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from relight.events.ids import EngineName, JobName
from relight.orchestrator.cli.demo.evidence import Fault, Kind, Plan, RecoverAt
from relight.orchestrator.cli.demo.model import prompt

RELIGHT = (sys.executable, "-m", "relight.orchestrator.cli")
"""The `relight` command, of this very installation."""

TOKEN_MS = 10
"""What a token takes in the stub: 64 of them are far from over when the eighth chunk has come."""

VLLM = (
    "--served-model-name", "relight-demo", "--host", "127.0.0.1", "--port", "{port}",
    "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
    "--enable-scale-out", "--enable-log-requests",
)  # fmt: skip
"""Flags of a small vLLM that takes token ids and notes each request's budget in its log."""

VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}

STALL_S: Mapping[Kind, float] = {"stub": 1.0, "vllm": 5.0}
"""Without progress and answer for so long an engine is dead; tiny models take milliseconds a token."""


class Place(NamedTuple):
    """The demo's folder, and what stands where in it."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "model"

    @property
    def bus(self) -> Path:
        return self.root / "bus"

    @property
    def state(self) -> Path:
        return self.root / "node"

    @property
    def snapshots(self) -> Path:
        return self.root / "weights"

    @property
    def scratch(self) -> Path:
        """TMPDIR of everything that the demo starts."""
        return self.root / "tmp"

    @property
    def cache(self) -> Path:
        """What torch compiles, kept across incarnations; otherwise it would lie in TMPDIR."""
        return self.root / "cache"

    @property
    def requests(self) -> Path:
        return self.root / "plan.json"

    @property
    def node_file(self) -> Path:
        return self.root / "node.toml"

    @property
    def settings(self) -> Path:
        return self.root / "orchestrator.toml"


def default_kind() -> Kind:
    """vLLM where it is installed, else the stub."""
    return "vllm" if importlib.util.find_spec("vllm") is not None else "stub"


def plan(kind: Kind, *, engines: int, fault: Fault, recover_at: RecoverAt) -> Plan:
    return Plan(
        kind=kind,
        engines=tuple(EngineName(f"engine-{number}") for number in range(engines)),
        fault=fault,
        recover_at=recover_at,
        prompts={"restart": prompt(1, length=24), "continue": prompt(2, length=17)},
    )


def new_job() -> JobName:
    """A job's name that no other demo has."""
    return JobName(f"demo-{secrets.token_hex(3)}")


def write(place: Place, plan: Plan, *, job: JobName) -> None:
    """Write all files that the commands read."""
    for directory in (place.bus, place.state, place.snapshots, place.scratch):
        directory.mkdir()
    place.requests.write_bytes(msgspec.json.encode(plan))
    place.settings.write_text(f"[defaults]\nrecover_at = {_text(plan.recover_at)}\n")
    tables = "".join(_engine(name, place, plan.kind) for name in plan.engines)
    place.node_file.write_text(
        f'job = {_text(job)}\nnode = "demo"\nhost = "127.0.0.1"\nstate_dir = {_text(place.state)}\n{tables}'
    )


def _engine(name: EngineName, place: Place, kind: Kind) -> str:
    command, env = command_of(kind)
    pairs = ", ".join(f"{key} = {_text(value)}" for key, value in env.items())
    return (
        f"\n[[engines]]\nname = {_text(name)}\nmodel = {_text(place.base)}\nstall_s = {STALL_S[kind]}\n"
        f"command = [{', '.join(map(_text, command))}]\nenv = {{ {pairs} }}\n"
    )


def command_of(kind: Kind) -> tuple[tuple[str, ...], dict[str, str]]:
    """An engine's command and environment."""
    if kind == "vllm":
        server = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "{weights}")
        return (*server, *VLLM), VLLM_ENV
    stub = (sys.executable, "-m", "relight.agents.stub", "--model", "{weights}", "--host", "127.0.0.1")
    return (*stub, "--port", "{port}", "--token-interval-ms", str(TOKEN_MS)), {}


def environment(place: Place) -> dict[str, str]:
    """What services are started with: this environment, with a temporary folder of the demo's own."""
    return {
        **os.environ,
        "TMPDIR": str(place.scratch),
        "TORCHINDUCTOR_CACHE_DIR": str(place.cache),
        "OMP_NUM_THREADS": "1",  # more would spin on every core, and nothing else could stream
        "PYTHONUNBUFFERED": "1",
    }


def commands(place: Place, *, url: str, job: JobName) -> dict[str, tuple[str, ...]]:
    """The relight processes behind the bus, by name."""
    of_bus = ("--bus", url)
    return {
        "orchestrator": (*RELIGHT, "orchestrate", *of_bus, "--job", job, "--config", str(place.settings)),
        "agent": (*RELIGHT, "agent", *of_bus, "--config", str(place.node_file), "--stop-engines"),
    }


def trainer(place: Place, *, url: str, job: JobName, kind: Kind, report: int) -> tuple[str, ...]:
    """The trainer, which reports on the descriptor `report`."""
    options = {
        "--bus": url,
        "--job": job,
        "--kind": kind,
        "--base": place.base,
        "--snapshots": place.snapshots,
        "--requests": place.requests,
        "--report": report,
    }
    module = "relight.orchestrator.cli.demo.trainer"
    return (sys.executable, "-m", module, *(str(word) for option in options.items() for word in option))


def _text(value: object) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    return json.dumps(str(value))
