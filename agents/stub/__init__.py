"""A stub engine: a small real process tree that speaks vLLM's HTTP API, without vLLM or torch.

Three processes as in vLLM: the API server (`server`), the engine core (`core`) and a worker (`worker`).
Tokens are a known function of the weights' content and of the tokens so far (`tokens`), so one token lost,
doubled or shifted changes everything that follows. Faults are knobs (`knobs`). Start it with
`python -m relight.agents.stub --model DIR --port N`.
"""
