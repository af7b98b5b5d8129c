"""The whole protocol in virtual time, from one seed: no sockets, no asyncio, no real clock.

What is real: the core, the term and its tenure, silence, the whole of `events.bus` with its Lua scripts in a
Lua of their own, the follower, the publisher, the trainer's barrier, gate, patience and rules, the client's
dispatch, routes, generations and ledger. Their clocks, sleeps and task groups are the kernel's (`stage`).

What is modelled: the server's data (`server`) and the network to it (`link`), the agent's slot and its
processes (`tests.search`, `agent`, `machine`), the trainer's threads (`trainer`), the HTTP of calls
(`machine.Flight`), and the ticks of the orchestrator's process (`mind`). Each says what it mirrors.

Each seed has a plan of its own (`plan`), meets faults of some kinds (`faults`) and must settle after them
(`settle`). The rules are asked of each step (`rules`).
"""
