"""The parts of the verl adapter by themselves, against verl 0.9.1's own classes where these are called."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relight.agents.adapters.verl import answers, ledger, receiver, refusals, settings, slot
from relight.agents.adapters.verl.arrival import at_import
from relight.agents.adapters.verl.balancer import LoadBalancer
from relight.agents.adapters.verl.bundle import Life
from relight.agents.adapters.verl.ledger import Kept, Ledger
from relight.agents.adapters.verl.outliving import Outliving
from relight.agents.adapters.verl.pool import Pool
from relight.agents.adapters.verl.session import Session
from relight.agents.adapters.verl.steward import steward_class
from relight.agents.replay.route import Wanted
from relight.events import codec
from relight.events.bus.embedded import Embedded
from relight.events.decisions import RouteAdded, RouteFenced
from relight.events.errors import UsageError
from relight.events.facts import ReleaseRequested
from relight.events.ids import DecisionId, EngineName, NodeName
from relight.events.schema import EngineState
from relight.events.values import Phase
from tests.replay_job import E0, E1, JOB, V1, orchestrator
from tests.verl_named import named

pytestmark = pytest.mark.anyio
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed (see docs/verl.md)")
quietly = pytest.mark.filterwarnings("ignore")
"""verl, Ray and hydra warn as they are imported."""


class Dead(Exception):
    """Of a core."""


# --- routes and the load balancer ---------------------------------------------------------------------


def added(engine: EngineName, incarnation: int) -> RouteAdded:
    return RouteAdded(
        id=DecisionId("1-1"),
        epoch=1,
        reason="test",
        engine=engine,
        incarnation=incarnation,
        address=f"http://10.0.0.1:{8000 + 10 * incarnation + int(engine[1:])}",
        version=V1,
    )


def fenced(engine: EngineName, incarnation: int) -> RouteFenced:
    head: dict[str, Any] = {"id": DecisionId("1-2"), "epoch": 1, "reason": "test"}
    return RouteFenced(engine=engine, incarnation=incarnation, **head)


def picked(pool: Pool, session: str | None = None) -> str | None:
    route = pool.pick(Wanted(session=session))
    return None if route is None else f"{route.key.engine}.{route.key.incarnation}"


def test_what_verl_says_of_an_incarnation_that_is_gone_touches_no_later_one() -> None:
    pool = Pool(lambda _: True)
    pool.apply(added(E0, 1))
    assert picked(pool) == picked(pool) == "e0.1"
    pool.apply(fenced(E0, 1))
    assert picked(pool) is None
    pool.apply(added(E0, 2))
    assert picked(pool) == "e0.2"
    pool.done("e0.1")
    pool.done("e0.1")
    pool.done("e0.1")
    assert pool.servers["e0.2"].in_flight == 1
    assert not pool.take_out("e0.1") and picked(pool) == "e0.2"
    assert pool.take_out("10.0.0.1:8020") and picked(pool) is None
    pool.apply(added(E0, 3))
    assert picked(pool) == "e0.3"


def test_a_session_stays_others_go_where_least_is_under_way_and_strange_engines_get_nothing() -> None:
    pool = Pool({E0, E1}.__contains__)
    for engine in (E0, E1, EngineName("e2")):
        pool.apply(added(engine, 1))
    first = picked(pool, "s")
    assert [picked(pool, "s") for _ in range(3)] == [first] * 3
    other = ({"e0.1", "e1.1"} - {first}).pop()
    assert [picked(pool) for _ in range(4)] == [other] * 4
    assert pool.unstick() == 1
    pool.take_out("e0.1")
    assert picked(pool) == "e1.1"
    pool.put_back(E0)
    assert picked(pool) == "e0.1" if first == "e0.1" else "e1.1"


class Handle:
    """In the place of a steward's actor handle."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.relight_engine = SimpleNamespace(remote=self._engine)

    async def _engine(self) -> str:
        return self.engine


def balancer(url: str, **changes: Any) -> LoadBalancer:
    config = {"router_class": settings.ROUTER, "job": JOB, "bus": url, "node_file": "/n.toml", **changes}
    return LoadBalancer({"10.0.0.1:1": Handle("e0"), "10.0.0.1:2": Handle("e1")}, config)


