"""`python -m relight.orchestrator.cli`: the `relight` command."""

import sys

from relight.orchestrator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
