"""The environment of an engine: the agent's own, less what would mislead it, plus what marks it."""

import os
import re
from collections.abc import Mapping

from relight.agents.node.config import DEVICES, Engine
from relight.agents.node.marks import TAG

_DENIED = frozenset(
    {
        *DEVICES,  # those of whoever started the agent; an engine's own stand in its `env`
        "TMPDIR", "TEMP", "TMP", "VLLM_RPC_BASE_PATH", "VLLM_PROCESS_NAME_PREFIX",  # one for each incarnation
        "VLLM_PORT", "VLLM_HOST_IP", "PORT",  # a service's injected variables, or another engine's
        "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE",  # a trainer's process group is not the engine's
        "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID",
    }
)  # fmt: skip
_DENIED_SHAPE = re.compile(r"RELIGHT_.*|TORCHELASTIC_.*|PET_.*|VLLM_DP_.*|VLLM_(SERVICE|PORT)_.*|RAY_.*")


def environment(
    engine: Engine,
    *,
    tag: str,
    tmpdir: str,
    words: Mapping[str, str],
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """What one incarnation is started with; `words` are what `{…}` stands for in the engine's `env`."""
    caches = {"VLLM_CACHE_ROOT": engine.cache_dir} if engine.cache_dir else {}
    return {
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # without it vLLM has no route for pause, labels and reloads
        **cleaned(inherited),
        **caches,
        **{name: filled(value, words) for name, value in engine.env.items()},
        "TMPDIR": tmpdir,
        "VLLM_RPC_BASE_PATH": tmpdir,
        "VLLM_PROCESS_NAME_PREFIX": tag,
        TAG: tag,
    }


def cleaned(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` less what would mislead an engine."""
    return {
        name: value
        for name, value in inherited.items()
        if name not in _DENIED and not _DENIED_SHAPE.fullmatch(name)
    }


def filled(text: str, words: Mapping[str, str]) -> str:
    """`text` with the placeholders that are ours replaced, all other braces left alone."""
    for name, value in words.items():
        text = text.replace("{" + name + "}", value)
    return text