async def test_calls_of_an_empty_pool_wait_for_a_route_and_no_longer_than_they_are_to(
    server: Embedded,
) -> None:
    async with orchestrator(server.url) as mind:
        empty = balancer(server.url, wait_s=0.2)
        with pytest.raises(RuntimeError, match=r"No available servers in load balancer.*0.2 s"):
            await empty.acquire_server("r1")
        waiting = balancer(server.url)
        call = asyncio.create_task(waiting.acquire_server("r1"))
        assert await waiting.get_all_servers() == []
        await mind.route(E0, 2, 9000)
        name, handle = await call
        assert (name, handle.engine) == ("e0.2", "e0")
        assert (await waiting.get_status())["servers"] == {"e0.2": 1}
        await mind.fence(E0, 2)
        await mind.route(E1, 1, 9001)
        assert (await waiting.acquire_server("r1"))[0] == "e1.1"
        await waiting.release_server("e0.2", "r1")
        assert await waiting.get_total_inflight() == 1
        with pytest.raises(UsageError, match="no replica of relight's"):
            await waiting.add_servers({"h:1": SimpleNamespace()})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bsu": "redis://x"}, "unknown field `bsu`"),
        ({"job": "No Slug"}, "job"),
        ({"wait_s": 0}, "wait_s 0.0 must be"),
        ({"max_engine_failures": 0}, "at least 1"),
        ({"router_class": "a.B"}, "router_class is 'a.B'"),
    ],
)
def test_a_wrong_setting_is_told_with_its_name(changes: dict[str, Any], told: str) -> None:
    raw = {"router_class": settings.ROUTER, "job": "j", "node_file": "/n.toml", **changes}
    with pytest.raises(UsageError, match=told) as error:
        settings.read(raw, where="router.yaml")
    assert "router.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("why", "asked"), [("its restarts are used up", True), (slot.BY_OPERATOR, False), (None, False)]
)
async def test_a_replica_that_comes_asks_for_an_engine_that_was_given_up_but_not_against_an_operator(
    server: Embedded, why: str | None, asked: bool
) -> None:
    async with orchestrator(server.url) as mind:
        phase = Phase.BACKOFF if why is None else Phase.RETIRED
        state = EngineState(phase=phase, node=NodeName("a"), incarnation=5, retired_because=why)
        await mind.commit(state=dict([codec.encode_engine(E0, state)]))
        raw = {"job": JOB, "bus": server.url, "node_file": "/n.toml"}
        await slot.wanted_again(settings.read(raw, where="router.yaml"), E0)
        facts = await mind.job.tail(mind.job.keys.facts, count=5)
        assert [codec.decode_fact(each) for each in facts] == [ReleaseRequested(engine=E0)] * asked


# --- tokens that outlive their engine -----------------------------------------------------------------


async def test_the_ledger_has_every_token_of_a_writer_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e0.ledger"
    monkeypatch.setattr(ledger, "COMPACT_BYTES", 2000)
    book = Ledger(path)
    for name in ("a", "b", "done"):
        book.begin(name)
    for number in range(200):
        book.add("a", [number], [-0.5])
        book.add("b", [number, number], None)
        await asyncio.sleep(0)
    book.end("done", None)
    await asyncio.sleep(0)
    assert path.stat().st_size < 12_000
    with path.open("ab") as torn:
        torn.write(b"\xff\x00\x00\x00half")
    kept = ledger.read(path)
    assert set(kept) == {"a", "b", "done"}
    assert kept["a"] == Kept(tokens=list(range(200)), logprobs=[-0.5] * 200)
    assert kept["b"].tokens[-2:] == [199, 199] and kept["b"].logprobs is None
    book.close()


async def test_what_has_ended_is_kept_until_its_answer_must_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e0.ledger"
    book = Ledger(path)

    async def ends(request: str, tokens: list[int], finish: str | None) -> dict[str, Kept]:
        book.begin(request)
        book.add(request, tokens, None)
        book.end(request, finish)
        await asyncio.sleep(0)
        return ledger.read(path)

    await ends("whole", [1, 2], "stop")
    cut, whole = Kept(tokens=[3], ended=True), Kept(tokens=[1, 2], ended=True, finish="stop")
    assert await ends("cut", [3], None) == {"whole": whole, "cut": cut}

    # A file that grows keeps both; a name that is used again has its new tokens alone.
    monkeypatch.setattr(book, "_most", 0)
    kept = await ends("whole", [4], None)
    assert kept == {"whole": Kept(tokens=[4], ended=True), "cut": cut}
    monkeypatch.setattr(ledger, "ANSWERED_S", -1.0)
    book.begin("live")
    monkeypatch.setattr(book, "_most", 0)
    assert await ends("last", [5], "length") == {"live": Kept()}
    book.close()


