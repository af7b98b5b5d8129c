"""The verl adapter's sync and replicas by themselves: verl's own checkpoint manager and replica class, and
stub engines under a real agent and orchestrator. In the place of Ray: handles that call in this process."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from relight.agents.adapters.verl import settings
from relight.agents.adapters.verl.bundle import Bundle, StartWithdrawn
from relight.agents.adapters.verl.handing import Handing
from relight.agents.adapters.verl.ledger import Ledger
from relight.agents.adapters.verl.replica import is_ours, replica_class
from relight.agents.adapters.verl.server import Place
from relight.agents.adapters.verl.session import Managed
from relight.agents.adapters.verl.steward import NoEngine, steward_class
from relight.agents.node.config import Engine
from relight.agents.node.delegated.application import Order
from relight.agents.stub.launch import launch
from relight.agents.stub.tokens import reference, weights_digest
from relight.agents.trainer.fleet import Fleet
from relight.agents.trainer.sync import Left
from relight.events.bus.embedded import Embedded
from relight.events.bus.follow import reached
from relight.events.decisions import RouteAdded
from relight.events.errors import RelightError, UsageError
from relight.events.ids import EngineName
from relight.events.values import Member, Phase
from relight.events.version import Version
from tests.conftest import write_model
from tests.node_support import JOB, engine, kill, node_file, record, role
from tests.weights_rig import Watch, job

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed (see docs/verl.md)"),
    pytest.mark.filterwarnings("ignore"),  # verl, Ray and hydra warn as they are imported
]
E0, E1 = EngineName("e0"), EngineName("e1")
PROMPT = [5, 6, 7]
ROLLOUT = "actor_rollout_ref.rollout"


# --- in the place of Ray ------------------------------------------------------------------------------


class Ref:
    """What a remote call gives: `ray.get` and `await` both have its result."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def get(self) -> Any:
        made = self._make()
        return asyncio.run(made) if asyncio.iscoroutine(made) else made

    def __await__(self) -> Iterator[Any]:
        made = self._make()
        if asyncio.iscoroutine(made):
            return (yield from made.__await__())
        return made
        yield


class Pending(Ref):
    """Of a call that does not return."""


class Handle:
    """An actor's: each call is counted, and made on `actor`; on one that is dead it is Ray's error."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.calls: list[str] = []
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(name)
        method = getattr(self.actor, name)

        def remote(*args: Any, **kwargs: Any) -> Ref:
            self.calls.append(name)
            if name in getattr(self.actor, "pending", ()):
                return Pending(method)
            return Ref(lambda: self._lost() if self.dead else method(*args, **kwargs))

        return SimpleNamespace(remote=remote)

    @staticmethod
    def _lost() -> None:
        from ray.exceptions import ActorDiedError

        raise ActorDiedError


class Raylet:
    """Makes actors, and notes with which options; `kill` is noted, too."""

    NODE = "ab" * 28
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.made: list[tuple[dict[str, Any], Handle]] = []
        self.killed: list[Handle] = []
        self.next = asyncio.Event()
        """Set once an actor is made behind the first one."""

    def remote(self, plain: Any) -> Any:
        def make(options: dict[str, Any], *args: Any, **kwargs: Any) -> Handle:
            actor = Handle(plain(*args, **kwargs, environment=options["runtime_env"]["env_vars"]))
            self.made.append((options, actor))
            if self.loop is not None and len(self.made) > 1:
                self.loop.call_soon_threadsafe(self.next.set)
            return actor

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(
                remote=lambda *args, **kwargs: make(options, *args, **kwargs)
            )
        )

    def kill(self, handle: Handle, *, no_restart: bool) -> None:
        self.killed.append(handle)

    @staticmethod
    def get(refs: Any, timeout: float | None = None) -> Any:
        return [ref.get() for ref in refs] if isinstance(refs, list) else refs.get()

    @staticmethod
    def wait(refs: list[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        pending = [ref for ref in refs if isinstance(ref, Pending)]
        return [ref for ref in refs if ref not in pending], pending

    @staticmethod
    def get_runtime_context() -> Any:
        given = {"env_vars": {"GIVEN_BY_VERL": "1"}}
        return SimpleNamespace(
            get_actor_name=lambda: "vllm_server_0_0", get_node_id=lambda: Raylet.NODE, runtime_env=given
        )


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Raylet:
    import ray
    import verl.checkpoint_engine
    import verl.workers.rollout.replica  # noqa: F401 -- they make actor classes, of the real Ray

    here = Raylet()
    for name in ("get", "wait", "kill", "remote", "get_runtime_context"):
        monkeypatch.setattr(ray, name, getattr(here, name))
    return here


# --- verl's checkpoint manager over replicas of this process ---------------------------------------------


class Steward:
    """What verl and relight ask of a replica's server: of the stub that is there at the moment."""

    def __init__(self, at: Callable[[], Member]) -> None:
        self.at = at

    def post(self, path: str, body: object = None) -> None:
        Fleet([self.at()], within_s=30).post(path, lambda _: body)

    async def relight_engine(self) -> EngineName:
        return self.at().engine

    async def relight_incarnation(self) -> int:
        return self.at().incarnation

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        self.post("/pause?mode=abort")
        return {}

    async def resume_generation(self) -> None:
        self.post("/resume")

    async def release_kv_cache(self) -> None:
        """It has none."""

    resume_kv_cache = release_kv_cache


