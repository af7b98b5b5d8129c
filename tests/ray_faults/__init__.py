"""Everything that Ray runs a job on is killed, one thing after the other, and what follows is judged.

Several raylets on one machine stand for as many nodes; engines are stubs. Nobody of relight is asked for its
own opinion: the evidence is both streams, the committed state, /proc, and what Ray lists.
"""
