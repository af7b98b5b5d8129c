"""An application that starts engines for a node agent: `delegating_app.py STATE_DIR ENGINE[,ENGINE] MODE`.

It says on standard output what it does, one line each, and ends with its standard input. MODE says how its
start function behaves; `refused` and whatever else goes wrong on entry is said and ends it with code 3.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable

import relight
from relight.events.errors import RelightError

GO = threading.Event()
"""Set by the line `go` on standard input: for the mode `late`."""


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # whole, whichever thread says it


def start(order: "relight.Order") -> "relight.Started | Iterable[int]":
    mode = sys.argv[3]
    say("asked", order.engine, order.incarnation)
    if mode == "raises":
        raise RuntimeError("no room on device 3")
    if mode == "dies":
        os._exit(9)
    if mode.startswith("pid="):
        return [int(mode.removeprefix("pid="))]
    if mode == "nobody":
        child = subprocess.Popen(["sleep", "60"], user=65534, stdout=subprocess.DEVNULL)
        return [child.pid]
    if mode == "gone":
        child = subprocess.Popen(["true"])
        child.wait()
        return [child.pid]
    if mode == "late":
        order.withdrawn.wait(60)
        say("withdrawn", order.engine, order.incarnation)
        if not GO.wait(60):
            raise TimeoutError("nobody said go")
    child = subprocess.Popen(
        order.command, env=order.environment(), start_new_session=mode != "inside", stdout=subprocess.DEVNULL
    )
    say("started", order.engine, order.incarnation, child.pid)
    return relight.Started([child.pid], on_weights=order.weights is not None)


def ended(engine: str, incarnation: int, why: str) -> None:
    say("ended", engine, incarnation, why)


def main() -> None:
    try:
        with relight.delegate(sys.argv[1], dict.fromkeys(sys.argv[2].split(","), start), ended=ended):
            say("ready", os.getpid())
            for line in sys.stdin:
                if line.strip() == "go":
                    GO.set()
    except RelightError as error:
        say("refused", error)
        sys.exit(3)


if __name__ == "__main__":
    main()
