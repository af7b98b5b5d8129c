"""What goes wrong with orchestrators."""

from functools import partial
from typing import TYPE_CHECKING

from relight.events.bus import scripts

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Fault, Injector
    from tests.simulate.mind import Mind


def _mind_dies(injector: "Injector", kind: str) -> bool:
    mind = injector.a_mind()
    if mind.process is None or mind.link is None:
        return False
    if kind == "mind-crash":
        _kill_mind(injector, mind, kind)
        return True
    if mind.link.before is not None or mind.link.behind is not None:
        return False

    def at_commit(script: str) -> None:
        if script == scripts.COMMIT:
            _kill_mind(injector, mind, kind)

    if kind == "mind-before":
        mind.link.before = at_commit
    else:
        mind.link.behind = at_commit
    return True


def _kill_mind(injector: "Injector", mind: "Mind", kind: str) -> None:
    if mind.process is None:
        return  # another one of its commits was under way when it died
    injector.happened(kind, None, mind.name)
    mind.crash()
    world = injector.world
    world.kernel.after(injector.random.uniform(0.5, 6.0), mind.start)


def _mind_frozen(injector: "Injector") -> bool:
    mind, seconds = injector.a_mind(), injector.random.uniform(0.5, 12.0)
    if not injector.freeze(mind.process, seconds):
        return False
    return injector.happened("mind-frozen", None, f"{mind.name} for {seconds:.1f} s")


def _mind_late(injector: "Injector") -> bool:
    """The next commit travels for longer than its lease lasts; its sender stands still meanwhile."""
    mind = injector.a_mind()
    if mind.link is None or mind.process is None or mind.link.delays is not None or mind.process.frozen:
        return False
    process = mind.process

    def delays(script: str) -> float:
        if script != scripts.COMMIT or process.frozen:
            return 0.0
        seconds = injector.random.uniform(2.0, 6.0)
        mind_link.delays = None
        injector.freeze(process, seconds + 0.5)
        injector.happened("mind-late", None, f"{mind.name} for {seconds:.1f} s")
        return seconds

    mind_link = mind.link
    mind_link.delays = delays
    return True


def _mind_cut(injector: "Injector") -> bool:
    mind, seconds = injector.a_mind(), injector.random.uniform(0.5, 10.0)
    if not injector.cut(mind.link, seconds):
        return False
    return injector.happened("mind-cut", None, f"{mind.name} for {seconds:.1f} s")


def _mind_slow(injector: "Injector") -> bool:
    mind, seconds = injector.a_mind(), injector.random.uniform(10.0, 60.0)
    link = mind.link
    if link is None or link.lag_s or not link.process.alive:
        return False
    link.lag_s = injector.random.uniform(0.1, 0.4)

    def fast_again() -> None:
        link.lag_s = 0.0

    injector.last(seconds, fast_again)
    return injector.happened("mind-slow", None, f"{mind.name} for {seconds:.1f} s")


def _hand_over(injector: "Injector") -> bool:
    mind, job = injector.a_mind(), injector.a_job()
    return mind.hand_over(job) and injector.happened("hand-over", job, f"by {mind.name}")


OF_MINDS: dict[str, "Fault"] = {
    **{kind: partial(_mind_dies, kind=kind) for kind in ("mind-crash", "mind-before", "mind-after")},
    "mind-frozen": _mind_frozen,
    "mind-late": _mind_late,
    "mind-cut": _mind_cut,
    "mind-slow": _mind_slow,
    "hand-over": _hand_over,
}
