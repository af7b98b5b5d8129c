"""The replay client: it finishes the very generations that an engine's death interrupted.

Pure parts: `ledger`, `strand` and `params` (what a turn has and may be asked for next), `seam` (stop
strings across two attempts), `drift` (logprobs across them), `routes`, `route` and `picks` (where calls may
go), `toll` (what failures mean for a turn), `request`, `wire` and `sse` (bytes out and in), `tally` and
`metrics` (what it all cost). Around them: `stream` (one attempt over HTTP), `dispatch` and `waiting` (routes
followed on the bus, and who waits for one), `generation` (one turn, in some `speech`), `client`.

The gateway: `gateway` (the server), `answers` and `texts` (its routes), `delivery` and `carried` (which bytes
go out, pure), `streaming`, `refusals`, `passing`.
"""
