"""What is wrong with a node file is told in one sentence, with its path and its value."""

import os
from pathlib import Path

import pytest

from relight.agents.node import config, environ
from relight.agents.node.config import Engine
from relight.events.errors import UsageError

GOOD = """
job = "grpo-1"
node = "node-a"
state_dir = "{state}"

[[engines]]
name = "node-a-0"
kind = "vllm"
command = ["python3", "-m", "server", "--port", "{{port}}"]
env = {{ VLLM_SERVER_DEV_MODE = "1" }}
"""


def _load(tmp_path: Path, text: str) -> config.NodeFile:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return config.load(path)


def _good(tmp_path: Path) -> str:
    return GOOD.format(state=tmp_path / "state")


def test_the_file_of_the_design_is_read(tmp_path: Path) -> None:
    file = _load(tmp_path, _good(tmp_path))
    assert (file.job, file.node, file.engines[0].name) == ("grpo-1", "node-a", "node-a-0")
    assert file.engines[0].command[-1] == "{port}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "vllm"', 'kind = "sglang"', ["$.engines[0].kind", "sglang"]),
        ('kind = "vllm"', "grace = 3", ["unknown field `grace`", "$.engines[0]", "3"]),
        ('kind = "vllm"', 'stall_s = "long"', ["$.engines[0].stall_s", "long"]),
        ('kind = "vllm"', "stall_s = -1", ["$.engines[0].stall_s", "-1"]),
        ('kind = "vllm"', "stall_s = nan", ["$.engines[0].stall_s", "nan"]),
        ('kind = "vllm"', "port = 99999", ["$.engines[0].port", "99999"]),
        ('kind = "vllm"', 'model = "/no/such/model"', ["$.engines[0].model", "/no/such/model"]),
        ('"python3"', '"no-such-program"', ["$.engines[0].command[0]", "no-such-program"]),
        ('"{port}"', '"8000"', ["$.engines[0].command", "{port}"]),
        ('"--port"', '"--model", "/no/such/dir", "--port"', ["--model", "/no/such/dir"]),
        ('"--port"', '"--model", "{weights}", "--port"', ["{weights}", "model"]),
        ('"--port"', '"--shutdown-timeout", "30", "--port"', ["30", "grace_s 10"]),
        ('job = "grpo-1"', 'job = "GRPO 1"', ["GRPO 1"]),
        ('node = "node-a"', "node = 7", ["$.node", "7"]),
        ('node = "node-a"', 'node = "A"', ["$.node", "'A'"]),
        ('name = "node-a-0"', 'name = "E_0"', ["$.engines[0].name", "'E_0'"]),
        ('state_dir = "', 'state_dir = "" # ', ["$.state_dir", "''"]),
        ('kind = "vllm"', 'model = ""', ["$.engines[0].model", "''"]),
        ('kind = "vllm"', 'how = ["fork"]', ["$.engines[0].how", "['fork']", "'cold' must be among them"]),
        ('VLLM_SERVER_DEV_MODE = "1"', "A = 1", ["$.engines[0].env", "{'A': 1}"]),
        ('"-m", "server"', '"serve", "/no/such/dir"', ["$.engines[0].command", "serve '/no/such/dir'"]),
        ("[[engines]]", "[[engine]]", ["unknown field `engine`"]),
        ('kind = "vllm"', 'launcher = "ray"', ["$.engines[0].launcher", "ray"]),
        ('kind = "vllm"', 'evidence = ["no-such-spy", "{pid}"]', ["$.engines[0].evidence[0]", "no-such-spy"]),
        ("command = [", "after_start = [] # [", ["$.engines[0].command", "empty"]),
        ("job", "job job", ["not TOML"]),
        ('"--port"', '"a\\u0000b", "--port"', ["$.engines[0].command[", "NUL"]),
        ('state_dir = "', 'state_dir = "/\\u0000" # ', ["$.state_dir", "NUL"]),
        ('VLLM_SERVER_DEV_MODE = "1"', '"A=B" = "1"', ["$.engines[0].env", "'A=B'", "no name of a variable"]),
        ('VLLM_SERVER_DEV_MODE = "1"', '"" = "1"', ["$.engines[0].env", "''", "no name of a variable"]),
    ],
)
def test_a_wrong_node_file_is_refused_with_path_and_value(
    tmp_path: Path, old: str, new: str, said: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        _load(tmp_path, _good(tmp_path).replace(old, new, 1))
    for text in said:
        assert text in str(refused.value)


def test_an_engine_that_an_application_starts_needs_no_command(tmp_path: Path) -> None:
    text = _good(tmp_path).replace("command = [", 'launcher = "delegated" # [')
    assert _load(tmp_path, text).engines[0].command == ()


def test_two_engines_of_one_name_are_refused(tmp_path: Path) -> None:
    text = _good(tmp_path)
    with pytest.raises(UsageError, match=r"\$\.engines\[1\]\.name 'node-a-0' stands twice"):
        _load(tmp_path, text + text[text.index("[[engines]]") :])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml"):
        config.load(tmp_path / "absent.toml")


def test_one_engine_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    file = config.one_engine("grpo-1", "engine-0", ["python3", "--port", "{port}"])
    assert file.node.endswith("-engine-0")
    assert file.state_path == tmp_path / "relight/grpo-1" / file.node
    assert file.engines[0].env["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(UsageError, match=r"^command\[0\] 'no-such-program' is no program"):
        config.one_engine("grpo-1", "engine-0", ["no-such-program", "{port}"])
    with pytest.raises(UsageError, match="Engine 0"):
        config.one_engine("grpo-1", "Engine 0", ["python3", "{port}"])


def test_the_environment_is_inherited_less_what_misleads() -> None:
    inherited = {
        "PATH": os.environ["PATH"],
        "HF_HOME": "/cache",
        "VLLM_PORT": "tcp://1.2.3.4:80",
        "VLLM_SERVICE_HOST": "1.2.3.4",
        "CUDA_VISIBLE_DEVICES": "7",
        "MASTER_PORT": "29500",
        "RELIGHT_BUS_URL": "redis://:secret@host",
        "TMPDIR": "/somewhere",
    }
    engine = Engine(
        name="e0", command=("python3", "{port}"), env={"A": "{port}-{other}", "CUDA_VISIBLE_DEVICES": "0"}
    )  # type: ignore[arg-type]
    made = environ.environment(engine, tag="tag", tmpdir="/tmp/x", words={"port": "9"}, inherited=inherited)
    assert made["HF_HOME"] == "/cache"
    assert made["A"] == "9-{other}"
    assert made["CUDA_VISIBLE_DEVICES"] == "0"
    assert made["TMPDIR"] == made["VLLM_RPC_BASE_PATH"] == "/tmp/x"
    assert made["VLLM_PROCESS_NAME_PREFIX"] == made["RELIGHT_TAG"] == "tag"
    assert not {"VLLM_PORT", "VLLM_SERVICE_HOST", "MASTER_PORT", "RELIGHT_BUS_URL"} & made.keys()


def test_a_preferred_way_to_start_that_is_not_supported_is_passed_over_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = _good(tmp_path)
    assert _load(tmp_path, cold).engines[0].how == ("cold",) and not caplog.records
    _load(tmp_path, cold + 'how = ["fork", "cold"]\n')
    (told,) = [each.getMessage() for each in caplog.records]
    assert "only cold starts" in told and "$.engines[0].how" in told and "fork" in told
