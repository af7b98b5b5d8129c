"""A Ray cluster of several raylets on this machine, and the job's file for `relight ray up`."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from relight.orchestrator.cli.demo import layout
from relight.orchestrator.cli.demo.evidence import Plan
from relight.orchestrator.cli.demo.layout import Place

JOB_FILE = """\
job = {job}
state_dir = {state}
{engines}
[ray]
address = {address}
bundles = {bundles}
resources = {{ CPU = 1 }}
strategy = "STRICT_SPREAD"
"""
ENGINE = """
[[engines]]
name = {name}
model = {model}
stall_s = 5.0
command = {command}

[engines.env]
{env}
"""


@contextmanager
def standing(place: Place, *, nodes: int) -> Generator[str]:
    """The address of a cluster with a head that holds nothing and so many nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    os.environ.update(layout.environment(place), RAY_TMPDIR=str(place.root))  # raylets inherit it
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(place.root / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def write_job(place: Place, plan: Plan, *, job: str, address: str) -> Path:
    """One engine a bundle, each with the demo's vLLM and its tiny model."""
    command, env = layout.command_of(plan.kind)
    engines = "".join(
        ENGINE.format(
            name=json.dumps(name),
            model=json.dumps(str(place.base)),
            command=json.dumps(command),
            env="\n".join(f"{key} = {json.dumps(value)}" for key, value in env.items()),
        )
        for name in plan.engines
    )
    path = place.root / "job.toml"
    path.write_text(
        JOB_FILE.format(
            job=json.dumps(job),
            state=json.dumps(str(place.state)),
            engines=engines,
            address=json.dumps(address),
            bundles=len(plan.engines),
        )
    )
    return path
