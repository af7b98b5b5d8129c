"""Safeguards of those who obey: trainers, clients, followers."""

from tests.mutants.patch import Patch

OF_HANDS = (
    Patch(
        "a trainer takes orders for boundaries that are closed",
        "agents/trainer/turns.py",
        "    if not barrier.open or order.boundary < barrier.boundary:",
        "    if False:",
        aim="late orders",
        seed=1,
    ),
    Patch(
        "a fence frees nobody",
        "agents/replay/routes.py",
        "        return [Freed(route, drain_s, why, planned)]",
        "        return []",
        seed=0,
    ),
    Patch(
        "kept tokens are generated again",
        "agents/replay/ledger.py",
        "        asked = continued(self._params, kept=kept, attempt=attempt)",
        "        asked = dict(self._params)",
        seed=1,
    ),
    Patch(
        "tokens of no certain version are continued",
        "agents/replay/ledger.py",
        "        if why := self._rules.replayed or self._doubt:",
        "        if why := self._rules.replayed:",
        aim="moving versions",
        seed=0,
    ),
)
