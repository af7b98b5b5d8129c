"""Bringing an incarnation up: until a bounded generation has worked, paused, its processes on disk.

A port that answers proves nothing: the socket must belong to a process of the incarnation, and the engine
must have generated. The bytes of weights that it starts on are hashed while it starts.
"""

import logging
from functools import partial

import anyio

from relight.agents import snapshot
from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable
from relight.agents.node import canary, launch, ports, sockets, stop
from relight.agents.node.config import listens_on
from relight.agents.node.errors import StartFailure
from relight.agents.node.logs import last_lines
from relight.agents.node.owned import Owned
from relight.agents.node.shapes import keep_shapes
from relight.agents.node.sockets import Listener
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import StartEngine
from relight.events.errors import leaves
from relight.events.facts import EngineStarted
from relight.events.values import Process

log = logging.getLogger(__name__)

POLL_S = 0.005
"""Between two looks for a listening port: nothing tells when a port opens."""
SEARCH_S = 0.5
"""Between two searches for new processes during a start."""
LAST_WORDS_S = 2.0
"""For the front process to say why, once a process behind it has ended."""
TRIES = 3
"""Ports tried in one start before it fails with EADDRINUSE."""
CALL_S = 30.0
"""Limit of one control call to an engine that is up."""


async def start(owned: Owned, order: StartEngine) -> None:
    """Start what `order` says and publish EngineStarted. Raises StartFailure, with what it left alive."""
    began = monotonic_ms()
    within_s = owned.seconds_until(order.deadline)
    if owned.config.start_s is not None:
        within_s = min(within_s, owned.config.start_s)
    if within_s <= 0:
        launch.prepare(owned, order)
        raise StartFailure("deadline", f"the start's deadline had passed {-within_s:.1f} s before it began")
    try:
        with anyio.fail_after(within_s):
            await _start(owned, order, began)
    except TimeoutError as error:
        raise StartFailure("deadline", f"not up within {within_s:.0f} s") from error


async def _start(owned: Owned, order: StartEngine, began: float) -> None:
    for attempt in range(1, TRIES + 1):
        launch.prepare(owned, order)
        try:
            await _bring_up(owned, order)
            break
        except StartFailure as error:
            if error.cause != "EADDRINUSE" or owned.config.port is not None or attempt == TRIES:
                raise
            log.info("another port is tried engine=%s port=%d", owned.name, owned.record.port)
            await stop.prove_present_gone(owned, grace_s=0, within_s=30.0)
    owned.look_around()
    owned.save(phase="up", seconds=(monotonic_ms() - began) / 1000.0)
    owned.shared.say(started(owned, order))
    told = owned.record
    log.info(
        "up engine=%s.%d address=%s seconds=%.1f log=%s",
        *(owned.name, told.incarnation, told.address, told.seconds, owned.log_path),
    )


def started(owned: Owned, order: StartEngine) -> EngineStarted:
    """The fact that answers `order`, from the record."""
    record = owned.record
    assert record.address is not None
    return EngineStarted(
        engine=owned.name,
        incarnation=record.incarnation,
        address=record.address,
        how="cold",
        weights=record.started_on,
        processes=owned.tree.living if owned.tree else (),
        seconds=record.seconds,
        answers=order.id,
    )


async def _bring_up(owned: Owned, order: StartEngine) -> None:
    weights = order.weights if any("{weights}" in word for word in owned.config.command) else None
    folder = snapshot.directory_of(weights.uri) if weights else None
    leader = launch.run(owned, folder)
    owned.save(leader=leader, members=())
    owned.watch()
    try:
        async with anyio.create_task_group() as tasks:
            if weights is not None and folder is not None:
                tasks.start_soon(partial(_check_weights, owned, order))
            await _serving(owned, leader)
    except* StartFailure as group:
        raise leaves(group)[0] from None
    if weights is not None:
        try:
            await owned.client.set_label(str(weights.version), within_s=CALL_S)
        except (EngineUnreachable, EngineRefused) as error:
            raise StartFailure("label", str(error)) from error
        owned.note(started_on=weights.version, version=weights.version, digest=weights.digest)


