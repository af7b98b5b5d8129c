"""`python -m relight.agents.stub --model DIR --host 127.0.0.1 --port N [knobs]`: the server process."""

from relight.agents.stub.server import main

if __name__ == "__main__":
    main()
