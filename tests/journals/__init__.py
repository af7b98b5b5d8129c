"""What the core was told in real runs, and what it decided, kept and decided again.

`recording` puts itself between an orchestrator's loop and its core and writes down every call; `runs` are
the real jobs; `replaying` gives the same inputs to the core as it is now and compares byte by byte.
"""
