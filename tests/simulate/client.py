"""A client of a job: the real generations, dispatch, ledger and routes, over calls that may break.

Each turn is judged token by token as it is delivered, and whole at its end, by what the engines really
sampled (S11).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relight.agents.replay.dispatch import Dispatch
from relight.agents.replay.generation import Generation
from relight.agents.replay.ledger import Ledger, Policy
from relight.agents.replay.limits import Call, Limits
from relight.agents.replay.turn import Piece, ReplayError, Turn
from relight.events.bus.client import Bus
from relight.events.bus.follow import Decided, Event, Synced
from relight.events.decisions import RouteAdded, RouteFenced
from relight.events.ids import EngineName, Source
from tests.simulate.flow import Group
from tests.simulate.kernel import Process
from tests.simulate.link import Link
from tests.simulate.machine import Sampled, Web, Words

if TYPE_CHECKING:
    from tests.simulate.world import Job


FREED_S = 0.5
"""A call that is freed has ended after this."""


class Client:
    """One client process, over all of its lives."""

    def __init__(self, job: "Job", name: str) -> None:
        self.job = job
        self.name = name
        self.lives = 0
        self.made = 0
        """Turns begun."""
        self.process: Process | None = None
        self.link: Link | None = None
        self.turn: Watched | None = None
        """The one under way."""
        self.stopping = False
        """It begins no other turn."""
        self.fenced: dict[tuple[EngineName, int], float] = {}
        """Routes that it was told to leave, and when its calls there must have ended."""

    def start(self) -> None:
        world = self.job.world
        self.lives += 1
        self.fenced.clear()
        process = self.process = world.process(f"client-{self.job.name}-{self.name}-{self.lives}")
        process.failed = world.broke
        self.link = world.link(process)
        process.spawn(self._main(self.link))

    def hears(self, event: Event) -> None:
        """What its follower tells it."""
        decision = event.decision if isinstance(event, Decided) else None
        if isinstance(decision, RouteFenced) and not decision.dry_run:
            until_s = self.job.kernel.now + decision.drain_s + FREED_S
            route = decision.engine, decision.incarnation
            self.fenced[route] = min(until_s, self.fenced.get(route, until_s))
        elif isinstance(decision, RouteAdded):
            self.fenced.pop((decision.engine, decision.incarnation), None)
        elif isinstance(event, Synced):
            self.fenced.clear()

    def crash(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process = None
        if self.turn is not None:
            self.job.world.turns.pop(self.turn.name, None)
            self.turn = None
            self.job.turn_ended(None)
        for engine in self.job.engines:
            engine.hang_up(f"{self.job.name}.{self.name}-")

    async def _main(self, link: Link) -> None:
        bus = Bus("redis://bus", link.connect)
        source = Source(f"client/{self.name}")
        web = Web(self.job)
        dispatch = Dispatch(  # type: ignore[arg-type]
            bus.job(self.job.name), web, source=source, chance=self.job.random.random
        )
        async with Group(self.job.kernel) as tasks:
            tasks.start_soon(dispatch.run, tasks)
            await dispatch.synced()
            while True:
                await self._generate(dispatch, web)
                await self.job.world.flow.sleep(self.job.random.uniform(0.0, 2.0) * self.job.plan.think_s)
                while self.stopping:
                    await self.job.world.flow.sleep(5.0)

    async def _generate(self, dispatch: Dispatch, web: Web) -> None:
        job, plan = self.job, self.job.plan
        self.made += 1
        name = f"{job.name}.{self.name}-{self.lives}-{self.made}"
        prompt = [-self.made, -2, -3]
        most = job.random.randint(1, 2 * plan.tokens)
        policy = Policy(restart=plan.restarts, same=plan.same)
        ledger = Ledger(prompt, {"max_tokens": most, "logprobs": 0, "seed": self.made}, policy=policy)
        limits = Limits(plan.recovery_timeout_s, plan.max_engine_failures, plan.idle_s, plan.timeout_s)
        call = Call(name, None, {}, {})
        speech: Any = Words(job)
        generation = Generation(dispatch, web, ledger, call, limits, speech=speech)  # type: ignore[arg-type]
        turn = self.turn = Watched(job, name, prompt, most, self.fenced)
        job.world.turns[name] = turn
        error: ReplayError | None = None
        try:
            while not generation.done:
                if (brought := await generation.step()) is not None:
                    for piece in brought.pieces():
                        turn.take(piece)
        except ReplayError as failed:
            error = failed
        finally:
            generation.close()
        self.turn = None
        del job.world.turns[name]
        turn.end(error.partial if error is not None else generation.turn(), whole=error is None)
        job.turn_ended(error)


class Watched:
    """One turn as its caller sees it, against what was sampled."""

    def __init__(
        self,
        job: "Job",
        name: str,
        prompt: list[int],
        most: int,
        fenced: Mapping[tuple[EngineName, int], float],
    ) -> None:
        self.job = job
        self.name = name
        self._fenced = fenced
        self._prompt = prompt
        self._most = most
        self._delivered: list[tuple[int, Sampled]] = []
        self._void = False
        """Something of an attempt was rejected whole: the place where the next begins is free."""
        self._seeds: set[Any] = set()
        self._asked = 0

    def asked(self, token_ids: list[int], params: dict[str, Any]) -> None:
        """A request of this turn is sent."""
        kept = token_ids[len(self._prompt) :]
        self._asked += 1
        if token_ids[: len(self._prompt)] != self._prompt:
            self._broken(f"sends another prompt {token_ids}")
        there = [token for token, _ in self._delivered]
        if kept and kept != there[: len(kept)]:
            self._broken(f"keeps {kept}, but was given {there}")
        if kept and len(kept) != len(there):
            self._void = True
        if params["max_tokens"] != self._most - len(kept):
            self._broken(f"asks for {params['max_tokens']} tokens after {len(kept)} of {self._most}")
        if params["seed"] in self._seeds and kept:
            self._broken("draws the same random numbers again")
        self._seeds.add(params["seed"])

    def take(self, piece: Piece) -> None:
        """New tokens are delivered."""
        at = len(self._delivered)
        if piece.start not in (0, at) and not (piece.start < at and self._void):
            self._broken(f"is given tokens at {piece.start} after {at}")
        del self._delivered[piece.start :]
        self._void = False
        logprobs = piece.logprobs or []
        for token, logprob in zip(piece.token_ids, logprobs, strict=True):
            sampled = self.job.world.sampled.pop(token, None)
            if sampled is None:
                self._broken(f"is given token {token}, which was given before or never sampled")
                return
            if sampled.at_s > self._fenced.get(sampled.route, sampled.at_s):
                engine, incarnation = sampled.route
                self._broken(f"goes on at {engine}.{incarnation}, whose route its client was told to leave")
            if sampled.logprob != logprob:
                self._broken(f"is given token {token} with logprob {logprob}, not {sampled.logprob}")
            last = self._delivered[-1][1] if self._delivered else None
            follows = last is not None and last.request == sampled.request
            if sampled.place != (last.place + 1 if follows and last is not None else 0):
                self._broken(f"is given token {token} from place {sampled.place} of {sampled.request}")
            self._delivered.append((token, sampled))

    def end(self, turn: Turn, *, whole: bool) -> None:
        """The turn is over."""
        given = [token for token, _ in self._delivered]
        if turn.token_ids != given[: len(turn.token_ids)] or (whole and turn.token_ids != given):
            self._broken(f"ends with {turn.token_ids}, but was given {given}")
            return
        if turn.logprobs != [sampled.logprob for _, sampled in self._delivered[: len(turn.token_ids)]]:
            self._broken("ends with other logprobs than it was given")
        if whole and len(given) != self._most:
            self._broken(f"is complete with {len(given)} of {self._most} tokens")
        at = 0
        for version, start, end in turn.versions:
            if start < at or end > len(given) or start >= end:
                self._broken(f"has spans {turn.versions} over {len(given)} tokens")
                return
            at = end
            for token, sampled in self._delivered[start:end]:
                if str(sampled.version) != version and not self.job.judge.is_excused(sampled):
                    self._broken(f"says {version} of token {token}, which {sampled.version} has sampled")
        told = sum(end - start for _, start, end in turn.versions)
        if whole and told != len(given):
            self._broken(f"is complete, and says the version of {told} of its {len(given)} tokens")
        if whole and self.job.plan.same and len({version for version, _, _ in turn.versions}) > 1:
            self._broken(f"is complete with the versions {turn.versions}")

    def _broken(self, what: str) -> None:
        self.job.judge.broken("S11", f"turn {self.name} {what}")
