"""One real vLLM engine on CPU with a tiny model, for tests that need its own tokens and logprobs."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relight.events.bus.embedded import free_port
from relight.orchestrator.cli.demo import model
from relight.orchestrator.cli.demo.layout import command_of
from relight.orchestrator.cli.demo.processes import title

START_S = 180.0
"""Three processes that import for 5 s each on an idle core; machines that run tests are busy."""


class Engine:
    """A vLLM server that is up and warm."""

    def __init__(self, port: int, *, prefix: str) -> None:
        self.port = port
        self._prefix = prefix

    @property
    def core(self) -> int:
        """The process id of its EngineCore."""
        pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
        (pid,) = [pid for pid in pids if title(pid).startswith(f"{self._prefix}::EngineCore")]
        return pid

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        status, content = _request(self.port, "POST", path, body)
        assert status == 200, content
        return json.loads(content)

    def generate(self, token_ids: Sequence[int], **params: Any) -> Any:
        """One whole generation, unstreamed."""
        body = {"token_ids": list(token_ids), "sampling_params": params, "stream": False}
        return self.post("/inference/v1/generate", body)

    def metrics(self) -> str:
        return _request(self.port, "GET", "/metrics")[1].decode()

    def running(self) -> float:
        """Requests that it works on."""
        lines = [line for line in self.metrics().splitlines() if line.startswith("vllm:num_requests_")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if "by_reason" not in line)


@contextmanager
def vllm_engine(folder: Path, *flags: str) -> Iterator[Engine]:
    """The engine, up; nothing of it is left afterwards. Raises AssertionError with the end of its log."""
    model.make("vllm", folder / "model")
    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    port = free_port()
    command, env = command_of("vllm")
    words = [word.format(weights=folder / "model", port=port) for word in command]
    log = folder / "vllm.log"
    prefix = f"TEST{uuid.uuid4().hex[:12]}"
    env = {**os.environ, **env, "TMPDIR": str(scratch), "VLLM_PROCESS_NAME_PREFIX": prefix}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words, *flags],
            env={**env, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait_up(process, port, log)
        engine = Engine(port, prefix=prefix)
        engine.generate([1, 2, 3], max_tokens=2, temperature=0.0, logprobs=0)
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait_up(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _request(port, "GET", "/health")[0] == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"no vLLM within {START_S:g} s: {log.read_text(errors='replace')[-4000:]}")


def _request(port: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
