"""Processes die between any two of their effects, and what is recovered comes out the same.

An effect is what a process does to the world: a commit, an append, a write to its disk, a start, a signal, a
call. Two points, before and after it, bound each. `victim` runs relight's own commands and dies at the point
that a plan names; `world` is a job of real processes around it; `rules` judges what was seen from outside.
"""