class Engine:
    """AsyncLLM's `generate`, which dies behind its outputs."""

    def __init__(self, outputs: list[Any], error: Exception | None) -> None:
        self.outputs = outputs
        self.error = error
        self.output_processor = "reached"

    async def generate(self, **_: Any) -> AsyncIterator[Any]:
        for output in self.outputs:
            yield output
        if self.error is not None:
            raise self.error


def output(*tokens: int) -> Any:
    """A cumulative one."""
    scores = [{token: SimpleNamespace(logprob=-token / 10)} for token in tokens]
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=list(tokens), logprobs=scores, finish_reason=None)]
    )


async def test_a_death_ends_a_generation_as_an_abort_with_what_there_was(tmp_path: Path) -> None:
    engine = Engine([output(1), output(1, 2)], Dead())
    outliving = Outliving(engine, Ledger(tmp_path / "l"), death=(Dead,))
    assert outliving.output_processor == "reached"
    seen = [each async for each in outliving.generate(request_id="r")]
    assert [each.outputs[0].finish_reason for each in seen] == [None, None, "abort"]
    assert seen[-1].outputs[0].token_ids == [1, 2] and outliving.cut_off == {"r"}
    await asyncio.sleep(0)
    assert ledger.read(tmp_path / "l")["r"].tokens == [1, 2], "the answer may die with the server"
    engine.outputs = []
    assert [each.outputs async for each in outliving.generate(request_id="q")] == [[]]
    engine.error = ValueError("the request's own")
    with pytest.raises(ValueError, match="own"):
        _ = [each async for each in outliving.generate(request_id="p")]


@needs_verl
@quietly
@pytest.mark.parametrize(
    ("params", "routed", "kept"),
    [
        ({"max_tokens": 9, "repetition_penalty": 1.0}, False, [3, 4]),
        ({"presence_penalty": 0.5}, False, []),
        ({"structured_outputs": {}}, False, []),
        ({}, True, []),
    ],
)
def test_tokens_that_could_not_be_continued_exactly_are_left_out(
    params: dict[str, Any], routed: bool, kept: list[int]
) -> None:
    cut = answers.cut_off(Kept(tokens=[3, 4], logprobs=[-1.0, -2.0]), steps=7)
    answer = answers.continuable(cut, params, routed=routed)
    assert answer.token_ids == kept and answers.died(answer) and answer.stop_reason == "aborted"
    assert answer.extra_fields["global_steps"] == 7


@needs_verl
@quietly
@pytest.mark.parametrize(
    ("finish", "routed", "stop_reason"),
    [
        ("stop", False, "completed"),
        ("length", False, "completed"),
        ("repetition", False, "repetition"),
        ("abort", False, "aborted"),
        (None, False, "aborted"),
        ("stop", True, "aborted"),
    ],
)
def test_an_answer_that_was_lost_is_given_as_far_as_it_is_whole(
    finish: str | None, routed: bool, stop_reason: str
) -> None:
    kept = Kept(tokens=[3, 4], logprobs=[-1.0, -2.0], finish=finish)
    lost = answers.lost(kept, steps=7, routed=routed)
    assert (lost.token_ids, lost.log_probs, lost.stop_reason) == ([3, 4], [-1.0, -2.0], stop_reason)
    assert answers.died(lost) is (stop_reason == "aborted") and lost.extra_fields["global_steps"] == 7
    answer = answers.continuable(lost, {}, routed=routed)
    assert answer.token_ids == ([] if routed else [3, 4]), "without its routing records it is made again"


# --- verl's own server and clients --------------------------------------------------------------------


