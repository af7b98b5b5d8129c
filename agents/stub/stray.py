"""A process that stays when the engine goes: it ignores SIGTERM and ends after some seconds by itself.

`stray TITLE [FD] SECONDS [daemonise]`: with an inherited listening socket it holds that port.
"""

import os
import signal
import sys


def main() -> None:
    """Wait for the end of the given seconds, or for SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    daemonise = sys.argv[-1] == "daemonise"
    seconds = float(sys.argv[-2 if daemonise else -1])
    if daemonise and os.fork():
        os._exit(0)
    signal.sigtimedwait({signal.SIGUSR1}, seconds)


if __name__ == "__main__":
    main()
