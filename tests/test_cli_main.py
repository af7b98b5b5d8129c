"""From words to exit codes: what is wrong is one sentence, never a traceback, and nothing is left running."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from relight.agents.replay import client
from relight.events.bus.embedded import Embedded, embedded
from relight.events.errors import BusUnavailable, Fenced, RelightError
from relight.orchestrator.cli import main as cli
from relight.orchestrator.cli import parser
from relight.orchestrator.cli.main import main
from tests import cli_job

RELIGHT = [sys.executable, "-m", "relight.orchestrator.cli"]
NODE_FILE = """
job = "grpo-1"
node = "node-a"
state_dir = "{state}"
[[engines]]
name = "node-a-0"
kind = "vllm"
command = ["python3", "-m", "relight.agents.stub", "--model", "{model}", "--port", "{{port}}"]
"""


@pytest.fixture(autouse=True)
def no_bus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIGHT_BUS_URL", raising=False)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence that a command ends with, with code 2 and nothing on standard output."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("relight: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err.removeprefix("relight: ").strip()


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["events", "--follow"],
        ["explain", "e0"],
        ["restart", "e0"],
        ["orchestrate"],
        ["agent", "--job", "grpo-1", "--", "true", "{port}"],
        ["gateway", "--job", "grpo-1"],
        ["dashboard"],
    ],
    ids=lambda words: words[0],
)
def test_each_command_that_needs_a_bus_asks_for_one_and_names_one_that_is_away(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(client, "BUS_S", 0.1)  # clients wait for a bus that is just being started
    assert refused(capsys, *words) == "no bus is named: give --bus URL or set RELIGHT_BUS_URL"
    monkeypatch.setenv("RELIGHT_BUS_URL", "redis://127.0.0.1:1")
    assert main(words) == 2
    assert "relight: bus redis://127.0.0.1:1 cannot be reached: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost:1", "http://localhost:1"),
        ("localhost:6380", "localhost:6380"),
        ("redis://localhost:port", "redis://localhost:port"),
        ("redis://me:secret@[::1", "redis://me:***@[::1"),
        ("redis://localhost:1?colour=blue", "colour"),
        ("unix:///no/such/socket", "unix:///no/such/socket cannot be reached"),
    ],
)
def test_a_wrong_bus_is_named_without_its_password(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "status", "--bus", url)
    assert said in sentence and "secret" not in sentence


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["status", "--format", "xml"], "invalid choice: 'xml'"),
        (["status", "--", "x"], "relight status takes nothing after --"),
        (["bus", "--port", "70000"], "argument --port: 70000 is no port"),
        (["bus", "--port", "x"], "argument --port: x is no port"),
        (["events", "--count", "x"], "argument --count: x is no whole number"),
        (["demo", "--engines", "0"], "argument --engines: 0 is less than 1"),
        (["demo", "--engines", "17"], "argument --engines: 17 is more than 16"),
        (["demo", "--fault", "rain"], "invalid choice: 'rain'"),
        (["events", "--count", "0"], "argument --count: 0 is less than 1"),
        (["gateway"], "the following arguments are required: --job"),
    ],
)
def test_wrong_words_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["agent"], "relight agent needs --config FILE, or --job NAME and a command after --"),
        (["agent", "--job", "j"], "relight agent needs --config FILE, or --job NAME and a command after --"),
        (["agent", "--", "true"], "relight agent needs --config FILE, or --job NAME and a command after --"),
        (["agent", "--config", "f", "--job", "j"], "not both"),
        (["agent", "--job", "Not A Slug", "--", "true"], "job name 'Not A Slug' must match"),
        (["agent", "--job", "j", "--name", "_", "--", "true"], "engine name '_' must match"),
        (["agent", "--config", "/nowhere/node.toml"], "/nowhere/node.toml"),
        (["orchestrate", "--job", "J"], "job name 'J' must match"),
        (
            ["orchestrate", "--config", "/nowhere.toml"],
            "configuration /nowhere.toml cannot be read: No such file",
        ),
        (["gateway", "--job", "J"], "job name 'J' must match"),
        (["status", "--job", "J"], "job name 'J' must match"),
        (["status", "--bus", "http://x"], "bus URL 'http://x'"),
        (["config", "check", "/nowhere.toml"], "configuration /nowhere.toml cannot be read: No such file"),
    ],
)
def test_wrong_values_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    cut = words.index("--") if "--" in words else len(words)
    bus = [] if words[0] == "config" or "--bus" in words else ["--bus", "redis://127.0.0.1:1"]
    assert said in refused(capsys, *words[:cut], *bus, *words[cut:])


def test_help_names_every_command_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("demo", "bus", "orchestrate", "agent", "gateway", "status", "events", "explain", "restart"):
        assert f"\n    {name} " in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("relight ")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BusUnavailable("away"), 2, "relight: away\n"),
        (Fenced("another one"), 2, "relight: another one\n"),
        (RelightError("broken"), 1, "relight: broken\n"),
        (
            ExceptionGroup("", [RelightError("a"), ExceptionGroup("", [Fenced("b")])]),
            2,
            "relight: a\nrelight: b\n",
        ),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing:
        @staticmethod
        def run(_: object) -> int:
            raise error

    monkeypatch.setattr(cli, "import_module", lambda _: Failing)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == said


def test_a_bug_of_ours_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        @staticmethod
        def run(_: object) -> int:
            raise ExceptionGroup("", [RelightError("a"), ValueError("a bug")])

    monkeypatch.setattr(cli, "import_module", lambda _: Failing)
    with pytest.raises(ExceptionGroup):
        main(["demo"])


# --- configuration ---------------------------------------------------------------------------------


def test_a_node_file_is_known_by_its_content(
    tmp_path: Path, stub_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text(NODE_FILE.format(state=tmp_path, model=stub_model))
    assert main(["config", "check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[:-1] == ["kind: node", "job: grpo-1", "node: node-a", "engines: ['node-a-0']"]
    assert lines[-1].startswith("snapshots: {'node-a-0': {'bytes': ")


def test_the_bytes_and_seconds_of_a_snapshot_are_told(
    tmp_path: Path, stub_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text(NODE_FILE.format(state=tmp_path, model=stub_model))
    words = ["config", "check", str(file), "--format", "json", "--snapshots"]
    assert main([*words, str(tmp_path)]) == 0
    (size,) = json.loads(capsys.readouterr().out)["snapshots"].values()
    assert size["bytes"] == (stub_model / "model.safetensors").stat().st_size
    assert 0 <= size["proof_s"] < 60 and 0 <= size["write_s"] < 60
    assert not list(tmp_path.glob(".relight-probe*"))
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_an_orchestrators_file_is_known_by_its_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[defaults]\nfloor = 2\n[jobs.grpo-1]\nrecover_at = "snapshot"\n')
    assert main(["config", "check", str(file), "--format", "json"]) == 0
    assert '"defaults":{"floor":2},"jobs":{"grpo-1":{"recover_at":"snapshot"}}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is neither a node file"),
        ("colour = 1", "is neither a node file"),
        ("= 1", "x.toml"),
        ("[defaults]\nflour = 2\n", "flour"),
        ('[defaults]\nfloor = "two"\n', "$.floor` (value 'two')"),
        ("[defaults]\nfloor = -1\n", "not -1"),
        ("[defaults]\nlease_s = 0\n", "lease_s must be 1 or more, not 0"),
        ("[defaults]\nlease_s = 1e306\n", "lease_s must be a number from 0 to 1e+09, not 1e+306"),
        ("[defaults]\nfloor = " + "[" * 5_000, "is not TOML"),
        ("[defaults]\nfloor = " + "9" * 5_000, "is not TOML"),
        ("a" + ".a" * 50 + " = 1", "is more than 32 tables deep"),
        ("a" + ".a" * 5_000 + " = 1", "is more than 32 tables deep"),
        ('[jobs.a]\nrecover_at = "dusk"\n', "jobs.a: Invalid enum value 'dusk'"),
        ("[jobs.Big]\nfloor = 2\n", "job name 'Big' must match"),
        ('job = "j"\nnode = "n"\nstate_dir = "/s"\nengine = []\n', "engine"),
        ('job = "j"\nnode = 3\nstate_dir = "/s"\nengines = []\n', "$.node"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    sentence = refused(capsys, "config", "check", str(file))
    assert said in sentence and "x.toml" in sentence


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_file_that_cannot_be_read_twice_or_to_its_end_is_refused(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "x.toml")
    assert "is no regular file" in refused(capsys, "config", "check", str(tmp_path / "x.toml"))


def test_a_file_that_cannot_be_looked_at_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "File name too long" in refused(capsys, "config", "check", str(tmp_path / ("a" * 300)))


# --- signals, pipes and what is left ---------------------------------------------------------------


@contextmanager
def running(*words: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """A command of its own process; killed if the test leaves it running."""
    with subprocess.Popen(
        [*RELIGHT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_bus_in_the_foreground_ends_as_asked_and_leaves_nothing(
    how: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running("bus", "--port", "0", "--dir", tmp_path) as bus:
        url = first_line(bus)
        assert main(["status", "--bus", url]) == 2  # it answers: there is no job yet
        [server] = psutil.Process(bus.pid).children()
        bus.send_signal(how)
        _, err = bus.communicate(timeout=20)
    assert bus.returncode == code, err
    assert not server.is_running()
    assert "bus is up url=redis://127.0.0.1:" in err and "Traceback" not in err


def test_a_bus_whose_server_dies_fails_and_says_where_to_look(tmp_path: Path) -> None:
    with running("bus", "--port", "0", "--dir", tmp_path) as bus:
        first_line(bus)
        [server] = psutil.Process(bus.pid).children()
        server.kill()
        _, err = bus.communicate(timeout=20)
    assert bus.returncode == 1
    assert f"ended with code -9; see {tmp_path}/log" in err


def test_a_used_port_and_a_used_directory_are_named(
    server: Embedded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "bus", "--port", str(server.port), "--dir", str(tmp_path / "other"))
    assert said == f"port {server.port} on 127.0.0.1 is in use"
    said = refused(capsys, "bus", "--port", "0", "--dir", str(server.directory))
    assert said.startswith(f"bus directory {server.directory} is in use by the server with pid ")


def test_following_tells_what_comes_and_ends_on_sigterm(server: Embedded) -> None:
    anyio.run(cli_job.record, server.url)
    with running("events", "--follow", "--type", "RestartRequested", "--bus", server.url) as events:
        while True:  # the wish may stand before the follower's start, which tells the last ones first
            assert main(["restart", "e0", "--bus", server.url]) == 0
            if "RestartRequested  e0.2" in first_line(events):
                break
        events.terminate()
        _, err = events.communicate(timeout=20)
    assert (events.returncode, err) == (0, "")


def test_following_outlives_a_bus_that_is_away(tmp_path: Path, free_port: int) -> None:
    url = f"redis://127.0.0.1:{free_port}"
    with ExitStack() as stack:
        with embedded(tmp_path, port=free_port):
            anyio.run(cli_job.record, url)
            events = stack.enter_context(running("events", "--follow", "--count", "1", "--bus", url))
            first_line(events)
        stack.enter_context(embedded(tmp_path, port=free_port))
        assert events.stderr is not None
        assert f"bus {url} cannot be reached" in events.stderr.readline()
        assert main(["restart", "e1", "--bus", url]) == 0
        while "RestartRequested" not in first_line(events):
            pass
        events.send_signal(signal.SIGINT)
        assert events.wait(20) == 130


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_a_pipe_that_nobody_reads_any_more_is_no_error(server: Embedded, follow: list[str]) -> None:
    anyio.run(cli_job.record, server.url)
    with running("events", *follow, "--bus", server.url) as events:
        first_line(events)
        assert events.stdout is not None and events.stderr is not None
        events.stdout.close()
        assert events.wait(20) == 0
        assert events.stderr.read() == ""


def test_a_full_disk_is_one_sentence(server: Embedded) -> None:
    anyio.run(cli_job.record, server.url)
    with Path("/dev/full").open("w") as full:
        words = [*RELIGHT, "events", "--bus", server.url]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "relight: cannot write to the output or a file: No space left on device\n",
    )


def test_closed_streams_are_no_error(server: Embedded) -> None:
    anyio.run(cli_job.record, server.url)
    words = shlex.join([*RELIGHT, "status", "--bus", server.url])
    done = subprocess.run(["sh", "-c", f"exec {words} <&- >&-"], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_that_is_not_there_is_named(
    server: Embedded, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["agent", "--bus", server.url, "--job", "j", "--", "no-such-command", "{port}"]) == 2
    assert "no-such-command" in capsys.readouterr().err


def test_the_gateways_used_port_is_named(server: Embedded, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["gateway", "--bus", server.url, "--job", "j", "--port", str(port)]) == 2
    assert f"gateway cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    assert main(["gateway", "--bus", server.url, "--job", "j", "--host", "nowhere.invalid"]) == 2
    assert "gateway cannot listen on nowhere.invalid:8100: " in capsys.readouterr().err


STUBBORN = """
import anyio
from relight.orchestrator.cli import running