async def _check_weights(owned: Owned, order: StartEngine) -> None:
    """The bytes that it starts on, hashed meanwhile."""
    assert order.weights is not None
    folder = snapshot.directory_of(order.weights.uri)
    try:
        manifest = await anyio.to_thread.run_sync(
            snapshot.check, folder, order.weights.digest, abandon_on_cancel=True
        )
    except snapshot.SnapshotError as error:
        raise StartFailure("weights", str(error), retryable=False) from error
    keep_shapes(owned, manifest)


async def _serving(owned: Owned, leader: Process) -> None:
    """Until it listens, is well, has generated and is paused. Ends at once when it dies."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_dies, owned, leader)
        listener = await _listening(owned)
        _set_address(owned, listener)
        try:
            await _warm(owned)
        except (EngineUnreachable, EngineRefused) as error:
            raise StartFailure("canary", str(error)) from error
        tasks.cancel_scope.cancel()


async def _dies(owned: Owned, leader: Process) -> None:
    """Raise StartFailure when a vital process of the start has ended."""
    assert owned.tree is not None
    tree = owned.tree
    while True:
        vital = {process for process, role in tree.known.items() if role != "other"} | {leader}
        dead = vital - set(tree.living)
        if dead:
            raise await _died(owned, sorted(dead)[0])
        with anyio.move_on_after(SEARCH_S):
            await tree.changed()
            continue
        owned.look_around()


async def _died(owned: Owned, process: Process) -> StartFailure:
    assert owned.tree is not None
    role = owned.tree.known.get(process, "other")
    with anyio.move_on_after(LAST_WORDS_S):
        while owned.record.leader in owned.tree.living:
            await owned.tree.changed()
    if owned.pump is not None and not owned.tree.living:
        with anyio.move_on_after(0.5):
            await owned.pump.ended()
    lines = last_lines(owned.log_path, 200)
    taken = any("EADDRINUSE" in line or "ddress already in use" in line for line in lines)
    text = "\n".join((f"its {role} (pid {process.pid}) ended while starting", *lines[-8:]))
    return StartFailure("EADDRINUSE" if taken else "exit", text)


async def _listening(owned: Owned) -> Listener:
    """The socket that listens on the incarnation's port; raises StartFailure where it is another's."""
    port = owned.record.port
    assert port is not None and owned.tree is not None
    host = listens_on(owned.config) or "127.0.0.1"
    host = "127.0.0.1" if host in (*launch.EVERY_ADDRESS, "localhost") else host
    while not ports.answers(host, port):  # noqa: ASYNC110 -- nothing tells when a port opens
        await anyio.sleep(POLL_S)
    owned.tree.find()
    found = sockets.listeners(port)
    mine = [
        listener
        for listener in found
        if any(sockets.holds_socket(process.pid, {listener.inode}) for process in owned.tree.living)
    ]
    if not mine:
        raise StartFailure("EADDRINUSE", f"port {port} is held by {launch.holder(port)}")
    return mine[0]


def _set_address(owned: Owned, listener: Listener) -> None:
    port = owned.record.port
    public = owned.shared.host if listener.host in launch.EVERY_ADDRESS else listener.host
    owned.note(address=launch.url(public, port), local=launch.local_url(listener.host, port))


async def _warm(owned: Owned) -> None:
    """Well, generating and paused. The first generation may compile; the start's deadline bounds it."""
    client = owned.client
    while not await client.health(within_s=CALL_S):  # noqa: ASYNC110 -- another process
        await anyio.sleep(POLL_S)
    for call in owned.config.after_start:
        await client.collective_rpc(call.method, call.kwargs, within_s=3600.0)
    await client.canary(canary.PROMPT, within_s=3600.0)
    await client.pause("abort", within_s=CALL_S)
    assert owned.tree is not None
    owned.tree.find()