class Receiver:
    """A replica's checkpoint worker: what the trainer sent is loaded by its engine."""

    def __init__(self, actors: "Actors", steward: Steward) -> None:
        self._actors = actors
        self._steward = steward
        self.outcome: str | None = None

    def execute_checkpoint_engine(self, method: str, *_: Any, **__: Any) -> None:
        """A group's making and end; the trainer's side counts them."""

    def update_weights(self, global_steps: int) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._actors.folder)}}
        if self.outcome is None:
            self._steward.post("/collective_rpc", body)

    def relight_outcome(self) -> str | None:
        return self.outcome


class Actors:
    """verl's worker group of the trainer, of one rank."""

    world_size = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exports: list[int] = []
        self.groups: list[int] = []

    def execute_checkpoint_engine(self, method: list[str], size: Any = None) -> list[Ref]:
        if size is not None:
            self.groups += size
        return [Ref(lambda: None)]

    def update_weights(self, global_steps: int, mode: str) -> list[Ref]:
        self.exports.append(global_steps)
        return [Ref(dict)]


class Transport:
    """A checkpoint engine whose group tells its size."""

    @classmethod
    def build_topology(cls, senders: int, receivers: int, _: Any) -> Any:
        size = senders + receivers
        return {"size": [size] * senders}, {"size": [size] * receivers}


class Replicas:
    """A trainer's checkpoint manager and its replicas, one for each name."""

    def __init__(self, folder: Path, there: dict[EngineName, Callable[[], Member]]) -> None:
        from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
        from verl.workers.rollout.replica import RolloutReplica

        CheckpointEngineRegistry._registry["handed"] = Transport
        self.config = SimpleNamespace(backend="handed", custom_backend_module=None)
        self.actors = Actors(folder)
        stewards = {name: Steward(at) for name, at in there.items()}
        self.stewards = {name: Handle(steward) for name, steward in stewards.items()}
        self.receivers = {name: Handle(Receiver(self.actors, each)) for name, each in stewards.items()}
        own = type("Replica", (RolloutReplica,), {"launch_servers": None})
        replicas: list[Any] = [object.__new__(own) for _ in there]
        for name, replica in zip(there, replicas, strict=True):
            replica.servers, replica.workers = [self.stewards[name]], [self.receivers[name]]
        self.manager = CheckpointEngineManager(self.config, self.actors, replicas)

    def handing(self) -> Handing:
        return Handing(type(self.manager), self.config, self.actors, self.manager.replicas)

    def calls(self, name: EngineName) -> list[str]:
        """Made of a replica, but for the question who it is."""
        made = [*self.stewards[name].calls, *self.receivers[name].calls]
        return [call for call in made if call not in ("relight_engine", "relight_incarnation")]


def none_left(*members: Member) -> Left:
    return Left(members, lambda _: False)