@needs_verl
@quietly
@pytest.mark.vllm
async def test_verls_own_vllm_server_answers_an_engine_death_with_the_tokens_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLMHttpServer.generate as it stands, over an engine that raises vLLM's EngineDeadError."""
    monkeypatch.syspath_prepend(str(named(tmp_path / "named")))
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.v1.engine.exceptions import EngineDeadError

    from relight.agents.adapters.verl.server import Place, deaths, server_class

    server_of = server_class(vLLMHttpServer)
    server = server_of.__new__(server_of)
    server.__dict__ |= {
        "_disaggregation_role": "null",
        "_submission_paused": False,
        "_admitting": 0,
        "global_steps": 4,
        "replica_rank": 0,
        "relight": Place(1, ""),
        "config": Config(
            max_model_len=100, full_determinism=False, enable_rollout_routing_replay=False, mtp=None
        ),
        "model_config": Config(processor=None, lora_rank=0, lora={}),
        "engine": Outliving(
            Engine([output(5), output(5, 6)], EngineDeadError()), Ledger(tmp_path / "l"), death=deaths()
        ),
    }
    answer = await server.generate([1, 2], {"max_tokens": 8, "logprobs": True}, "r")
    assert (answer.token_ids, answer.log_probs, answer.stop_reason) == ([5, 6], [-0.5, -0.6], "aborted")
    assert answers.died(answer) and answer.extra_fields["global_steps"] == 4
    assert server._admitting == 0 and not server.engine.cut_off