async def main():
    try:
        print("up", flush=True)
        await anyio.sleep_forever()
    finally:
        print("ending", flush=True)
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()

running.lasting(main)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_what_does_not_end_without_a_traceback(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stubborn:
        assert first_line(stubborn) == "up"
        stubborn.send_signal(how)
        assert first_line(stubborn) == "ending"
        stubborn.send_signal(how)
        assert stubborn.communicate(timeout=20) == ("", "")
    assert stubborn.returncode == -how


CLEANING = """
import sys

import anyio

from relight.orchestrator.cli import running

running.interrupted_by_sigterm()


async def main():
    try:
        print("up", flush=True)
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            print("cleaning", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)
            print("clean", flush=True)


anyio.run(main)
"""
"""Cleans up until its stdin ends."""


@pytest.mark.parametrize("before", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_a_program_that_sigterm_interrupts_cleans_up_whole_when_it_is_told_twice(before: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"{before}\n{CLEANING}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as program:
        assert first_line(program) == "up"
        program.send_signal(signal.SIGTERM)
        assert first_line(program) == "cleaning"
        program.send_signal(signal.SIGTERM)
        out, _ = program.communicate(timeout=60)
    assert (out, program.returncode) == ("clean\n", -signal.SIGINT)


def test_an_orchestrator_ends_on_sigterm_with_0(server: Embedded) -> None:
    with running("orchestrate", "--job", "j", "--bus", server.url) as orchestrator:
        assert orchestrator.stderr is not None
        assert "orchestrator is up" in orchestrator.stderr.readline()
        orchestrator.terminate()
        _, err = orchestrator.communicate(timeout=20)
    assert orchestrator.returncode == 0, err
    assert "Traceback" not in err


def test_the_environment_may_name_the_bus(server: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BUS_URL", server.url)
    anyio.run(cli_job.record, server.url)
    assert main(["status"]) == 0
    assert os.environ["RELIGHT_BUS_URL"] == server.url


def test_every_command_line_of_the_readme_is_one() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ relight")]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line.replace("[", "").replace("]", "").partition(" &")[0], comments=True)[1:]
        cut = words.index("--") if "--" in words else len(words)
        assert parser.build().parse_args(words[:cut]).command == words[0]
