"""A frozen engine is dead, a busy one is not, and a paused, loading or lent one is what it is."""

from pathlib import Path

import anyio
import pytest

from relight.agents.adapters.vllm import Counters
from relight.agents.node import compiling
from relight.agents.node.vigil import Verdict, Vigil
from relight.events.bus.embedded import Embedded
from relight.events.decisions import SyncWeights
from relight.events.facts import EngineDead, EngineStarted, EngineStopped, Healthy, PauseExpired
from relight.events.ids import SyncId
from relight.events.values import Member
from relight.events.version import BASE, Version
from tests.node_support import (
    E0,
    Player,
    alive,
    directing,
    engine,
    generating,
    kill,
    knobs,
    node_file,
    post,
    record,
)

IDLE = Counters(running=0, waiting=0, tokens=100)


def _busy(tokens: float) -> Counters:
    return Counters(running=3, waiting=2, tokens=tokens)


def test_silence_with_flat_counters_is_a_stall() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(1, 10):
        vigil.told(now, _busy(100))
        assert vigil.verdict(now) is Verdict.WELL
    vigil.told(10, _busy(100))
    assert vigil.verdict(10) is Verdict.STALLED


def test_a_busy_engine_that_makes_tokens_is_never_dead_however_late_its_answers() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(1, 1000):
        vigil.told(now, _busy(100 + now))
        assert vigil.verdict(now) is Verdict.WELL


def test_without_metrics_progress_is_unknown_and_more_patience_is_due() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(1, 30):
        vigil.told(now, None)
        assert vigil.verdict(now) is Verdict.WELL
    assert vigil.verdict(30) is Verdict.STALLED


def test_a_stretch_of_compiling_has_gaps_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stretch = compiling.Stretch(E0)

    def goes_on(now: float, *, seen: bool) -> bool:
        monkeypatch.setattr(compiling, "compiles", lambda _: seen)
        return stretch.goes_on(None, now=now, gap_s=10.0)

    assert not goes_on(0.0, seen=False)
    assert goes_on(100.0, seen=True)
    assert goes_on(109.0, seen=False), "between two compilers"
    assert not goes_on(110.0, seen=False)
    assert goes_on(112.0, seen=True)
    stretch.over()
    assert not goes_on(113.0, seen=False), "it answered: its next silence is another one"
    assert goes_on(120.0, seen=True)
    assert goes_on(120.0 + compiling.LONGEST_S - 1.0, seen=True)
    assert not goes_on(120.0 + compiling.LONGEST_S, seen=True), "a compiler that never ends is a stall"


def test_a_core_that_answers_while_calls_wait_and_no_token_comes_is_doubtful() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(1, 31):
        vigil.answered(now)
        vigil.told(now, _busy(100))
    assert vigil.verdict(31) is Verdict.DOUBTFUL
    vigil.held(31)
    assert vigil.verdict(31) is Verdict.WELL


def test_a_slow_engines_window_grows_with_its_own_iterations() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(4, 100, 4):  # one iteration of a large model takes 4 s
        vigil.told(now, Counters(running=3, waiting=2, tokens=100 + now, steps=now / 4))
    assert vigil.window_s == 40
    for now in range(100, 136):
        vigil.told(now, Counters(running=3, waiting=2, tokens=196, steps=24))
        assert vigil.verdict(now) is Verdict.WELL
    assert vigil.verdict(136) is Verdict.STALLED
    for now in range(136, 400, 6):  # a single slow one is forgotten again, and none counts without end
        vigil.told(now, Counters(running=3, waiting=2, tokens=100 + now, steps=24 + now))
    assert vigil.window_s == 10
    vigil.told(5000, Counters(running=3, waiting=2, tokens=9000, steps=500))
    assert vigil.window_s == 60


def test_a_paused_engine_has_a_longer_deadline_and_an_end() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(1, 120):
        vigil.told(now, IDLE)
        vigil.held(now)
        assert vigil.verdict(now) is Verdict.WELL
    assert vigil.verdict(120) is Verdict.STALLED
    vigil.released()
    vigil.excuse(120)
    assert vigil.verdict(121) is Verdict.WELL


def test_an_idle_engine_is_well_for_ever() -> None:
    vigil = Vigil(stall_s=10, now=0)
    for now in range(1, 1000):
        vigil.answered(now)
        vigil.told(now, IDLE)
        assert vigil.verdict(now) is Verdict.WELL