async def test_a_sync_reaches_its_members_as_they_are_named_and_nobody_else(
    raylet: Raylet, tmp_path: Path, stub_model: Path
) -> None:
    with launch(stub_model) as e0, launch(stub_model) as e1:
        first, second = (
            Member(name, 1, f"http://127.0.0.1:{stub.port}") for name, stub in ((E0, e0), (E1, e1))
        )
        new = write_model(tmp_path / "new", seed=3)
        world = Replicas(new, {E0: lambda: first, E1: lambda: second})
        hand, version = world.handing(), Version(7, 3)

        async def sync(*members: Member) -> dict[str, str]:
            return await anyio.to_thread.run_sync(hand, version, members, none_left(*members))

        assert await sync(first) == {}
        assert world.actors.exports == [3] and world.actors.groups == [2], "the trainer and the member"
        assert e0.generate(PROMPT, 8).body["choices"][0]["token_ids"] == made_by(new)
        assert e0.get("/weight_info").body["weight_version"] == str(version)
        assert world.calls(E1) == [], "nobody asks a healthy replica for anything"
        assert e1.generate(PROMPT, 8).body["choices"][0]["token_ids"] == made_by(stub_model)

        # One that is another incarnation by now, and one that no replica is: told, and nothing is exported.
        other, strange = first._replace(incarnation=2), first._replace(engine=EngineName("e9"))
        told = await sync(other, strange)
        assert told == {E0: "incarnation 1 is there, not 2", "e9": "no replica of this trainer fills it"}
        assert world.actors.exports == [3]

        # Beside one that is as it is named: that one gets the weights, the other one is told.
        assert await sync(other, second) == {E0: "incarnation 1 is there, not 2"}
        assert world.actors.exports == [3, 3] and world.actors.groups == [2, 2]

        # One whose engine has not loaded is named, and gets no label.
        world.receivers[E0].actor.outcome = "TimeoutError: no bucket is read"
        version = Version(7, 4)
        assert await sync(first, second) == {E0: "TimeoutError: no bucket is read"}
        assert world.actors.groups[-1] == 3
        labels = [each.get("/weight_info").body["weight_version"] for each in (e0, e1)]
        assert labels == ["7.3", "7.4"]


def made_by(weights: Path) -> list[int]:
    return list(reference(weights_digest(weights), PROMPT, 8)[0])


def router(folder: Path, **more: str) -> str:
    """The path of a router's file."""
    path = folder / "router.yaml"
    given = {"router_class": settings.ROUTER, "job": JOB, "node_file": "/n.toml", **more}
    path.write_text("".join(f"{key}: {value}\n" for key, value in given.items()))
    return str(path)


