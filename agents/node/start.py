"""Bringing an incarnation up: until a bounded generation has worked, paused, its processes on disk.

A port that answers proves nothing: the socket must belong to a process of the incarnation, and the engine
must have generated. The bytes of weights that it starts on are hashed while it starts.
"""

import logging
from contextlib import suppress
from functools import partial

import anyio

from relight.agents import snapshot
from relight.agents.adapters.vllm import EngineRefused, EngineUnreachable
from relight.agents.node import (
    content,
    launch,
    launcher,
    part,
    patience,
    ports,
    selftest,
    sockets,
    stillbirth,
    stop,
)
from relight.agents.node.config import device, takes_weights, visible_devices
from relight.agents.node.errors import NotProven, StartFailure
from relight.agents.node.launcher import First
from relight.agents.node.owned import Owned
from relight.agents.node.shapes import keep_shapes
from relight.agents.node.sockets import Listener
from relight.events.bus.clock import monotonic_ms
from relight.events.decisions import StartEngine
from relight.events.errors import leaves
from relight.events.facts import EngineStarted

log = logging.getLogger(__name__)

POLL_S = 0.005
"""Between two looks for a listening port: nothing tells when a port opens."""
TRIES = 3
"""Ports tried in one start before it fails with EADDRINUSE."""
PROOF_S = 30.0
"""For the proof that a try which is made again has left nothing."""
CALL_S = 30.0
"""Limit of one control call to an engine that is up."""


async def start(owned: Owned, order: StartEngine) -> None:
    """Start what `order` says and publish EngineStarted. Raises StartFailure, with what it left alive."""
    began = monotonic_ms()
    if refused := owned.refused or _misplaced(owned, order):
        with suppress(OSError):  # nothing is begun that a successor must know of
            launch.prepare(owned, order)
        raise refused
    within_s = owned.seconds_until(order.deadline)
    if owned.config.start_s is not None:
        within_s = min(within_s, owned.config.start_s)
    if within_s <= 0:
        with suppress(OSError):
            launch.prepare(owned, order)
        raise StartFailure("deadline", f"the start's deadline had passed {-within_s:.1f} s before it began")
    try:
        with anyio.fail_after(within_s):
            await _start(owned, order, began)
    except TimeoutError as error:
        raise StartFailure("deadline", f"not up within {within_s:.0f} s: {owned.stage}") from error
    except OSError as error:  # descriptors or disk have run out
        raise StartFailure("resources", f"{owned.stage}: {error}") from error


def _misplaced(owned: Owned, order: StartEngine) -> StartFailure | None:
    """Why the part that this node holds is not the one that is to be started here."""
    nodes, config = (order.node, *order.parts), owned.config
    if len(nodes) == config.parts and nodes[config.part] == owned.shared.node:
        return None
    text = f"the node file of {owned.shared.node} has part {config.part} of {config.parts}, counted from 0"
    return StartFailure("parts", f"{text}; it is to be started at {', '.join(nodes)}", retryable=False)


async def _start(owned: Owned, order: StartEngine, began: float) -> None:
    for attempt in range(1, TRIES + 1):
        launch.prepare(owned, order)
        try:
            await _on_its_devices(owned, order)
            break
        except StartFailure as error:
            taken = error.cause == "EADDRINUSE" and owned.config.port is None
            if not (taken or error.cause == "reload") or attempt == TRIES:
                raise
            why = "another port is tried" if taken else "a reload has spoilt its weights"
            log.info("it is started once more: %s engine=%s port=%d", why, owned.name, owned.record.port)
            await _clear(owned)
            launcher.of(owned).ended(owned, order.incarnation, error.detail)
    owned.look_around()
    seconds = (monotonic_ms() - began) / 1000.0
    owned.save(phase="up", seconds=seconds, good_start_s=seconds, paused=owned.config.part == 0)
    owned.shared.say(started(owned, order))
    told = owned.record
    log.info(
        "up engine=%s.%d address=%s seconds=%.1f log=%s",
        *(owned.name, told.incarnation, told.address, told.seconds, owned.log_path),
    )


async def _clear(owned: Owned) -> None:
    """Between two tries. What is not proven gone by then ends the start, and is stopped once more."""
    try:
        await stop.prove_present_gone(owned, grace_s=0, within_s=PROOF_S)
    except NotProven as error:
        raise StartFailure("predecessor", str(error)) from error