class Config(SimpleNamespace):
    """Fields that can be asked for with a default, as verl's configs can."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Servers:
    """A load balancer and its servers, whose answers the test gives."""

    def __init__(self, *given: Any) -> None:
        self.given = list(given)
        self.asked: list[tuple[list[int], int]] = []
        self.released = 0
        self.handle = SimpleNamespace(generate=SimpleNamespace(remote=self.generate))
        nothing = SimpleNamespace(remote=self.nothing)
        self.balancer = SimpleNamespace(
            acquire_server=SimpleNamespace(remote=self.acquire),
            release_server=SimpleNamespace(remote=self.release),
            require_acquire_fields=nothing,
            require_release_fields=nothing,
        )

    async def nothing(self) -> list[str]:
        return []

    async def acquire(self, **_: Any) -> tuple[str, Any]:
        return "e0.1", self.handle

    def release(self, **_: Any) -> None:
        self.released += 1

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        self.asked.append((prompt_ids, sampling_params.pop("max_tokens")))
        return self.given.pop(0)


def replaying(asked: str, servers: Servers, tmp_path: Path, *, wait_s: float = 300.0, **config: Any) -> Any:
    from omegaconf import OmegaConf
    from verl.workers.rollout import llm_server

    from relight.agents.adapters.verl.clients import client_class

    path = tmp_path / "router.yaml"
    path.write_text(f"router_class: {settings.ROUTER}\njob: j\nnode_file: /n.toml\nwait_s: {wait_s}\n")
    rollout = {"router_config_path": str(path), "name": "vllm", "response_length": 50}
    whole = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, **config})
    made = client_class(llm_server, getattr(llm_server, asked))
    return made(config=whole, load_balancer_handle=servers.balancer)


def told(*tokens: int, stop: str = "completed", died: bool = False) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    extra = {"global_steps": 1, **({"relight_engine_died": True} if died else {})}
    scores = [-1.0] * len(tokens)
    return TokenOutput(token_ids=list(tokens), log_probs=scores, stop_reason=stop, extra_fields=extra)


@needs_verl
@quietly
async def test_a_plain_client_does_a_turn_whose_engine_died_once_more_whole(tmp_path: Path) -> None:
    servers = Servers(told(1, 2, stop="aborted", died=True), told(1, 2, 3))
    client = replaying("LLMServerClient", servers, tmp_path)
    params = {"max_tokens": 9}
    answer = await client.generate("r", prompt_ids=[7], sampling_params=params)
    assert answer.token_ids == [1, 2, 3] and servers.asked == [([7], 9), ([7], 9)]
    assert params == {"max_tokens": 9} and servers.released == 2
    aborted = Servers(told(1, stop="aborted"))
    answer = await replaying("LLMServerClient", aborted, tmp_path).generate(
        "r", prompt_ids=[7], sampling_params=dict(params)
    )
    assert answer.stop_reason == "aborted", "an abort by a sync is verl's own affair"
    poison = Servers(*[told(stop="aborted", died=True) for _ in range(3)])
    with pytest.raises(RuntimeError, match="3 deaths of engines"):
        await replaying("LLMServerClient", poison, tmp_path).generate(
            "r", prompt_ids=[7], sampling_params=dict(params)
        )


@needs_verl
@quietly
async def test_a_call_that_met_no_engine_is_no_death_and_is_asked_again(tmp_path: Path) -> None:
    death = told(1, stop="aborted", died=True)
    servers = Servers(death, *[answers.nothing() for _ in range(9)], death, told(1, 2, 3))
    client = replaying("LLMServerClient", servers, tmp_path)
    answer = await client.generate("r", prompt_ids=[7], sampling_params={"max_tokens": 9})
    assert answer.token_ids == [1, 2, 3] and len(servers.asked) == 12

    class Never(Servers):
        async def generate(self, **_: Any) -> Any:
            await asyncio.sleep(0.001)
            return answers.nothing()

    never = Never()
    client = replaying("LLMServerClient", never, tmp_path, wait_s=0.01)
    with pytest.raises(RuntimeError, match=r"met no engine for 0\.01 s"):
        await client.generate("r", prompt_ids=[7], sampling_params={"max_tokens": 9})


@needs_verl
@quietly
@pytest.mark.parametrize("told_by", ["the actor's death", "its own answer"])
async def test_a_death_is_answered_once_the_agent_has_proven_it(tmp_path: Path, told_by: str) -> None:
    """Until then a route may lead there: whoever asks again at once would meet the same death."""
    import ray

    class Engine:
        met = 0

        async def remote(self, *_: Any, **__: Any) -> Any:
            self.met += 1
            await asyncio.sleep(0)
            if told_by == "its own answer":
                return told(5, stop="aborted", died=True)
            raise ray.exceptions.ActorDiedError

    (tmp_path / "router.yaml").write_text(f"router_class: {settings.ROUTER}\njob: j\nnode_file: /n.toml\n")
    own = steward_class(type("Server", (), {}))
    one = own(config=Config(router_config_path=str(tmp_path / "router.yaml")), replica_rank=0)
    book = Ledger(tmp_path / "1.ledger")
    book.begin("r")
    book.add("r", [5], [-1.0])
    book.close()
    engine = Engine()
    life = Life(1, SimpleNamespace(generate=engine), 1, "h", 1, tmp_path / "1.ledger")
    one._begin(life)
    first = asyncio.create_task(one.generate([7], {}, "r"))
    while not life.died:
        await asyncio.sleep(0)
    second = asyncio.create_task(one.generate([7], {}, "s"))
    await asyncio.wait([first, second], timeout=0.1)
    assert not first.done() and not second.done() and engine.met == 1
    one._end(1)
    cut, none = await asyncio.wait_for(asyncio.gather(first, second), 5.0)
    assert (cut.token_ids, answers.died(cut), answers.met_none(cut)) == ([5], True, False)
    assert answers.met_none(none) and none.token_ids == []
    assert answers.met_none(await one.generate([7], {}, "t")) and engine.met == 1


@needs_verl
@quietly
def test_two_jobs_of_one_name_on_one_machine_write_apart(tmp_path: Path) -> None:
    def order(incarnation: int) -> Any:
        return SimpleNamespace(engine="e0", incarnation=incarnation)

    def steward_of(state: str) -> Any:
        node, router = tmp_path / f"{state}.toml", tmp_path / f"{state}.yaml"
        node.write_text(
            f"""job = "j"\nnode = "a"\nstate_dir = "{tmp_path / state}"\n"""
            """[[engines]]\nname = "e0"\nlauncher = "delegated"\ncommand = ["x"]\n"""
        )
        router.write_text(f"router_class: {settings.ROUTER}\njob: j\nnode_file: {node}\n")
        own = steward_class(type("Server", (), {}))
        return own(config=Config(router_config_path=str(router)), replica_rank=0)

    one, two = steward_of("one"), steward_of("two")
    paths = [one._ledger_of(order(incarnation)) for incarnation in (1, 2)]
    assert two._ledger_of(order(1)) not in paths
    for path in paths:
        path.touch()
    newest = one._ledger_of(order(3))
    assert [path.exists() for path in (*paths, newest)] == [False, True, False]


@needs_verl
@quietly
async def test_verls_fully_async_client_resumes_behind_the_kept_tokens(tmp_path: Path) -> None:
    servers = Servers(told(1, 2, stop="aborted", died=True), told(3))
    client = replaying("FullyAsyncLLMServerClient", servers, tmp_path)
    answer = await client.generate("r", prompt_ids=[7], sampling_params={"max_tokens": 9})
    assert answer.token_ids == [1, 2, 3] and answer.log_probs == [-1.0] * 3
    assert servers.asked == [([7], 9), ([7, 1, 2], 7)]


@needs_verl
@quietly
async def test_without_partial_rollout_the_fully_async_client_replays_whole_turns(tmp_path: Path) -> None:
    servers = Servers(told(1, 2, stop="aborted", died=True), told(1, 2, 3))
    client = replaying(
        "FullyAsyncLLMServerClient", servers, tmp_path, async_training={"partial_rollout": False}
    )
    answer = await client.generate("r", prompt_ids=[7], sampling_params={"max_tokens": 9})
    assert answer.token_ids == [1, 2, 3] and servers.asked == [([7], 9), ([7], 9)]


# --- weights ------------------------------------------------------------------------------------------


class Broadcast:
    """What a checkpoint engine yields; counts what was received."""

    def __init__(self) -> None:
        self.received = 0

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, int]]:
        for number in range(5):
            self.received += 1
            yield f"w{number}", number


class Adapter:
    """Takes so many weights, and fails then if it is to."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.server_handle: object = "of the last incarnation"
        self.zmq_handle = ""
        self._delta_weight_transfer_engine_initialized = True

    async def update_weights(self, weights: Any, **_: Any) -> None:
        taken = 0
        async for _name, _tensor in weights:
            taken += 1
            if taken == self.takes:
                raise TimeoutError("no bucket is read")