async def test_a_recovery_hands_over_what_the_last_sync_did_and_waits_behind_an_optimizer_step(
    raylet: Raylet, server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """The session of a verl trainer with verl's manager; the orchestrator says who is to get weights."""
    file = node_file(tmp_path / "state", engine(stub_model), engine(stub_model, name="e1"))

    def there(name: EngineName) -> Callable[[], Member]:
        def now() -> Member:
            known = record(file, name)
            return Member(name, known.incarnation, known.local or "")

        return now

    world = Replicas(write_model(tmp_path / "0", seed=1), {name: there(name) for name in (E0, E1)})
    rollout = SimpleNamespace(router_config_path=router(tmp_path, bus=server.url))
    async with job(server.url, file, recover_at="boundary", restarts=100) as watch:
        with ThreadPoolExecutor(1) as thread:

            async def call(do: Callable[..., Any], *given: Any) -> Any:
                return await asyncio.wrap_future(thread.submit(do, *given))

            trainer = await call(Managed, world.manager, rollout)
            session = trainer.session
            try:
                await call(trainer.update_weights, 0)
                for name in (E0, E1):
                    await watch.routed(name, 1, step=0)
                assert world.actors.groups == [3], "the first sync has all of them"

                # One dies while the trainer waits for samples: it gets the last version, and it alone.
                await call(session.waiting)
                before = world.calls(E1)
                kill(role(file, "core", E0))
                await watch.routed(E0, 2, step=0)
                await call(session.waited)
                assert world.actors.exports == [0, 0] and world.actors.groups == [3, 2]
                assert world.calls(E1) == before

                # Behind an optimizer step the live weights are of no version: the next sync is waited for.
                session.moved()
                await call(session.waiting)
                kill(role(file, "core", E1))
                await started(watch, E1, 2)
                await call(session.waited)
                assert world.actors.exports == [0, 0]
                world.actors.folder = write_model(tmp_path / "1", seed=2)
                await call(trainer.update_weights, 1)
                for name in (E0, E1):
                    await watch.routed(name, 2, step=1)
                assert world.actors.exports == [0, 0, 1] and world.actors.groups == [3, 2, 3]
            finally:
                await call(trainer.finish, None)


async def started(watch: Watch, name: EngineName, incarnation: int) -> None:
    """Return once this incarnation waits for its weights."""
    with anyio.fail_after(60):
        while True:
            state = (await reached(watch.job, within_s=60)).engines[name]
            if (state.incarnation, state.phase) == (incarnation, Phase.STALE):
                return


# --- replicas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["init_hybrid", "init_colocated", "init_hybrid_colocated"])
async def test_each_colocated_way_to_begin_a_replica_is_refused_by_its_name(tmp_path: Path, how: str) -> None:
    """Before anything is begun; replicas that are not relight's are left to verl."""
    replica = replica_of(tmp_path)
    group = SimpleNamespace(workers=[object()])
    arguments = {"init_hybrid": (group,), "init_colocated": (object(),)}.get(how, (group, object()))
    with pytest.raises(UsageError, match=rf"^{how} .*separate_async.*hybrid_engine=False"):
        await getattr(replica, how)(*arguments)
    assert replica.launched == 0 and replica.workers == [] and replica.rollout_mode is None
    if how != "init_colocated":
        reward = replica_of(tmp_path, is_reward_model=True)
        await getattr(reward, how)(*arguments)
        assert reward.launched == 1 and not is_ours(reward) and is_ours(replica)


def test_every_way_that_verl_has_to_begin_a_replica_is_known() -> None:
    from verl.workers.rollout.replica import RolloutReplica

    ways = {name for name in vars(RolloutReplica) if name.startswith("init_")}
    refused = {"init_hybrid", "init_colocated", "init_hybrid_colocated"}
    assert ways == {*refused, "init_standalone"}


def test_a_replica_over_several_nodes_and_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"spans 2 nodes of 1.*tensor_model_parallel_size"):
        replica_of(tmp_path, "tensor_model_parallel_size=2", gpus_per_node=1)
    with pytest.raises(UsageError, match="router_config_path is not set"):
        replica_of(tmp_path, "router_config_path=null")