def started(owned: Owned, order: StartEngine) -> EngineStarted:
    """The fact that answers `order`, from the record."""
    record = owned.record
    return EngineStarted(
        engine=owned.name,
        incarnation=record.incarnation,
        node=owned.shared.node,
        address=record.address or "",
        how="cold",
        weights=record.started_on,
        processes=owned.living,
        device=device(owned.config),
        seconds=record.seconds,
        reloads=record.reloads,
        answers=order.id,
    )


async def _on_its_devices(owned: Owned, order: StartEngine) -> None:
    """Bring it up alone on its devices, whose memory is looked at before."""
    memory = owned.shared.memory
    owned.stage = "another engine takes memory on its device"
    devices = await memory.devices(visible_devices(owned.config))
    async with memory.turn(devices):
        owned.save(devices=await memory.before(devices))
        await _bring_up(owned, order)


async def _bring_up(owned: Owned, order: StartEngine) -> None:
    weights = order.weights if takes_weights(owned.config) else None
    folder = snapshot.directory_of(weights.uri) if weights else None
    first = await launcher.of(owned).launch(owned, folder)
    try:
        async with anyio.create_task_group() as tasks:
            if weights is not None and first.on_weights:
                tasks.start_soon(partial(_check_weights, owned, order))
            await (part.running if owned.config.part else _serving)(owned, first)
    except* StartFailure as group:
        raise leaves(group)[0] from None
    if weights is not None and first.on_weights:
        await _label(owned, str(weights.version))
        owned.note(
            started_on=weights.version, version=weights.version, digest=weights.digest, uri=weights.uri
        )
    owned.note(canary_of=None if owned.config.after_start else content.origin_of(owned))
    if owned.config.part:  # what it does and does not reload is seen at the head
        return
    owned.stage = "it is up, and its reload is tried"
    owned.note(reloads=await selftest.learn(owned, folder if first.on_weights else None))


async def _label(owned: Owned, version: str) -> None:
    if owned.config.part:  # the whole has its label at the head
        return
    try:
        await owned.client.set_label(version, within_s=CALL_S)
    except (EngineUnreachable, EngineRefused) as error:
        raise StartFailure("label", str(error)) from error


async def _check_weights(owned: Owned, order: StartEngine) -> None:
    """The bytes that it starts on, hashed meanwhile."""
    assert order.weights is not None
    folder = snapshot.directory_of(order.weights.uri)
    try:
        manifest = await anyio.to_thread.run_sync(
            snapshot.check, folder, order.weights.digest, abandon_on_cancel=True
        )
    except snapshot.SnapshotError as error:
        raise StartFailure("weights", str(error)) from error
    keep_shapes(owned, manifest)


async def _serving(owned: Owned, first: First) -> None:
    """Until it listens, is well, has generated and is paused. Ends at once when it dies."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stillbirth.awaited, owned, first.processes)
        tasks.start_soon(patience.runs_out, owned)
        owned.stage = "it does not listen yet"
        listener = await _listening(owned, first.host)
        _set_address(owned, listener)
        try:
            await _warm(owned)
        except (EngineUnreachable, EngineRefused) as error:
            raise StartFailure("canary", str(error)) from error
        tasks.cancel_scope.cancel()


async def _listening(owned: Owned, host: str) -> Listener:
    """The socket that listens on the incarnation's port; raises StartFailure where it is another's."""
    port = owned.record.port
    assert port is not None and owned.tree is not None
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
    owned.stage = "it listens and is not well"
    while not await _well(owned):  # noqa: ASYNC110 -- another process
        await anyio.sleep(POLL_S)
    owned.stage = "it listens, and nothing was generated"
    for call in owned.config.after_start:
        await client.collective_rpc(call.method, call.kwargs, within_s=3600.0)
    owned.note(canary=await owned.canary(within_s=3600.0))
    await client.pause("abort", within_s=CALL_S)
    assert owned.tree is not None
    owned.tree.find()


async def _well(owned: Owned) -> bool:
    """One look. A server that is busy with its own start answers late, and that is no failure."""
    try:
        return await owned.client.health(within_s=CALL_S)
    except EngineUnreachable as error:
        log.info("not well yet engine=%s error=%s", owned.name, error)
        return False