class Base:
    """The part of verl's CheckpointEngineWorker that ours builds on."""

    def __init__(self, rollout_config: Any, adapter: Adapter) -> None:
        self.rollout_config = rollout_config
        self.checkpoint_engine = Broadcast()
        self.server_adapter = adapter


@needs_verl
@quietly
async def test_a_receiver_whose_engine_dies_in_a_broadcast_receives_the_rest_for_the_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(f"router_class: {settings.ROUTER}\njob: j\nnode_file: /n.toml\n")
    socket = tmp_path / "s.sock"
    socket.touch()
    adapter = Adapter(2)
    adapter.zmq_handle = f"ipc://{socket}"
    worker = receiver.worker_class(Base)(Config(router_config_path=str(path)), adapter)
    await worker.update_weights(3)
    assert worker.checkpoint_engine.received == 5
    assert worker.relight_outcome() == "TimeoutError: no bucket is read"
    worker.relight_renew()
    assert adapter.server_handle is None and not socket.exists()
    adapter.takes = 0
    await worker.update_weights(3)
    assert worker.relight_outcome() is None


class Trainer:
    """What a session of relight is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def sync(self, step: int) -> None:
        self.told.append(step)

    def boundary(self, step: int, *, phase: str) -> str:
        self.told.append((step, phase))
        return "open"


def test_a_boundary_is_of_the_last_sync_until_the_first_optimizer_step_behind_it() -> None:
    trainer = Trainer()
    session = Session(trainer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="before the first sync"):
        session.boundary()
    session.sync(4)
    session.boundary()
    for _ in range(2):
        session.moved()
        session.boundary()
    session.sync(5)
    session.boundary("eval")
    assert trainer.told == [4, (4, "rollout"), (5, "rollout"), (5, "rollout"), 5, (5, "eval")]


class Boundaries:
    """A session that notes what verl's trainer does in which boundary."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @asynccontextmanager
    async def boundary(self, phase: str = "rollout") -> AsyncIterator[None]:
        self.told.append(f"{phase} opens")
        yield
        self.told.append("closes")

    def moved(self) -> None:
        self.told.append("moved")


