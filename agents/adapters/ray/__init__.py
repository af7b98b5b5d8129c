"""Ray as the engine of distribution: a job's placement group, and in each of its bundles one node agent.

```
ray up ──► overseer (an actor)  keeps one holder in each bundle
             └► holder (an actor)  holds the bundle, keeps one agent running on its node
                  └· agent (a process of its own)  owns the engines there; bound to the raylet
```

A holder is nobody's parent: an actor's death ends no agent and no engine, and its successor finds the agent
again. An agent whose raylet has ended has lost what was reserved for it: it stops its engines and ends.
"""
