"""The stub's command line: its settings and one flag for each knob.

vLLM's own flags that mean nothing here (`--dtype float32`, `--enforce-eager`, ...) are accepted and ignored,
so that a command written for vLLM starts the stub as well.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Literal, NoReturn, get_args, get_origin

import msgspec

from relight.agents.stub.knobs import Knobs

_IGNORED_FLAGS = ("--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out", "--trust-remote-code")
_IGNORED_VALUES = ("--dtype", "--tensor-parallel-size", "--gpu-memory-utilization", "--seed",
                   "--pipeline-parallel-size", "--distributed-executor-backend")  # fmt: skip


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How one stub engine is started."""

    model: str
    """Folder of `*.safetensors`."""
    served_model_name: str
    """Name in /v1/models; the folder by default, as in vLLM."""
    host: str
    """Address to listen on."""
    port: int
    """Port to listen on; 0 takes a free one, which only the log tells."""
    token_interval_ms: float
    """Time of one iteration, in which each running request gets one token. 2: about a small GPU model."""
    stream_interval: int
    """Tokens a chunk after the first one, as vLLM's flag of that name."""
    max_model_len: int
    """Prompt and budget together; 512 as in the tiny test models."""
    max_num_seqs: int
    """Sequences that run at once; further ones wait. 256 as in vLLM."""
    death_exit_ms: float
    """From the core's death to the server's exit with code 0; vLLM takes seconds, 300 keeps tests quick."""
    shutdown_timeout_s: float
    """Seconds of drain after SIGTERM; 0 ends at once, as in vLLM."""
    over_length: Literal["refuse", "clamp"]
    """Prompt plus budget over `max_model_len`: a 400, or a budget cut in silence as the CPU build does."""
    load_format: Literal["auto", "safetensors", "dummy"]
    """`dummy` starts without values; reloads answer 500 until update_config says otherwise."""
    nnodes: int
    """Over how many nodes the engine goes; its head is up when the others have come."""
    node_rank: int
    """Which of them this is; 0 is the head."""
    master_addr: str
    """Where the others meet the head."""
    master_port: int
    """The head's port for that, as vLLM's by default."""
    headless: bool
    """A further part: a worker of the head's engine, without a server of its own."""
    title: str
    """Prefix of the process titles, from VLLM_PROCESS_NAME_PREFIX."""
    knobs: Knobs
    """Faults to play."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"error: {message}\n")


def parse(argv: Sequence[str]) -> Settings:
    """Settings from a command line; exits with code 1 and one sentence on stderr when it is wrong."""
    parser = _Parser(prog="python -m relight.agents.stub", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-interval-ms", type=float, default=2.0)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--death-exit-ms", type=float, default=300.0)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0, dest="shutdown_timeout_s")
    parser.add_argument("--over-length", choices=("refuse", "clamp"), default="refuse")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "dummy"), default="auto")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--headless", action="store_true")
    for flag in _IGNORED_FLAGS:
        parser.add_argument(flag, action="store_true", dest="_ignored")
    for flag in _IGNORED_VALUES:
        parser.add_argument(flag, dest="_ignored")
    fields = msgspec.structs.fields(Knobs)
    for field in fields:
        _add_knob(parser, field)
    values = vars(parser.parse_args(argv))
    if not 0 <= values["node_rank"] < values["nnodes"] or values["headless"] != (values["node_rank"] > 0):
        parser.error(f"--node-rank {values['node_rank']} of --nnodes {values['nnodes']}: others are headless")
    values.pop("_ignored")
    values["knobs"] = Knobs(**{field.name: values.pop(field.name) for field in fields})
    values["served_model_name"] = values["served_model_name"] or values["model"]
    return Settings(title=os.environ.get("VLLM_PROCESS_NAME_PREFIX", "VLLM"), **values)


def _add_knob(parser: argparse.ArgumentParser, field: msgspec.structs.FieldInfo) -> None:
    flag = "--" + field.name.replace("_", "-")
    if field.type is bool:
        parser.add_argument(flag, action="store_true", default=field.default)
    elif get_origin(field.type) is Literal:
        parser.add_argument(flag, choices=get_args(field.type), default=field.default)
    else:
        kinds = [kind for kind in (get_args(field.type) or (field.type,)) if kind is not type(None)]
        parser.add_argument(flag, type=kinds[0], default=field.default)
