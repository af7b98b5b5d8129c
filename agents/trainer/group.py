"""One group of a weight transfer: who is in it, where it meets, and how its engines are asked.

The shapes are those that vLLM's trainer side speaks of (vLLM 0.32, `vllm.distributed.weight_transfer`).
"""

import socket
from collections.abc import Callable, Hashable
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from relight.agents.trainer.fleet import Fleet, MembersFailed
from relight.events.ids import EngineName
from relight.events.values import Member


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group meets, and how many are in it: the trainer's rank 0, then every worker of each engine."""

    address: str
    port: int
    world_size: int
    rank: int = 0
    """Of this process among the trainer's."""


class Control(Protocol):
    """What vLLM's trainer side asks of engines (its `VLLMWeightSyncClient`)."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Sender(Protocol):
    """vLLM's trainer side of one group (its `TrainerWeightTransferEngine`)."""

    def send_weights(self) -> None: ...
    def shutdown(self) -> None: ...


class Source(Protocol):
    """The live tensors under the names of a checkpoint, gathered one after the other."""

    def begin(self) -> None:
        """One pass over all of them is to come."""
        ...

    def drain(self) -> None:
        """Gather what the pass has left where it was broken off: the other ranks gather all."""
        ...

    def fingerprint(self) -> Hashable | None: ...


Open = Callable[[Meeting, Control, Source], Sender]
"""Meets the members and returns the trainer's side of the group."""


class Engines:
    """Engines as vLLM's trainer side asks them: all at once, each with its place in the group."""

    def __init__(self) -> None:
        self.fleet = Fleet((), within_s=0.0)
        self._before: dict[EngineName, int] = {}
        self._version = ""
        self._started = False
        self.refusal: MembersFailed | None = None
        """Why the last update did not begin, where it did not."""
        self.unfinished: dict[EngineName, str] = {}
        """Members that could not end the last update, alone: the others hold it."""

    def offsets(self, sizes: dict[EngineName, int], members: tuple[Member, ...]) -> None:
        """How many workers stand before each engine's."""
        before = 0
        for member in members:
            self._before[member.engine] = before
            before += sizes[member.engine]

    def begin(self, fleet: Fleet, version: str) -> None:
        """The next update is of `version`."""
        self.fleet, self._version, self._started = fleet, version, False
        self.unfinished, self.refusal = {}, None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def placed(member: Member) -> object:
            offset = init_info.get("rank_offset", 1) + self._before[member.engine]
            return {"init_info": {**init_info, "rank_offset": offset}}

        self.fleet.post("/init_weight_transfer_engine", placed)

    def start_weight_update(self) -> None:
        """Once an update: vLLM's side asks for it again, after every rank has heard that it goes."""
        if not self._started:
            self.fleet.post("/start_weight_update")
            self._started = True

    def update_weights(self, update_info: Any) -> None:
        self.fleet.post("/update_weights", lambda _: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        try:
            self.fleet.post("/finish_weight_update", lambda _: {"weight_version": self._version})
        except MembersFailed as error:
            self.unfinished = error.errors


def address_towards(url: str) -> str:
    """This machine's address on the way to an engine."""
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