@needs_verl
@quietly
async def test_verls_fully_async_trainer_waits_for_samples_inside_a_boundary() -> None:
    """FullyAsyncTrainer's own methods, with relight's around them."""
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer

    from relight.agents.adapters.verl.trainers import fully_async

    actor = fully_async(FullyAsyncTrainer)
    assert actor._default_options == FullyAsyncTrainer._default_options
    plain = actor.__ray_metadata__.modified_class.__ray_actor_class__
    trainer = plain.__new__(plain)
    session = Boundaries()

    async def samples() -> tuple[int, Any]:
        session.told.append("samples")
        return 0, SimpleNamespace(meta_info={"trajectory_param_versions": []})

    async def validates() -> dict[str, float]:
        session.told.append("validates")
        return {}

    rollout = SimpleNamespace(temperature=1.0)
    rollouter = SimpleNamespace(do_validate=SimpleNamespace(remote=validates))
    trainer.__dict__ |= {
        "checkpoint_manager": SimpleNamespace(session=session),
        "rollouter": rollouter,
        "metrics": {},
        "timing_raw": {},
        "local_trigger_step": 1,
        "current_param_version": 2,
        "stale_trajectory_processed": 0,
        "logger": SimpleNamespace(log=lambda **_: None),
        "_get_samples_from_queue": samples,
        "config": SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=rollout),
            async_training=SimpleNamespace(use_trainer_do_validate=False),
            trainer=SimpleNamespace(test_freq=2),
        ),
    }
    batch = await trainer._fit_generate(None)
    assert batch.meta_info["temperature"] == 1.0
    await trainer._fit_validate()
    trainer.local_trigger_step = 2
    await trainer._fit_validate()
    with pytest.raises(AttributeError):
        trainer._update_actor(SimpleNamespace())
    assert session.told == [
        *("rollout opens", "samples", "closes"),
        *("eval opens", "validates", "closes"),
        "moved",
    ]


# --- refusals -----------------------------------------------------------------------------------------


@needs_verl
@quietly
@pytest.mark.parametrize(
    ("check", "change", "names"),
    [
        ("separate", "actor_rollout_ref.hybrid_engine=True", "hybrid_engine=False"),
        ("separate", "actor_rollout_ref.rollout.name=sglang", "name=sglang"),
        ("separate", "actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "backend=naive"),
        ("separate", "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded", "delta_sharded"),
        ("separate", "actor_rollout_ref.rollout.disaggregation.enabled=True", "disaggregation.enabled"),
        (
            "separate",
            "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.grouped.rebuild_group=False",
            "engine_kwargs.grouped.rebuild_group",
        ),
        ("fully", "+async_training.use_trainer_do_validate=True", "use_trainer_do_validate=False"),
        ("fully", "+async_training.use_dynamic_resource_scheduling=True", "use_dynamic_resource_scheduling"),
        ("separate", "", ""),
        ("fully", "", ""),
    ],
)
def test_what_cannot_work_is_refused_by_its_name_in_verls_config(check: str, change: str, names: str) -> None:
    from hydra import compose, initialize_config_module

    grouped()
    overrides = [
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=grouped",
        "+async_training.partial_rollout=True",
        "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.grouped.rebuild_group=True",
    ]
    key = change.partition("=")[0].lstrip("+")
    chosen = [each for each in overrides if each.partition("=")[0].lstrip("+") != key] + (
        [change] * bool(change)
    )
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=chosen)
    called: Callable[[Any], None] = refusals.check_separate if check == "separate" else refusals.check_fully
    if not names:
        called(config)
        return
    with pytest.raises(UsageError, match=names.replace(".", r"\.")):
        called(config)


def grouped() -> None:
    """A checkpoint engine with verl's NCCL engine's parameters: that one needs cupy to be registered."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    class Grouped:
        def __init__(
            self, bucket_size: int, group_name: str = "default", rebuild_group: bool = False
        ) -> None:
            raise AssertionError("never made here")

    CheckpointEngineRegistry._registry["grouped"] = Grouped


# --- taking over --------------------------------------------------------------------------------------


def test_a_module_is_changed_once_it_has_been_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_trainer.py").write_text("class Trainer: kind = 'own'\n")
    (tmp_path / "its_user.py").write_text("from some_trainer import Trainer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def then(module: Any) -> None:
        module.Trainer = type("Trainer", (module.Trainer,), {"kind": "ours"})

    at_import({"some_trainer": then})
    at_import({"some_trainer": then})
    try:
        assert importlib.import_module("its_user").Trainer.kind == "ours"
    finally:
        for name in ("some_trainer", "its_user"):
            sys.modules.pop(name, None)
