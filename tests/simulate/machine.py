"""Engines as they really are: processes on machines that hold weights and sample tokens, and calls to them.

This is the ground truth that everything is judged by. A token is unique in the whole run, so one that is
delivered twice, lost, moved or taken from other weights shows. The agent's part is the model of the
exhaustive search (`tests.search`); what an engine holds is a value inside of it.
"""

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from relight.agents.replay.speech import Errand
from relight.agents.replay.stream import Interrupted
from relight.agents.replay.turn import End
from relight.agents.replay.wire import Chunk, Scored, ScoredChunk, ScoredContent, ScoredDelta, VersionSpan
from relight.events.ids import EngineName
from relight.events.version import Version
from tests.search.agent import Agent, Process
from tests.simulate.flow import running
from tests.simulate.kernel import Kernel, Task, parked
from tests.simulate.slot import Slot

if TYPE_CHECKING:
    from tests.simulate.world import Job

CONNECT_S = 5.0
"""A machine that answers nothing at all is found out after that."""


class Sampled(NamedTuple):
    """A token as it was sampled."""

    request: str
    place: int
    """In its request's output."""
    logprob: float
    version: Version
    """Of the weights that really sampled it."""
    route: tuple[EngineName, int]
    """The engine and its incarnation."""
    at_s: float


class Machine:
    """A node's hardware and network, shared by all jobs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cut = False
        """No packet comes through, to or from it."""


class Engine:
    """One slot of a job: every process that was ever started there, and the calls on them."""

    def __init__(self, job: "Job", machine: Machine, lives: Slot) -> None:
        self.job = job
        self.machine = machine
        self.lives = lives
        self.name: EngineName = lives.engine
        self.agent = Agent(up=False)
        self.hung = 0
        """The incarnation whose core stands still."""
        self.paused = 0
        """The incarnation that a stranger has paused."""
        self.requests: dict[str, Request] = {}
        self.cut_off_on: dict[int, int] = {}
        """By incarnation, the server's life in which a push to it was cut off."""
        self._held: list[Flight] = []
        """Calls that have ended while no packet came through."""

    def put(self, agent: Agent) -> None:
        """What the agent and its processes are from now on."""
        self.agent = agent
        self.job.judge.engine(self)
        if self.requests:
            self._look_after_requests()

    def judged(self) -> Agent:
        """The agent as the rules see it. Who takes over on another bus forgets the sync that was open there,
        and with it what it was cut off in (S4): what was pushed whole since then counts.
        """
        now = self.job.world.generation
        if all(self.cut_off_on.get(each.incarnation, now) == now for each in self.agent.processes):
            return self.agent
        processes = tuple(
            each._replace(cut_off=each.cut_off and self.cut_off_on.get(each.incarnation, now) == now)
            for each in self.agent.processes
        )
        return self.agent._replace(processes=processes)

    def process(self, incarnation: int) -> Process | None:
        return next((each for each in self.agent.processes if each.incarnation == incarnation), None)

    def present(self) -> Process | None:
        """The newest process that is alive."""
        return next((each for each in reversed(self.agent.processes) if each.alive), None)

    def generates(self, incarnation: int) -> bool:
        here = self.process(incarnation)
        return (
            here is not None
            and here.alive
            and here.serves
            and here.weights is not None
            and incarnation not in (self.hung, self.paused)
        )

    def at(self, address: str) -> Process | None:
        """Who listens there."""
        return next(
            (each for each in self.agent.processes if each.alive and self.lives.address(each) == address),
            None,
        )

    def _look_after_requests(self) -> None:
        for request in list(self.requests.values()):
            here = self.process(request.incarnation)
            if here is None or not here.alive:
                request.flight.broken(Interrupted(End.RESET, "its engine ended"))
                self._ends(request)
            elif request.waiting and self.generates(request.incarnation):
                request.waiting = False
                self.job.kernel.after(self.job.plan.token_s, self._samples, request)

    def _ends(self, request: "Request") -> None:
        del self.requests[request.name]
        if self.machine.cut:
            self._held.append(request.flight)

    def flush(self) -> None:
        """Packets come through again."""
        for request in self.requests.values():
            request.flight.flush()
        for flight in self._held:
            flight.flush()
        self._held.clear()

    def abort_all(self, incarnation: int) -> None:
        """A pause that aborts what runs."""
        for request in list(self.requests.values()):
            if request.incarnation == incarnation:
                request.flight.bring(_last("abort", request))
                self._ends(request)

    def hang_up(self, client: str) -> None:
        """A client's connections end with it."""
        for name in [name for name in self.requests if name.startswith(client)]:
            del self.requests[name]

    def take(self, request: "Request") -> None:
        self.requests[request.name] = request
        self.job.kernel.after(self.job.plan.token_s, self._samples, request)

    def _samples(self, request: "Request") -> None:
        if self.requests.get(request.name) is not request:
            return
        here = self.process(request.incarnation)
        if here is None or not self.generates(request.incarnation):
            request.waiting = True
            return
        assert here.weights is not None
        token, logprob = self.job.world.sample(request, here.weights)
        request.count(str(here.label) if here.label is not None else "default")
        done = len(request.spans) > 0 and request.made >= request.most
        chunk = _token(token, logprob, request, done)
        request.flight.bring(chunk)
        if done:
            self._ends(request)
        if not done:
            self.job.kernel.after(self.job.plan.token_s, self._samples, request)


