"""A trainer of several ranks for tests: real processes, real torch.distributed over gloo, real FSDP.

Ranks are forked from one server that has imported torch already. Each runs one of the programs of
`ranks_programs` and gives back what that returns, or the name and text of what it raises.
"""

import datetime
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "relight.agents.trainer.session"])
WITHIN_S = 30.0


class Place(NamedTuple):
    """Where a rank is."""

    rank: int
    url: str
    directory: Path

    def note(self, word: str) -> None:
        """Leave a sign for the test."""
        (self.directory / f"{word}.{self.rank}").touch()


Program = Callable[[Place], Any]


def _run(program: Program, place: Place, size: int, back: Connection) -> None:
    import torch.distributed as dist

    meeting = f"file://{place.directory}/meeting"
    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=place.rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=WITHIN_S),
    )
    try:
        back.send(("returned", program(place)))
    except BaseException as error:  # noqa: BLE001 -- told to the test
        traceback.print_exc()
        back.send((type(error).__name__, str(error)))
    back.close()
    os._exit(0)  # what is left of groups that lost a rank is not torn down


class Trainer:
    """The ranks under way."""

    def __init__(self, program: Program, *, url: str, directory: Path, size: int) -> None:
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        self.directory = directory
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_run, args=(program, Place(rank, url, directory), size, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def told(self, rank: int, *, within_s: float = WITHIN_S) -> tuple[str, Any]:
        """`("returned", value)`, or the name and the text of an exception."""
        assert self._ends[rank].poll(within_s), f"rank {rank} is still busy"
        told: tuple[str, Any] = self._ends[rank].recv()
        return told

    def returned(self, rank: int) -> Any:
        how, value = self.told(rank)
        assert how == "returned", f"rank {rank}: {how}: {value}"
        return value


@contextmanager
def training(program: Program, *, url: str, directory: Path, size: int = 2) -> Iterator[Trainer]:
    """Ranks that run `program`; none outlives the block."""
    trainer = Trainer(program, url=url, directory=directory, size=size)
    try:
        yield trainer
    finally:
        for process in trainer.processes:
            process.kill()
            process.join(WITHIN_S)
