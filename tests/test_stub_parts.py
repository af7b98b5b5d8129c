"""The stub over two nodes: it is up when its part has come, works with it, and dies with it."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relight.agents.stub.launch import Stub, launch, make_model, wait_gone
from relight.events.bus.embedded import free_port


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", seed=1)


@contextmanager
def over_two(model: Path, *knobs: str) -> Generator[tuple[Stub, Stub]]:
    """The head, up, and its part, which has `knobs`."""
    both = ("--nnodes", "2", "--master-port", str(free_port()))
    further = (*both, "--node-rank", "1", "--headless", *knobs)
    with launch(model, *both, wait=False) as head, launch(model, *further, wait=False) as part:
        head.wait_until_listening()
        yield head, part


def generated(head: Stub) -> int:
    answer = head.generate([5, 6, 7], max_tokens=4)
    assert answer.status == 200
    return len(answer.body["choices"][0]["token_ids"])


def test_it_generates_once_its_part_has_come_and_ends_with_it(model: Path) -> None:
    with over_two(model) as (head, part):
        assert generated(head) == 4
        core, worker = head.core, part.pid_of("Worker_TP1")
        os.kill(worker, signal.SIGKILL)
        wait_gone(core)
        assert part.process.wait(10) == 1
        assert head.process.wait(10) == 0


def test_a_part_ends_with_its_head(model: Path) -> None:
    with over_two(model) as (head, part):
        os.kill(head.core, signal.SIGKILL)
        assert part.process.wait(10) == 1


def test_a_part_may_outlive_its_head_and_ends_when_it_is_asked(model: Path) -> None:
    with over_two(model, "--outlives-head") as (head, part):
        worker = part.pid_of("Worker_TP1")
        os.kill(head.core, signal.SIGKILL)
        head.process.wait(10)
        assert part.process.poll() is None
        part.process.terminate()
        assert part.process.wait(10) == 0
        wait_gone(worker)


def test_a_part_that_does_not_start_says_why(model: Path) -> None:
    with launch(
        model, "--nnodes", "2", "--node-rank", "1", "--headless", "--start-fails", "no device", wait=False
    ) as one:
        assert one.process.wait(10) == 1
        one.close()
        assert "error: no device" in one.lines
