"""An exhaustive search of the pure core: a small world of everything that can happen, breadth first.

The core is the real one, and so is the trainer's barrier; the node agent is a small model of the real one.
Every state is checked against the rules S1 to S10, and from every state a fault-free tail must settle.
"""
