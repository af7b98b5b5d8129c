"""The garbage collector, a thousand jobs and a thousand streams.

By default it looks at the youngest objects whenever some 700 more were made than given back. A thousand
blocked reads do that all the time, and their objects live long enough to be looked at again: 20 ms several
times a second (measured), in which nobody is fenced, for next to no garbage: 24 objects in 8 s. So the more
jobs there are, the more must come together before it looks.

Streams make a dozen objects a token and give them all back. A gateway spent 9% of its time in the collector
(measured by samples at 64 streams), most of it on the modules that it had loaded.
"""

import gc

PER_JOB = 50
"""Objects: for a thousand jobs it looks when there are 50,000 more than before. A look then takes less than
0.1 s, and comes minutes after the last one."""

STREAMS = 10_000
"""Objects, for a process that streams: a look comes once in some thousand tokens."""


def expect(jobs: int) -> None:
    """Suit the collector to so many jobs. Never below what it does by itself."""
    youngest, *older = gc.get_threshold()
    if PER_JOB * jobs > youngest:
        gc.set_threshold(PER_JOB * jobs, *older)


def spare_what_is_loaded() -> None:
    """Never look at what is there now, and seldomly at what comes: for a process that streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(STREAMS, *gc.get_threshold()[1:])
