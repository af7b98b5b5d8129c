"""What one seed is: how jobs are run, which faults they meet and how often. Each has a random subset of them.

All times are virtual seconds. Everything is drawn from the seed alone.
"""

from random import Random
from typing import Literal, NamedTuple

from relight.orchestrator.settings import Settings

KINDS = {
    # engines
    "death": "an engine dies, in whatever it does",
    "hang": "an engine's core stands still for good",
    "stall": "an engine's core stands still for a while",
    "start-fails": "a start comes to nothing",
    "stop-fails": "no proof that an engine is gone",
    "load-refused": "weights are refused before the engine is touched",
    "load-fails": "a load fails that has touched the engine",
    "canary": "an engine's proof fails",
    "pause": "somebody pauses an engine and forgets it",
    # agents and nodes
    "agent-crash": "an agent dies and comes back with its disk",
    "agent-lost": "an agent dies and comes back without its disk",
    "agent-half": "an agent dies between what it does and what it says",
    "agent-ghost": "words of an agent's life that is over arrive late",
    "agent-frozen": "an agent stands still for a while",
    "node-cut": "a node cannot be reached for a while, nor reaches anybody",
    # orchestrators
    "mind-crash": "an orchestrator dies",
    "mind-before": "an orchestrator dies between its reading and its commit",
    "mind-after": "an orchestrator dies after its commit, before the reply",
    "mind-frozen": "an orchestrator stands still and goes on as if nothing had happened",
    "mind-late": "a commit is under way for longer than its lease lasts",
    "mind-cut": "an orchestrator cannot reach the bus for a while",
    "mind-slow": "an orchestrator's commands travel slowly for a while",
    "hand-over": "an orchestrator gives a job to another one",
    # trainers
    "trainer-crash": "a trainer dies, and a new run begins",
    "trainer-ghost": "words of a run that is over arrive late",
    "trainer-frozen": "a trainer stands still for a while",
    "trainer-cut": "a trainer cannot reach the bus for a while",
    "export-fails": "an export fails",
    "export-cut": "a trainer is interrupted in an export",
    "republish": "an application announces weights of a version of before",
    "finish": "a training ends well, and another run begins",
    # the bus
    "bus-away": "the server cannot be reached for a while",
    "bus-restart": "the server is restarted with all of its data",
    "bus-rollback": "a replica that lags behind takes over",
    "bus-emptied": "FLUSHALL",
    "lost-request": "a command never arrives",
    "lost-reply": "a command is executed and its reply never arrives",
    "slow": "a command takes longer than its sender waits",
    "doubled": "a hint stands in the stream twice",
    # clients
    "suspicion": "a client suspects a route that is well",
    "burst": "a client says its suspicion again and again",
    "stream-cut": "the connection of one call breaks",
    "client-crash": "a client dies",
    "client-cut": "a client cannot reach the bus for a while",
    # operators
    "restart": "restart this engine",
    "restart-all": "restart every engine, one after the other",
    "drain": "drain this engine; it is released later",
    "retire": "retire this engine; it is released later",
    "hold": "hold the job; it is released later",
}
"""Every kind of fault, and what it is."""


class Plan(NamedTuple):
    """One seed's."""

    seed: int
    kinds: tuple[str, ...]
    every_s: float
    """Between two faults, in the mean."""
    faults_s: float
    """For how long there are faults; after that everything must settle."""
    jobs: int = 2
    engines: int = 2
    minds: int = 2
    clients: int = 1
    settings: Settings = Settings()
    behind_s: float = 0.0
    """How far the clock of a server that takes over may be behind. Where that is more than a trainer needs to
    come back, a run may be counted twice."""
    # the machines
    literal: bool = False
    """Ports stay across incarnations."""
    start_s: float = 6.0
    stop_s: float = 0.5
    load_s: float = 1.5
    # the trainer
    pushes: bool = False
    subset: bool = True
    release: Literal["routed", "written"] = "routed"
    export_s: float = 1.0
    train_s: float = 8.0
    turns: int = 4
    """Whose end a rollout waits for."""
    evaluates: float = 0.0
    grace_s: float = 30.0
    orphan_s: float = 120.0
    # the clients
    token_s: float = 0.5
    tokens: int = 12
    """Of a turn, in the mean."""
    think_s: float = 2.0
    same: bool = False
    restarts: bool = False
    """Turns are always replayed from their prompt."""
    recovery_timeout_s: float = 300.0
    max_engine_failures: int = 3
    idle_s: float | None = 60.0
    timeout_s: float | None = None


def swarm(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(seed * 2 + 1)
    many = list(KINDS)
    kinds = tuple(kind for kind in many if random.random() < 0.3) or (random.choice(many),)
    if "agent-ghost" in kinds and "agent-lost" not in kinds:
        kinds = (*kinds, "agent-lost")  # or there is no life that is over
    pushes = random.random() < 0.4
    load_s, export_s, train_s, tokens = random.choice(
        [(0.3, 0.3, 1.0, 4), (1.5, 1.0, 8.0, 12), (5.0, 4.0, 20.0, 12)]
    )
    settings = Settings(
        recover_at="boundary" if pushes else random.choice(["either", "either", "snapshot", "boundary"]),
        restarts=random.choice([2, 5, 50]),
        restart_window_s=random.choice([120.0, 900.0]),
        backoff_s=random.choice([0.0, 2.0, 10.0]),
        backoff_most_s=30.0,
        start_s=120.0,
        start_least_s=20.0,
        stop_s=10.0,
        load_s=20.0,
        verify_s=15.0,
        sync_s=60.0,
        drain_s=5.0,
        keep_entries=random.choice([10, 100, 10_000]),
        waiting_s=random.choice([20.0, 60.0]),
        starts_per_node=random.choice([1, 4]),
        starts_per_job=random.choice([1, 32]),
        floor=random.choice([1, 2]),
        lease_s=random.choice([3.0, 3.0, 30.0]),
    )
    return Plan(
        seed=seed,
        kinds=kinds,
        every_s=random.choice([3.0, 8.0, 20.0]),
        faults_s=random.choice([60.0, 120.0, 240.0]),
        jobs=random.choice([1, 2, 2]),
        clients=random.choice([1, 2]),
        settings=settings,
        literal=random.random() < 0.2,
        start_s=random.choice([2.0, 6.0]),
        stop_s=random.choice([0.2, 1.0]),
        load_s=load_s,
        pushes=pushes,
        subset=random.random() < 0.7,
        release=random.choice(["routed", "routed", "written"]) if not pushes else "routed",
        export_s=export_s,
        train_s=train_s,
        turns=random.choice([1, 4]),
        evaluates=random.choice([0.0, 0.3]),
        grace_s=random.choice([10.0, 30.0]),
        token_s=random.choice([0.1, 0.5]),
        tokens=tokens,
        same=random.random() < 0.2,
        restarts=random.random() < 0.1,
        recovery_timeout_s=random.choice([30.0, 300.0]),
        max_engine_failures=random.choice([3, 20]),
        timeout_s=random.choice([None, None, 60.0]),
    )


SPEED = Plan(
    seed=0,
    kinds=(
        "death",
        "hang",
        "start-fails",
        "load-fails",
        "agent-crash",
        "node-cut",
        "mind-crash",
        "trainer-crash",
        "bus-away",
        "suspicion",
        "stream-cut",
    ),
    every_s=20.0,
    faults_s=4000.0,
    jobs=1,
    settings=Settings(restarts=1000),
    start_s=10.0,
    train_s=10.0,
    turns=3,
    token_s=1.0,
)
"""What speed is measured by: one job, two engines, a fault every 20 s."""