@pytest.mark.anyio
async def test_a_frozen_core_is_dead_by_stall_and_killed_without_being_asked(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=1.0))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        await knobs(started, freeze_after_tokens=0)
        dead = await player.wait(EngineDead)
        assert dead.cause == "stall"
        assert dead.detect_ms is not None and dead.detect_ms >= 1000
        stopped = await player.ask(EngineStopped, player.stop())
        assert len(stopped.proof.processes) == 3
    assert len(player.seen(EngineDead)) == 1


@pytest.mark.anyio
async def test_a_probe_finds_a_frozen_core(server: Embedded, tmp_path: Path, stub_model: Path) -> None:
    file = node_file(tmp_path / "state", engine(stub_model))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        paused = await player.ask(Healthy, player.probe())
        assert paused.canary is None
        await player.ask(Healthy, player.verify(BASE))
        assert (await player.ask(Healthy, player.probe())).canary is not None
        await knobs(started, freeze_after_tokens=0)
        await player.decide(player.probe(seconds=0.5))
        assert (await player.wait(EngineDead)).cause == "stall"


@pytest.mark.anyio
async def test_an_engine_that_is_paused_while_it_is_looked_at_is_no_death(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """A look at what a push has brought may wait for its answer when the next push begins."""
    file = node_file(tmp_path / "state", engine(stub_model))
    output = file.state_path / "engines" / "e0" / "1" / "log"
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        await knobs(started, stream_fault="silent")
        canaries = output.read_text().count("relight=canary")
        look = player.probe(seconds=3.0)
        await player.decide(look)
        with anyio.fail_after(30):
            while output.read_text().count("relight=canary") == canaries:
                await anyio.sleep(0.01)
        await post(started, "/pause?mode=keep")
        told = await player.wait(Healthy, lambda fact: fact.answers == look.id)
        assert told.canary is None
        assert not player.seen(EngineDead)


@pytest.mark.anyio
@pytest.mark.parametrize(("fault", "why"), [("abort", "aborted"), ("silent", "lent")])
async def test_a_look_that_the_next_push_spoils_is_no_death(
    server: Embedded, tmp_path: Path, stub_model: Path, fault: str, why: str
) -> None:
    """Who pauses it by abort ends the canary, and a core that is written into answers nobody."""
    async with directing(node_file(tmp_path / "state", engine(stub_model)), server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        await knobs(started, stream_fault=fault)
        if why == "lent":
            await player.decide(_push(player, started, seconds=30.0))
        told = await player.ask(Healthy, player.probe(seconds=2.0))
        assert told.canary is None and told.evidence[why] is True
        assert not player.seen(EngineDead)


def _push(player: Player, started: EngineStarted, *, seconds: float) -> SyncWeights:
    return SyncWeights(
        **player.head(),
        sync=SyncId("s1"),
        run=7,
        boundary=1,
        version=Version(7, 1),
        members=(Member(E0, 1, started.address),),
        deadline=player.deadline(seconds),
    )


@pytest.mark.anyio
async def test_late_probes_of_an_engine_that_works_are_no_death(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--max-model-len", "4096", stall_s=0.5))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        await player.ask(Healthy, player.verify(BASE))
        async with generating(started, tokens=4000):
            await knobs(started, probe_delay_s=60.0)
            with pytest.raises(TimeoutError):
                await player.wait(EngineDead, within_s=5)


@pytest.mark.anyio
async def test_a_paused_engine_is_no_stall_and_a_foreign_pause_expires(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, stall_s=0.5))
    async with directing(file, server.url) as player:
        started = await player.ask(EngineStarted, player.start())
        with pytest.raises(TimeoutError):
            await player.wait(EngineDead, within_s=3)
        await player.ask(Healthy, player.verify(BASE))
        await player.decide(_push(player, started, seconds=3))
        await post(started, "/pause?mode=keep")
        began = anyio.current_time()
        await player.wait(PauseExpired)
        assert anyio.current_time() - began > 2.5
        assert not player.seen(EngineDead)


@pytest.mark.anyio
async def test_the_end_of_an_unvital_process_is_looked_into_and_is_no_death(
    server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    file = node_file(tmp_path / "state", engine(stub_model, "--strays", "1"))
    async with directing(file, server.url) as player:
        await player.ask(EngineStarted, player.start())
        kill(
            next(
                each for each in record(file).members if each.role == "other" and alive(each.process)
            ).process
        )
        with pytest.raises(TimeoutError):
            await player.wait(EngineDead, within_s=1)
        assert record(file).phase == "up"
