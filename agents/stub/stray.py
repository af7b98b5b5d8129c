"""A process that stays when the engine goes: it has left the tree, ignores SIGTERM and ends by itself.

`stray TITLE [FD] SECONDS`: with an inherited listening socket it holds that port. The process that was
started ends as soon as the stray is on its own, so the starter waits for that.
"""

import os
import signal
import sys


def main() -> None:
    """Leave the parent, then wait for the given seconds or for SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    signal.sigtimedwait({signal.SIGUSR1}, float(sys.argv[-1]))


if __name__ == "__main__":
    main()
