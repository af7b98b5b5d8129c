"""`relight demo`: the main job, with a fault in its middle."""

from argparse import Namespace

from relight.orchestrator.cli.demo import run as demo


def run(args: Namespace) -> int:
    return demo.run(engine=args.engine, engines=args.engines, fault=args.fault, as_json=args.json)
