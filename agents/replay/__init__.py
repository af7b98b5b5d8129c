"""The replay client: it finishes the very generations that an engine's death interrupted.

Pure parts: `ledger`, `strand` and `params` (what a turn has and may be asked for next), `seam` (stop
strings across two attempts), `routes` (where calls may go), `wire` and `sse` (bytes to chunks). Around them:
`stream` (one attempt over HTTP), `dispatch` (routes followed on the bus), `generation` (one turn), `client`,
`gateway` and its `answers`.
"""