class Request:
    """One call under way."""

    def __init__(
        self, name: str, engine: EngineName, incarnation: int, *, most: int, flight: "Flight"
    ) -> None:
        self.name = name
        self.route = engine, incarnation
        self.incarnation = incarnation
        self.most = most
        self.flight = flight
        self.made = 0
        self.waiting = False
        self.spans: list[VersionSpan] = []

    def count(self, label: str) -> None:
        """One more token, sampled under `label`."""
        last = self.spans[-1] if self.spans else None
        self.made += 1
        if last is not None and last.version == label:
            self.spans[-1] = VersionSpan(label, last.start, self.made)
        else:
            self.spans.append(VersionSpan(label, self.made - 1, self.made))


def _token(token: int, logprob: float, request: Request, done: bool) -> Chunk:
    delta = ScoredDelta(
        index=0,
        token_ids=[token],
        logprobs=ScoredContent([Scored(token, logprob)]),
        finish_reason="length" if done else None,
        weight_versions=list(request.spans) if done else None,
    )
    return ScoredChunk(choices=[delta], request_id=request.name)


def _last(reason: str, request: Request) -> Chunk:
    return ScoredChunk(choices=[ScoredDelta(index=0, token_ids=[], finish_reason=reason)])


class Words:
    """The speech of a client here: a `relight.agents.replay.speech.Speech` without bytes."""

    def __init__(self, job: "Job") -> None:
        self._job = job

    def flight(self, *, idle_s: float | None) -> "Flight":
        return Flight(self._job.world.flight_serial(), idle_s=idle_s)

    async def send(self, flight: "Flight", errand: Errand) -> None:
        web: Any = errand.http
        await flight.open(web, errand)

    def names(self, request_id: str) -> list[str]:
        return [request_id]


class Web:
    """What `aiohttp.ClientSession` is to a client: the way to the engines of its job."""

    def __init__(self, job: "Job") -> None:
        self.job = job
        self.kernel: Kernel = job.kernel

    def find(self, address: str) -> tuple[Engine, Process | None] | None:
        """The engine whose machine has that address, and who listens there."""
        for engine in self.job.engines:
            if address.startswith(engine.lives.site):
                return engine, engine.at(address)
        self.job.judge.broken("S12", f"a call goes to {address}, which is no engine of the job")
        return None

    def post(self, url: str, json: dict[str, Any]) -> "_Post":
        return _Post(self, url, json["request_ids"])


