"""What goes wrong with trainers."""

from typing import TYPE_CHECKING

from relight.events.bus import scripts

if TYPE_CHECKING:
    from tests.simulate.faults.injector import Fault, Injector


def _trainer_dies(injector: "Injector") -> bool:
    job = injector.a_job()
    if not job.trainer.up:
        return False
    injector.happened("trainer-crash", job, "")
    job.trainer.crash()
    return True


def _trainer_ghost(injector: "Injector") -> bool:
    job = injector.a_job()
    if job.trainer.ghost is None or not injector.world.network.up:
        return False
    keys, args = job.trainer.ghost
    injector.happened("trainer-ghost", job, args[0])
    later = list(args)
    at = 3
    while at < len(later):  # under numbers that were not used yet
        later[at] = str(int(later[at]) + 1_000_000)
        at += 2 + int(later[at + 1])
    injector.world.server.eval(scripts.APPEND, keys, later)
    job.trainer.ghost = None
    return True


def _trainer_frozen(injector: "Injector") -> bool:
    job, seconds = injector.a_job(), injector.random.uniform(2.0, 60.0)
    frozen = injector.freeze(job.trainer.process, seconds)
    return frozen and injector.happened("trainer-frozen", job, f"for {seconds:.1f} s")


def _trainer_cut(injector: "Injector") -> bool:
    job, seconds = injector.a_job(), injector.random.uniform(2.0, 60.0)
    cut = injector.cut(job.trainer.link, seconds)
    return cut and injector.happened("trainer-cut", job, f"for {seconds:.1f} s")


def _export_cut(injector: "Injector") -> bool:
    job = injector.a_job()
    return job.trainer.cut_off() and injector.happened("export-cut", job, "")


def _republish(injector: "Injector") -> bool:
    job = injector.a_job()
    return job.trainer.announces_again() and injector.happened("republish", job, "")


def _finish(injector: "Injector") -> bool:
    job = injector.a_job()
    if job.finishing or not job.trainer.up:
        return False
    job.finishing = True
    return True


OF_TRAINERS: dict[str, "Fault"] = {
    "trainer-crash": _trainer_dies,
    "trainer-ghost": _trainer_ghost,
    "trainer-frozen": _trainer_frozen,
    "trainer-cut": _trainer_cut,
    "export-cut": _export_cut,
    "republish": _republish,
    "finish": _finish,
}
