"""How fast the replay client and the gateway are, and whether they stay right under random kills.

`python -m benchmarks.replay` measures, `python -m benchmarks.replay.soak` kills.
"""
