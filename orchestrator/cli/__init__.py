"""The command line, and the composition root: the only part of the orchestrator's room that imports agents.

Building the parser imports nothing heavy; each command imports what it needs when it runs.
"""
