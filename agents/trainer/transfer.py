"""VllmTransferSync: weights go from the trainer's memory into engines, by vLLM's own weight-transfer API.

The group of one transfer is the trainer and the members of the order, so that a recovery reaches the engines
that lack weights and no other one: those are neither paused nor asked. A group is kept for as long as its
members are the same. Nothing of vLLM ends an update that has begun, so every member of one that failed is
touched, and restarted.
"""

import logging
import threading
from collections.abc import Collection, Generator, Hashable, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec

from relight.agents.adapters.vllm import gave_memory_up
from relight.agents.trainer import words
from relight.agents.trainer.fleet import Fleet, MembersFailed
from relight.agents.trainer.group import Engines, Meeting, Open, Sender, Source, address_towards, free_port
from relight.agents.trainer.ranks import RankFailed
from relight.agents.trainer.sync import Context, Left, told
from relight.events.decisions import SyncWeights
from relight.events.errors import RelightError, UsageError
from relight.events.facts import WeightsSynced
from relight.events.ids import EngineName
from relight.events.values import Failed, Loaded, Member
from relight.events.version import Version

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks whether a member has died: its absence would hold a broadcast for ever."""


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others of an export."""

    meeting: Meeting | None = None
    """Of a new group; none keeps the old one."""


class _Go(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None = None


class VllmTransferSync:
    """A push by vLLM's weight transfer.

    `model`: a torch module. `backend`: the transport's name in vLLM's factories; engines are started with
    `--weight-transfer-config '{"backend": …}'`. `address`: under which engines reach this trainer; None takes
    the one that routes to them. `kv`: what becomes of cached keys and values of a serving engine. `timeout_s`
    bounds one transfer. `open_group` replaces what vLLM's trainer factory makes of the backend.
    """

    pushes = True
    subset = True

    def __init__(  # noqa: PLR0913 -- a public signature
        self,
        model: Any,
        *,
        backend: str = "nccl",
        address: str | None = None,
        kv: Literal["reset", "keep", "recompute"] = "reset",
        timeout_s: float = 300.0,
        open_group: Open | None = None,
    ) -> None:
        from relight.agents.adapters import vllm_transfer

        if timeout_s <= 0:
            raise UsageError(f"timeout_s={timeout_s} must be above 0")
        self._source: Source = vllm_transfer.source(model)
        self._open = open_group or vllm_transfer.opener(backend)
        self._address = address
        self._kv = kv
        self._timeout_s = timeout_s
        self._context = Context()
        self._members: tuple[Member, ...] = ()
        """Of the open group."""
        self._control = Engines()
        self._sender: Sender | None = None
        """Taken away by whoever closes it: a watcher may, while a transfer waits in it."""
        self._turn = threading.Lock()

    def bind(self, context: Context) -> None:
        self._context = context

    def exportable(self, version: Version) -> bool:
        return True

    def joint(self, version: Version) -> bool:
        return True

    def fingerprint(self) -> Hashable | None:
        return self._source.fingerprint()

    def close(self) -> None:
        self._leave_group()

    # --- rank 0 ------------------------------------------------------------------------------------

    def export(self, order: SyncWeights, left: Left) -> WeightsSynced:
        """Hand `order.version` over; whoever fails is told in the answer. Raises RanksLost alone."""
        members = tuple(member for member in order.members if member.engine not in left.before)
        gone = tuple(member for member in order.members if member.engine in left.before)
        fleet = Fleet(members, within_s=self._timeout_s)
        failed: dict[EngineName, Failed] = {
            member.engine: Failed(member.engine, member.incarnation, "left", False) for member in gone
        }
        with self._watched(fleet, left):
            failed |= self._handed_over(fleet, order)
        return WeightsSynced(
            sync=order.sync,
            version=order.version,
            loaded=tuple(Loaded(m.engine, m.incarnation) for m in members if m.engine not in failed),
            failed=tuple(failed[m.engine] for m in order.members if m.engine in failed),
        )

    def _handed_over(self, fleet: Fleet, order: SyncWeights) -> dict[EngineName, Failed]:
        """Who failed."""
        error = self._meet(fleet)
        serving: list[Member] = []
        touched: set[EngineName] = set()
        if error is None and fleet.members:
            try:
                self._pause(fleet, serving)
                touched |= self._begun(fleet, str(order.version))
            except RelightError as failure:
                error = failure
        self._go(error or self._control.refusal)
        if error is None and self._control.refusal is None and fleet.members:
            try:
                self._source.begin()
                self._send()
                self._all_paused(fleet)
                return _failures(fleet.members, self._resumed(fleet, serving), touched=touched)
            except Exception as failure:  # noqa: BLE001 -- whatever a backend raises, nobody knows what it left
                error = failure
                self._source.drain()
        error = error or self._control.refusal
        if error is None:
            return {}
        log.warning("transfer failed", extra={"version": str(order.version)}, exc_info=error)
        self._leave_group()
        with suppress(MembersFailed):  # its pause has a lease, which its agent holds
            fleet.post("/resume", members=[each for each in serving if each.engine not in touched])
        own = error.errors if isinstance(error, MembersFailed) else {}
        errors = dict.fromkeys((member.engine for member in fleet.members), told(error)) | own
        return _failures(fleet.members, errors, touched=touched)

    def _begun(self, fleet: Fleet, version: str) -> set[EngineName]:
        """Begin the update; whose tensors may have lost their bytes by that."""
        self._control.begin(fleet, version)
        try:
            self._control.start_weight_update()
        except MembersFailed as error:
            self._control.refusal = error
            return {member.engine for member in fleet.members} - error.refused
        return {member.engine for member in fleet.members}

    def _meet(self, fleet: Fleet) -> Exception | None:
        """Be in a group with exactly these members, on all ranks; why not, otherwise."""
        ranks = self._context.ranks
        meeting: Meeting | None = None
        error: Exception | None = None
        if fleet.members and (fleet.members != self._members or self._sender is None):
            try:
                meeting = self._new_meeting(fleet)
            except (RelightError, OSError) as failure:
                error = failure
        ranks.tell(words.written(_Step(meeting=meeting)))
        if meeting is not None:
            error = self._opened(meeting, fleet)
        outcomes = [words.read(data, _Go) for data in ranks.gather(words.written(_Go(error=told(error))))]
        others = {rank: one.error for rank, one in enumerate(outcomes) if rank and one.error is not None}
        if error is None and others:
            error = RankFailed("; ".join(f"rank {rank}: {why}" for rank, why in others.items()))
        return error

    def _new_meeting(self, fleet: Fleet) -> Meeting:
        self._leave_group()
        sizes = {name: int(told["world_size"]) for name, told in fleet.get("/get_world_size").items()}
        fleet.post("/shutdown_weight_transfer_engine")
        self._control.offsets(sizes, fleet.members)
        address = self._address or address_towards(fleet.members[0].address)
        return Meeting(address=address, port=free_port(), world_size=1 + sum(sizes.values()))

    def _opened(self, meeting: Meeting, fleet: Fleet) -> Exception | None:
        self._control.fleet = fleet
        try:
            self._sender = self._open(meeting, self._control, self._source)
        except Exception as error:  # noqa: BLE001 -- told to all ranks, and in the answer
            return error
        self._members = fleet.members
        return None

    def _go(self, error: Exception | None) -> None:
        self._context.ranks.tell(words.written(_Go(error=told(error))))

    def _send(self) -> None:
        sender = self._sender
        if sender is None:
            raise RelightError("the group was closed before anything was sent")
        sender.send_weights()

    def _pause(self, fleet: Fleet, serving: list[Member]) -> None:
        """Pause those that serve, and note them; stale ones are paused by their agents, and stay so.

        Raises RelightError where one sleeps: it has no memory to write to.
        """
        metrics = fleet.get("/metrics")
        asleep = [member.engine for member in fleet.members if gave_memory_up(metrics[member.engine])]
        if asleep:
            raise RelightError(f"asleep: {', '.join(asleep)}")
        told = fleet.get("/is_paused")
        serving += [member for member in fleet.members if not told[member.engine]["is_paused"]]
        fleet.post("/pause?mode=keep", members=serving)
        self._all_paused(fleet)

    def _all_paused(self, fleet: Fleet) -> None:
        """Each engine's own ranks agree that it is paused; raises RelightError where it makes tokens."""
        told = fleet.get("/is_paused")
        awake = [member.engine for member in fleet.members if not told[member.engine]["is_paused"]]
        if awake:
            raise RelightError(f"not paused: {', '.join(awake)}")

    def _resumed(self, fleet: Fleet, serving: list[Member]) -> dict[EngineName, str]:
        """Let those go on that served; who did not end its update well, or does not go on, and why."""
        failed = dict(self._control.unfinished)
        for call in (self._forget, self._resume):
            try:
                call(fleet, [member for member in serving if member.engine not in failed])
            except MembersFailed as error:
                failed |= error.errors
        return failed

    @staticmethod
    def _resume(fleet: Fleet, members: list[Member]) -> None:
        fleet.post("/resume", members=members)

    def _forget(self, fleet: Fleet, members: list[Member]) -> None:
        """Cached keys and values of the old weights; blocks that running requests hold are recomputed."""
        if self._kv == "keep":
            return
        running = str(self._kv == "recompute").lower()
        answers = fleet.post(f"/reset_prefix_cache?reset_running_requests={running}", members=members)
        held = [member for member in members if not answers[member.engine]["success"]]
        fleet.post("/reset_prefix_cache?reset_running_requests=true", members=held)

    @contextmanager
    def _watched(self, fleet: Fleet, left: Left) -> Generator[None]:
        """A member that dies, or the deadline, ends what would wait for it for ever."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(LOOK_S):
                lost = sorted(set(left) - left.before)
                if lost or not fleet.left_s:
                    why = f"{', '.join(lost)} left" if lost else f"not done within {self._timeout_s:g} s"
                    fleet.abort(why)
                    self._cut()
                    return

        thread = threading.Thread(target=watch, name="relight-transfer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _cut(self) -> None:
        """Close the group under a transfer that waits in it: its calls then end with an error."""
        with self._turn:
            sender, self._sender = self._sender, None
        if sender is not None:
            try:
                sender.shutdown()
            except Exception as error:  # of whatever backend; the transfer fails either way
                log.warning("the group could not be closed", exc_info=error)

    def _leave_group(self) -> None:
        self._cut()
        self._members = ()

    # --- the other ranks ---------------------------------------------------------------------------

    def join(self, order: SyncWeights, left: Left) -> None:
        """Take part in the gathering of what rank 0 sends. Raises RankFailed."""
        ranks = self._context.ranks
        step = words.read(ranks.tell(b""), _Step)
        error: Exception | None = None
        if step.meeting is not None:
            self._leave_group()
            meeting = msgspec.structs.replace(step.meeting, rank=ranks.rank)
            error = self._opened(meeting, Fleet((), within_s=self._timeout_s))
        ranks.gather(words.written(_Go(error=told(error))))
        go = words.read(ranks.tell(b""), _Go)
        if error is not None:
            raise error
        if go.error is None and any(member.engine not in left.before for member in order.members):
            self._send()


def _failures(
    members: tuple[Member, ...], errors: Mapping[EngineName, str], *, touched: Collection[EngineName]
) -> dict[EngineName, Failed]:
    return {
        member.engine: Failed(
            member.engine, member.incarnation, errors[member.engine], member.engine in touched
        )
        for member in members
        if member.engine in errors
    }