class _Post:
    """`POST /abort_requests`."""

    status = 200

    def __init__(self, web: Web, url: str, names: list[str]) -> None:
        self._web = web
        self._url = url
        self._names = names

    async def __aenter__(self) -> "_Post":
        task = running(self._web.kernel)
        self._web.kernel.after(0.001, task.wake, task.turn)
        await parked()
        found = self._web.find(self._url.removesuffix("/abort_requests"))
        if found is None or found[1] is None or found[0].machine.cut:
            raise OSError("connection refused")
        for name in self._names:
            found[0].requests.pop(name, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class Flight:
    """`relight.agents.replay.stream.Flight` without its bytes: one call, which may be cut at any moment."""

    def __init__(self, serial: int, *, idle_s: float | None) -> None:
        self.request_id: str | None = None
        self.bound = False
        self._idle_s = idle_s
        self._serial = serial
        self._ready: deque[Chunk] = deque()
        self._error: Interrupted | None = None
        self._waits: tuple[Task, int] | None = None
        self._web: Web | None = None
        self._engine: Engine | None = None
        self._name = ""

    def __hash__(self) -> int:
        return self._serial  # sets of flights are gone through in an order that the seed gives

    async def open(self, web: Web, errand: Errand) -> None:
        """Send the request; raises Interrupted."""
        self._web = web
        self._name = errand.request_id
        if errand.after_s > 0.0:
            await self._wait(errand.after_s)
        web.job.world.asked(self._name, errand.ask.token_ids, errand.ask.sampling_params)
        found = web.find(errand.address)
        reached = found is not None and not found[0].machine.cut
        await self._wait(web.job.random.uniform(0.0005, 0.003) if reached else CONNECT_S)
        found = web.find(errand.address)
        if found is None or found[1] is None or not reached:
            raise Interrupted(End.REFUSED, f"{errand.address}: connection refused")
        self._engine = found[0]
        most = errand.ask.sampling_params["max_tokens"]
        found[0].take(Request(self._name, found[0].name, found[1].incarnation, most=most, flight=self))

    async def read(self) -> list[Chunk]:
        """What came since; raises Interrupted."""
        while self._error is None and not self._ready:
            await self._wait(self._idle_s, Interrupted(End.IDLE, "no byte"))
        if self._error is not None:
            raise self._error
        chunks = list(self._ready)
        self._ready.clear()
        self.request_id = self._name
        return chunks

    async def finish(self, within_s: float) -> None:
        return None

    def close(self) -> None:
        """Let go of the call; the engine forgets one that was not finished."""
        if self._engine is not None:
            self._engine.requests.pop(self._name, None)

    async def _wait(self, seconds: float | None, otherwise: Interrupted | None = None) -> None:
        assert self._web is not None
        kernel = self._web.kernel
        task = running(kernel)
        self._waits = task, task.turn
        if seconds is not None:
            if otherwise is None:
                kernel.after(seconds, task.wake, task.turn)
            else:
                kernel.after(seconds, task.fail, task.turn, otherwise)
        try:
            await parked()
        finally:
            self._waits = None

    def _wake(self) -> None:
        if self._waits is not None and self._web is not None:
            task, turn = self._waits
            if self._error is not None:
                self._web.kernel.soon(task.fail, turn, self._error)
            else:
                self._web.kernel.soon(task.wake, turn)

    def bring(self, chunk: Chunk) -> None:
        """A chunk has come, unless nothing comes through."""
        self._ready.append(chunk)
        if self._engine is not None and not self._engine.machine.cut:
            self._wake()

    def flush(self) -> None:
        """Packets come through again."""
        if self._ready or self._error is not None:
            self._wake()

    def broken(self, error: Interrupted) -> None:
        """The connection ended, unless nothing comes through."""
        if self._error is None:
            self._error = error
            if self._engine is not None and not self._engine.machine.cut:
                self._wake()

    def cut(self, end: End, detail: str) -> None:
        """End it now, as a fence does."""
        if self._error is None:
            self._error = Interrupted(end, detail)
        self._wake()
