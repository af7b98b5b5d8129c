"""What goes wrong with the bus."""

from functools import partial
from typing import TYPE_CHECKING, Any

from relight.events.bus import scripts
from tests.simulate.faults.injector import LONG_S

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Fault, Injector


def _bus_away(injector: "Injector") -> bool:
    network = injector.world.network
    if not network.up:
        return False
    network.up = False
    network.reset()
    injector.world.settle_pulses()

    def back() -> None:
        network.up = True
        if seconds >= LONG_S:
            network.well_since = injector.world.kernel.now
        injector.world.settle_pulses()

    seconds = injector.random.choice([0.3, 2.0, 5.0, 60.0]) * injector.random.uniform(0.5, 1.5)
    injector.last(seconds, back)
    return injector.happened("bus-away", None, f"for {seconds:.1f} s")


def _bus_restart(injector: "Injector") -> bool:
    if not _bus_away(injector):
        return False
    injector.world.faults["bus-away"] -= 1
    injector.world.server.restart()
    injector.world.generation += 1
    return injector.happened("bus-restart", None, "")


def _bus_rollback(injector: "Injector") -> bool:
    world = injector.world
    if world.rolling_back or not world.network.up:
        return False
    world.rolling_back = True
    data = world.server.data.copy()
    world.kernel.after(injector.random.choice([0.05, 0.5, 2.0, 10.0]), _fails_over, injector, data)
    return True


def _fails_over(injector: "Injector", data: Any) -> None:
    world = injector.world
    world.rolling_back = False
    if world.calm:
        return
    world.another_bus()
    behind_ms = world.plan.behind_s * 1000.0 * injector.random.random()
    world.server.replace(data, clock_ms=injector.random.uniform(-20.0, 20.0) - behind_ms)
    world.network.reset()
    injector.happened("bus-rollback", None, "")


def _bus_emptied(injector: "Injector") -> bool:
    world = injector.world
    world.server.empty()
    world.another_bus()
    world.network.disturb()
    return injector.happened("bus-emptied", None, "")


def _weather(injector: "Injector", kind: str) -> bool:
    """Commands of one process, or of all, go wrong for a while; each that does counts itself."""
    world = injector.world
    links = [link for link in world.network.links if link.process.alive and link.weather.calm]
    if not links:
        return False
    minds = [mind.link for mind in world.minds if mind.link is not None and mind.process is not None]
    if kind == "lost-reply" and minds and injector.random.random() < 0.5:
        injector.random.choice(minds).deaf_to = scripts.COMMIT
        return True
    weather = injector.random.choice(links).weather
    if kind == "doubled" or (injector.random.random() < 0.2 and world.network.weather.calm):
        weather = world.network.weather
    setattr(weather, kind.replace("-", "_"), injector.random.uniform(0.1, 0.6))
    weather.calm = False
    injector.last(injector.random.uniform(2.0, 20.0), weather.still)
    return True


OF_BUS: dict[str, "Fault"] = {
    "bus-away": _bus_away,
    "bus-restart": _bus_restart,
    "bus-rollback": _bus_rollback,
    "bus-emptied": _bus_emptied,
    **{kind: partial(_weather, kind=kind) for kind in ("lost-request", "lost-reply", "slow", "doubled")},
}
