"""Which plans of the simulation a mutant is hunted among: those in which its safeguard matters.

An aim changes each seed's plan: other kinds of faults, how often, settings. The rules are always the same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tests.simulate.plan import Plan, swarm


class Aim(NamedTuple):
    """What is changed in each plan."""

    plan: Mapping[str, Any]
    settings: Mapping[str, Any] = {}


FAST = {"load_s": 0.3, "export_s": 0.3, "train_s": 1.0, "turns": 1}
"""A trainer that syncs every few seconds."""

AIMS: Mapping[str, Aim] = {
    "a slow reader": Aim(
        {
            "kinds": ("burst", "mind-slow", "mind-crash", "hand-over", "node-cut", "trainer-crash"),
            "every_s": 3.0,
        },
        {"keep_entries": 10},
    ),
    "a clock behind": Aim({"kinds": ("bus-rollback", "death"), "every_s": 5.0, "behind_s": 30.0}),
    "another bus": Aim({"kinds": ("bus-emptied", "bus-rollback", "death"), "every_s": 20.0}),
    "late commits": Aim({"kinds": ("mind-late", "mind-frozen", "death"), "every_s": 3.0}),
    "older lives": Aim({"kinds": ("agent-lost", "agent-ghost"), "every_s": 3.0}),
    "long leases": Aim({"kinds": ("bus-away", "death"), "every_s": 20.0}, {"lease_s": 30.0}),
    "take-overs": Aim(
        {"kinds": ("hand-over", "mind-crash", "death", "restart", "agent-frozen"), "every_s": 3.0}
    ),
    "old weights": Aim({"kinds": ("republish", "death"), "every_s": 3.0, "pushes": False}),
    "many runs": Aim({"kinds": ("trainer-crash", "trainer-ghost"), "every_s": 3.0}),
    "late orders": Aim(
        {"kinds": ("death", "mind-slow"), "every_s": 2.0, "start_s": 0.5, "stop_s": 0.2, **FAST},
        {"recover_at": "boundary", "restarts": 100, "backoff_s": 0.0},
    ),
    "stuck syncs": Aim(
        {"kinds": ("hang", "stall", "agent-frozen", "trainer-frozen", "death"), "every_s": 5.0},
        {"sync_s": 15.0},
    ),
    "interrupted exports": Aim({"kinds": ("export-cut", "restart", "death"), "every_s": 3.0}),
    "many deaths": Aim({"kinds": ("death", "start-fails"), "every_s": 3.0}, {"restarts": 2}),
    "trimmed decisions": Aim(
        {"kinds": (*["suspicion"] * 20, "agent-frozen"), "every_s": 0.15, "jobs": 1}, {"keep_entries": 10}
    ),
    "a long backlog": Aim({"kinds": ("burst", "burst", "mind-slow", "node-cut"), "every_s": 2.0, "jobs": 1}),
    "holds": Aim({"kinds": ("hold", "hand-over", "mind-crash", "death", "restart"), "every_s": 3.0}),
    "moving versions": Aim(
        {"kinds": ("death", "stream-cut", "restart"), "every_s": 3.0, "same": False, "tokens": 12, **FAST}
    ),
}


def aimed(aim: str, seed: int) -> Plan:
    """The plan of a seed under an aim; without one, as `make simulate` has it."""
    plan = swarm(seed)
    if not aim:
        return plan
    wanted = AIMS[aim]
    settings = msgspec.structs.replace(plan.settings, **wanted.settings)
    return plan._replace(settings=settings, **wanted.plan)