def replica_of(folder: Path, *overrides: str, gpus_per_node: int = 8, **kinds: bool) -> Any:
    """relight's subclass of verl's own replica class, with verl's composed config."""
    import ray
    from hydra import compose, initialize_config_module
    from verl.workers.rollout.replica import RolloutReplica

    class OfStubs(RolloutReplica):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(Server)
            self.launched = 0

        async def launch_servers(self) -> None:
            self.launched += 1

    from verl.checkpoint_engine import CheckpointEngineRegistry

    CheckpointEngineRegistry._registry["handed"] = Transport
    chosen = {
        "name": "vllm",
        "tensor_model_parallel_size": "1",
        "checkpoint_engine.backend": "handed",
        "router_config_path": router(folder),
        **dict(each.split("=") for each in overrides),
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = compose(
            "ppo_trainer", overrides=[f"{ROLLOUT}.{key}={value}" for key, value in chosen.items()]
        )
    made = replica_class(OfStubs)
    return made(0, whole.actor_rollout_ref.rollout, SimpleNamespace(), gpus_per_node, **kinds)


# --- the steward and its bundle ---------------------------------------------------------------------------


class Server:
    """In the place of verl's server: a stub engine, which ends as its actor would."""

    HOLD = threading.Event()
    """While it is clear, no server comes to serve."""

    def __init__(self, *, relight: Place, environment: dict[str, str], **given: Any) -> None:
        self.place = relight
        self.given = given
        self.environment = environment
        command = [sys.executable, "-m", "relight.agents.stub", "--model", given["model"]]
        command += ["--host", "127.0.0.1", "--port", str(relight.port)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()
        self.steps: int | None = None
        self.ledger: Ledger | None = None

    def relight_pid(self) -> int:
        return self.process.pid

    def launch_server(self) -> None:
        assert self.HOLD.wait(60)
        assert self.process.stdout is not None
        while b"startup complete" not in (line := self.process.stdout.readline()):
            assert line, "it ended before it listened"

    def get_server_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.place.port

    async def generate(self, prompt_ids: list[int], _: Any, request_id: str) -> Any:
        """Two tokens, and then its actor dies under it."""
        from ray.exceptions import ActorDiedError

        self.ledger = Ledger(Path(self.place.ledger))
        self.ledger.begin(request_id)
        self.ledger.add(request_id, [8, 9], [-1.0, -2.0])
        self.ledger.end(request_id, None)  # the engine's death came first
        await asyncio.sleep(0)
        self.asked.set()
        await self.ended.wait()
        raise ActorDiedError

    async def set_global_steps(self, steps: int) -> None:
        self.steps = steps

    async def abort_all_requests(self) -> dict[str, Any]:
        return {"aborted_count": 1}

    async def clear_kv_cache(self) -> str:
        return "cleared"


class Worker:
    """verl's, which holds a device."""

    def relight_renew(self) -> None:
        """It holds nothing of the last incarnation."""


@pytest.fixture
async def held(raylet: Raylet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Servers come to serve, as long as a test does not say otherwise."""
    raylet.loop = asyncio.get_running_loop()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Server.HOLD.set()
    yield
    Server.HOLD.set()
    for _, made in raylet.made:
        made.actor.process.kill()
        made.actor.process.wait(30)
        made.actor.process.stdout.close()


@asynccontextmanager
async def filled(
    server: Embedded, folder: Path, model: Path, worker: Handle
) -> AsyncIterator[tuple[Any, Watch]]:
    """A steward that fills the slot of a real agent and has launched its server, as verl asks it to."""
    slot = Engine(name=E0, command=(), launcher="delegated")
    file = node_file(folder / "state", slot)
    path = folder / "node.toml"
    path.write_text(
        f'job = "{JOB}"\nnode = "{file.node}"\nstate_dir = "{file.state_dir}"\n'
        '[[engines]]\nname = "e0"\nlauncher = "delegated"\n'
    )
    config = Rollout(router_config_path=router(folder, bus=server.url, node_file=str(path)))
    steward = steward_class(Server)(config=config, replica_rank=0, workers=[worker], model=str(model))
    async with anyio.create_task_group() as launching:
        launching.start_soon(steward.launch_server)
        async with job(server.url, file) as watch:
            try:
                yield steward, watch
            finally:
                steward._slot.leave()


async def test_a_steward_gives_its_calls_to_the_incarnation_of_the_moment_and_outlives_each(
    raylet: Raylet, held: None, server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    async with filled(server, tmp_path, stub_model, Handle(Worker())) as (steward, watch):
        first = watch.all(RouteAdded)[-1]
        number = first.incarnation
        assert await steward.relight_engine() == E0
        assert await steward.relight_incarnation() == number
        assert first.address == "http://{}:{}".format(*await steward.get_server_address())
        await steward.set_global_steps(4)
        assert await steward.clear_kv_cache() == "cleared"
        actor = raylet.made[-1][1]
        assert actor.actor.steps == 4

        # Its actor dies under a call: the call has what there was, and the next ones meet nobody.
        life = steward._life
        call = asyncio.create_task(steward.generate([5], {"max_tokens": 9}, "r"))
        await actor.actor.asked.wait()
        Server.HOLD.clear()
        actor.actor.process.kill()
        actor.dead = True
        actor.actor.ended.set()
        answer = await call
        assert (answer.token_ids, answer.log_probs) == ([8, 9], [-1.0, -2.0])
        assert answer.stop_reason == "aborted" and answer.extra_fields["global_steps"] == 4
        steward._bundle.config.full_determinism = True  # the name may be that of a turn before
        assert (await steward._kept_of(life, "r")).tokens == []
        await asyncio.wait_for(raylet.next.wait(), 60)
        assert actor.actor.process.poll() is not None, "proven gone before the next one is made"
        assert await steward.relight_incarnation() == 0
        answer = await steward.generate([5], {}, "q")
        assert answer.token_ids == [] and answer.stop_reason == "aborted"
        assert await steward.abort_all_requests() == {}, "a sync of the others goes on"
        for asked in (steward.clear_kv_cache, steward.get_server_address):
            with pytest.raises(NoEngine, match="e0 has no engine at the moment"):
                await asked()

        # The next one answers under the same steward.
        Server.HOLD.set()
        second = await watch.routed(E0, number + 1)
        assert second.address == "http://{}:{}".format(*await steward.get_server_address())
        assert await steward.relight_incarnation() == number + 1
        assert await steward.abort_all_requests() == {"aborted_count": 1}


async def test_each_incarnation_is_another_actor_in_the_same_place(
    raylet: Raylet, held: None, server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    worker = Handle(Worker())
    async with filled(server, tmp_path, stub_model, worker) as (_, watch):
        number = watch.all(RouteAdded)[-1].incarnation
        raylet.made[-1][1].actor.process.kill()
        await watch.routed(E0, number + 1)
        (first, one), (second, other) = raylet.made[-2:]
    assert [each["name"] for each in (first, second)] == [
        f"vllm_server_0_0.{number}",
        f"vllm_server_0_0.{number + 1}",
    ]
    assert one.actor.given == other.actor.given
    assert one.actor.place.ledger != other.actor.place.ledger
    for each in (first, second):
        assert each["scheduling_strategy"].node_id == raylet.NODE
        assert not each["scheduling_strategy"].soft
        assert each["max_restarts"] == each["max_task_retries"] == 0
        assert each["runtime_env"]["env_vars"]["GIVEN_BY_VERL"] == "1"
    assert worker.calls == ["relight_renew"] * len(raylet.made)


class Rollout(SimpleNamespace):
    """The part of verl's rollout config that is asked for."""

    max_num_seqs = 8
    enable_rollout_routing_replay = False


def order(**changes: Any) -> Order:
    given: dict[str, Any] = {"engine": "e0", "incarnation": 3, "port": 1, "weights": None, "command": ()}
    given |= {"marks": {"MARK": "m"}, "within_s": 60.0, "withdrawn": threading.Event()}
    return Order(**(given | changes))


class Hanging:
    """A server that never comes to serve."""

    def __init__(self, *, environment: dict[str, str], relight: Place, **_: Any) -> None:
        self.pending = ("launch_server",)

    def relight_pid(self) -> int:
        return 1

    def launch_server(self) -> None:
        raise AssertionError("nobody asks for what is pending")


def test_a_start_that_is_withdrawn_or_takes_too_long_leaves_no_actor(raylet: Raylet, tmp_path: Path) -> None:
    bundle = Bundle(Hanging, (), {"config": Rollout(), "workers": [Handle(Worker())]})
    withdrawn = order()
    withdrawn.withdrawn.set()
    with pytest.raises(StartWithdrawn):
        bundle.start(withdrawn, ledger=tmp_path / "l")
    with pytest.raises(TimeoutError, match="not up within 0 s"):
        bundle.start(order(within_s=0.1), ledger=tmp_path / "l")
    assert [actor for _, actor in raylet.made] == raylet.killed and len(raylet.killed) == 2
    assert bundle.failure == "Its last start failed: TimeoutError: not up within 0 s"


def test_without_the_worker_that_holds_its_device_no_actor_is_made(raylet: Raylet, tmp_path: Path) -> None:
    worker = Handle(Worker())
    worker.dead = True
    bundle = Bundle(Hanging, (), {"config": Rollout(), "workers": [worker]})
    with pytest.raises(RelightError, match="a worker that holds this replica's devices has died"):
        bundle.start(order(), ledger=tmp_path / "l")
    assert raylet.made == [] and "has died" in bundle.failure
