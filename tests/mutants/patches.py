"""The mutants: one line of the product each, with what stands there instead.

`before` is a line, or a part of one, that occurs exactly once in its file; a test looks at every patch, so
that none of them outlives what it is about.
"""

from typing import NamedTuple


class Patch(NamedTuple):
    """One safeguard that is taken away."""

    name: str
    path: str
    before: str
    after: str
    plan: str = ""
    """The plan of the search that is tried first, where the simulation is not likely to meet it."""


CORE = "orchestrator/core/"

PATCHES = (
    # --- one writer ---------------------------------------------------------------------------------
    Patch(
        "a commit needs no lease",
        "events/bus/scripts.py",
        "if redis.call('GET', KEYS[1]) ~= ARGV[1] or commit",
        "if commit",
    ),
    Patch(
        "a commit may be out of turn",
        "events/bus/scripts.py",
        " or commit ~= ARGV[3] or ",
        " or ",
    ),
    Patch(
        "the cursor is not part of the commit",
        "events/bus/scripts.py",
        "redis.call('HSET', KEYS[2], 'commit', ARGV[4], 'epoch', ARGV[2], 'cursor', ARGV[5], 'tail', tail)",
        "redis.call('HSET', KEYS[2], 'commit', ARGV[4], 'epoch', ARGV[2], 'tail', tail)",
    ),
    Patch(
        "a fact that is appended again stands twice",
        "events/bus/scripts.py",
        "  if tonumber(ARGV[at]) > tonumber(last) then",
        "  if true then",
    ),
    Patch(
        "an older life of a source may speak",
        "events/bus/scripts.py",
        "  elseif ARGV[3] ~= '1' then",
        "  elseif false then",
    ),
    Patch(
        "unread facts are trimmed",
        "events/bus/scripts.py",
        "  if #unread < keep then",
        "  if true then",
    ),
    Patch(
        "epochs are counted by the bus alone",
        "events/bus/scripts.py",
        "  tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))",
        "  0)",
    ),
    Patch(
        "a lost lease goes on",
        "orchestrator/tenure.py",
        "        if self.over is None and time.monotonic() >= self._until_s:",
        "        if False:",
    ),
    Patch(
        "a refused commit is success",
        "events/bus/job.py",
        '        if verdict == "REFUSED" and (int(epoch), int(number)) != (lease.epoch, commit.number):',
        '        if verdict == "NEVER":',
    ),
    Patch(
        "a lost reply to a commit is a lost lease",
        "events/bus/job.py",
        '        if verdict == "REFUSED" and (int(epoch), int(number)) != (lease.epoch, commit.number):',
        '        if verdict == "REFUSED":',
    ),
    Patch(
        "a higher epoch of an agent is passed over",
        "orchestrator/term.py",
        "        if isinstance(fact, NodeUp) and fact.max_epoch > self._tenure.lease.epoch:",
        "        if False:",
    ),
    # --- silence ------------------------------------------------------------------------------------
    Patch(
        "no grace after an outage",
        "orchestrator/term.py",
        "            self._silence.forgive()",
        "            pass",
    ),
    Patch(
        "silence is judged before the backlog is read",
        "orchestrator/term.py",
        "        if not self._caught_up:",
        "        if False:",
    ),
    Patch(
        "a silent node keeps its routes",
        CORE + "table.py",
        "        rows[phase, NodeSilent] = {always: Phase.SILENT}",
        "        rows[phase, NodeSilent] = {always: phase}",
    ),
    Patch(
        "a node that returns is trusted",
        CORE + "table.py",
        "    shows_up_on_the_jobs_version: Phase.VERIFYING,",
        "    shows_up_on_the_jobs_version: Phase.SERVING,",
    ),
    # --- taking over --------------------------------------------------------------------------------
    Patch(
        "nobody is asked when an epoch begins",
        CORE + "step.py",
        "        nodes.ask_report(work, node, reason=reason)",
        "        pass",
    ),
    Patch(
        "a start needs no report of its node",
        CORE + "enter.py",
        "    if not work.reported(engine.node) or work.meta.finished or work.meta.hold:",
        "    if work.meta.finished or work.meta.hold:",
    ),
    Patch(
        "a report of before is an answer",
        CORE + "nodes.py",
        "    return fact.answers == asked.id or fact.max_epoch >= work.epoch",
        "    return True",
        plan="two faults",
    ),
    Patch(
        "open steps are not asked for again",
        CORE + "nodes.py",
        "    if work.engines[name].phase is before.phase and before.intent is not None:",
        "    if False:",
    ),
    Patch(
        "another server's routes are trusted",
        CORE + "step.py",
        "    if job.meta.bus != bus:",
        "    if False:",
    ),
    # --- proof --------------------------------------------------------------------------------------
    Patch(
        "a death proves that it is gone",
        CORE + "table.py",
        "(phase, kind): {always: Phase.STOPPING} for phase in ALIVE",
        "(phase, kind): {always: Phase.BACKOFF} for phase in ALIVE",
    ),
    Patch(
        "a stop that failed is a proof",
        CORE + "table.py",
        "        (Phase.STOPPING, StopFailed): {always: Phase.STOPPING},",
        "        (Phase.STOPPING, StopFailed): {always: Phase.BACKOFF},",
    ),
    Patch(
        "a start is a proof of the weights",
        CORE + "table.py",
        "{on_the_jobs_version: Phase.VERIFYING, always: Phase.STALE}",
        "{always: Phase.VERIFYING}",
    ),
    Patch(
        "a load is a proof of the weights",
        CORE + "table.py",
        "            loaded_the_jobs_version: Phase.VERIFYING,",
        "            loaded_the_jobs_version: Phase.SERVING,",
    ),
    Patch(
        "a proof of something else opens the route",
        CORE + "guards.py",
        "    answered = case.engine.intent is None",
        "    answered = True",
        plan="two faults",
    ),
    Patch(
        "the answer to an older question is a proof",
        CORE + "absorb.py",
        "    if fact.answers != engine.intent.id:  # the proof of something that was asked before",
        "    if False:",
        plan="two faults",
    ),
    Patch(
        "an older incarnation's words count",
        CORE + "step.py",
        "    elif fact.incarnation == engine.incarnation:",
        "    elif fact.incarnation <= engine.incarnation:",
    ),
    Patch(
        "a fence leaves the route in the state",
        CORE + "job.py",
        "        self.put(name, route=None)",
        "        pass",
    ),
    # --- weights ------------------------------------------------------------------------------------
    Patch(
        "a new run takes no route",
        CORE + "boundary.py",
        "        _new_run(work, fact)",
        "        work.learn(run=fact.run, version=fact.version, finished=False)",
    ),
    Patch(
        "an older run's words count",
        CORE + "boundary.py",
        "    if fact.run < meta.run:",
        "    if False:",
    ),
    Patch(
        "versions may go backwards",
        CORE + "sync.py",
        "    if work.meta.version is not None and version <= work.meta.version:",
        "    if False:",
    ),
    Patch(
        "a push that was cut off touched nobody",
        CORE + "sync.py",
        "    touched = cut_off and _pushes(work, sync.order)",
        "    touched = False",
    ),
    Patch(
        "the close of a boundary voids no sync",
        CORE + "boundary.py",
        "    if sync is not None and sync.order.boundary == fact.boundary and not written:",
        "    if False:",
    ),
    Patch(
        "a silent trainer keeps its boundary",
        CORE + "boundary.py",
        "    work.learn(boundary=None, trainer_silent=True)",
        "    work.learn(trainer_silent=True)",
    ),
    Patch(
        "two syncs may be open",
        CORE + "sync.py",
        "    if work.meta.sync is not None or boundary.exports != work.meta.version:",
        "    if boundary.exports != work.meta.version:",
    ),
    Patch(
        "healthy engines are synced with the stale ones",
        CORE + "sync.py",
        '        return boundary.sync == "all" and engine.version != boundary.exports',
        "        return True",
    ),
    Patch(
        "a boundary is released before its members are routed",
        CORE + "boundary.py",
        "    return engine.phase in (Phase.SYNCING, Phase.VERIFYING)",
        "    return False",
    ),
    Patch(
        "a sync has no deadline",
        CORE + "sync.py",
        "    if sync is None or work.now < sync.order.deadline:",
        "    if True:",
    ),
    Patch(
        "an open step has no deadline",
        CORE + "timers.py",
        "    return engine.intent.deadline",
        "    return None",
    ),
    # --- budgets and operators ----------------------------------------------------------------------
    Patch(
        "restarts have no budget",
        CORE + "budget.py",
        "    return len(inside_window(work, engine)) < work.settings.restarts",
        "    return True",
    ),
    Patch(
        "starts have no limit",
        CORE + "enter.py",
        "    return here < work.settings.starts_per_node and len(starting) < work.settings.starts_per_job",
        "    return True",
    ),
    Patch(
        "what an operator took out is started again",
        CORE + "guards.py",
        '    return case.engine.then == "restart" and budget.left(case.work, case.engine)',
        "    return budget.left(case.work, case.engine)",
    ),
    Patch(
        "a hold does not hold",
        CORE + "restraint.py",
        "    return meta.hold or (engine.recovery is not None and not engine.recovery.approved)",
        "    return engine.recovery is not None and not engine.recovery.approved",
    ),
    # --- agents, trainers, clients ------------------------------------------------------------------
    Patch(
        "a trainer takes orders for boundaries that are closed",
        "agents/trainer/turns.py",
        "    if not barrier.open or order.boundary < barrier.boundary:",
        "    if False:",
    ),
    Patch(
        "a trainer obeys a lost epoch",
        "agents/trainer/turns.py",
        "    if decision.epoch < barrier.epoch:",
        "    if False:",
    ),
    Patch(
        "a client obeys a lost epoch",
        "agents/replay/routes.py",
        "        if decision.epoch < self.epoch or decision.dry_run:",
        "        if decision.dry_run:",
    ),
    Patch(
        "a client takes an older incarnation's route",
        "agents/replay/routes.py",
        "        if key.incarnation < self._highest.get(key.engine, 0):",
        "        if False:",
    ),
    Patch(
        "a fence frees nobody",
        "agents/replay/routes.py",
        "        return [Freed(route, drain_s, why)]",
        "        return []",
    ),
    Patch(
        "kept tokens are generated again",
        "agents/replay/ledger.py",
        "        asked = continued(self._params, kept=kept, attempt=attempt)",
        "        asked = dict(self._params)",
    ),
    Patch(
        "tokens of no certain version are continued",
        "agents/replay/ledger.py",
        "        if why := self._rules.replayed or self._doubt:",
        "        if why := self._rules.replayed:",
    ),
    Patch(
        "a follower passes over gaps",
        "events/bus/follow.py",
        "        if entry.after != self._last:",
        "        if False:",
    ),
    Patch(
        "a follower does not see another bus",
        "events/bus/follow.py",
        "        return birth != self._known.birth or stamp != self._stamp",
        "        return False",
    ),
)
