"""Identity, marks, ports, shared memory: what the agent says of processes is true or unknown."""

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from relight.agents.node import launch, logs, marks, pidfd, ports, proc, shm, sockets, stop
from relight.agents.node.logs import Pump
from relight.agents.node.marks import Marks
from relight.agents.node.proc import Liveness
from relight.agents.node.stop import Remains
from relight.agents.node.tree import Exit, Tree
from relight.events.ids import EngineName, JobName
from relight.events.values import Process
from tests.node_support import kill

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@contextmanager
def child(*command: str, **options: object) -> Iterator[tuple["subprocess.Popen[bytes]", Process]]:
    """A process of this test's own."""
    process = subprocess.Popen(command or SLEEP, **options)  # type: ignore[call-overload]
    stat = proc.read_stat(process.pid)
    assert stat is not None
    try:
        yield process, stat.process
    finally:
        process.kill()
        process.wait()


def test_a_zombie_is_dead_and_so_is_a_pid_that_another_process_took() -> None:
    with child() as (process, identity):
        assert proc.liveness(identity) is Liveness.ALIVE
        assert proc.liveness(Process(identity.pid, identity.start - 1)) is Liveness.DEAD
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        stat = proc.read_stat(identity.pid)
        assert stat is not None and stat.state == "Z"
        assert proc.liveness(identity) is Liveness.DEAD


def test_what_the_kernel_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(proc, "read_stat", refuse)
    assert proc.liveness(Process(os.getpid(), 1)) is Liveness.UNKNOWN


def test_a_signal_through_a_descriptor_never_reaches_a_successor() -> None:
    with child() as (process, identity):
        assert pidfd.hold(Process(identity.pid, identity.start + 1)) is None
        fd = pidfd.hold(identity)
        assert fd is not None
        process.kill()
        process.wait()
        assert pidfd.ended(fd)
        assert not pidfd.send(fd, signal.SIGKILL)
        os.close(fd)


@pytest.mark.parametrize(
    ("body", "expected"),
    [("import os; os._exit(7)", (7, None)), ("import os; os.kill(os.getpid(), 9)", (None, 9))],
)
def test_the_exit_of_a_grandchild_is_read_from_its_zombie(body: str, expected: tuple[int, int]) -> None:
    parent = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.2); {body}']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    with child(sys.executable, "-c", parent, stdout=subprocess.PIPE) as (process, _):
        assert process.stdout is not None
        stat = proc.read_stat(int(process.stdout.readline()))
        process.stdout.close()
        assert stat is not None
        fd = pidfd.hold(stat.process)
        assert fd is not None
        deadline = time.monotonic() + 10
        while not pidfd.ended(fd) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pidfd.status(fd, stat.process) == expected
        os.close(fd)


def test_an_incarnation_is_its_session_its_descendants_its_tag_and_its_folder(tmp_path: Path) -> None:
    tag, folder = "relight.test.e0.1", str(tmp_path / "x")
    spawn = (
        "import subprocess, time;"
        f"subprocess.Popen({SLEEP!r}, start_new_session=True, env={{}}); time.sleep(60)"
    )
    environment = {**os.environ, marks.TAG: tag}
    titled = [f"{tag}::EngineCore", "60"]
    with (
        child(sys.executable, "-c", spawn, start_new_session=True) as (_, leader),
        child(env=environment) as (_, tagged),
        child(env={**os.environ, "TMPDIR": folder}) as (_, placed),
        child(*titled, executable=shutil.which("sleep")) as (_, core),
        child(*SLEEP, tag) as (_, speaks_of_it),
        child(*SLEEP, f"{tag}::EngineCore") as (_, searches_for_it),
        child(env={**os.environ, marks.TAG: tag + "1"}) as (_, eleventh),
        child() as (_, stranger),
    ):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = {each.process: each.role for each in marks.search(Marks(tag, folder, leader), ())}
            if len(found) == 5:
                break
            time.sleep(0.02)
        assert {leader, tagged, placed, core} < found.keys() and len(found) == 5
        assert found[leader] == "leader" and found[core] == "core"
        assert not {speaks_of_it, searches_for_it, eleventh, stranger} & found.keys()
        assert os.getpid() not in {process.pid for process in found}
        (grandchild,) = found.keys() - {leader, tagged, placed, core}
        kill(grandchild)


FORKS = "import os, signal; os.fork(); signal.pause()"


def test_what_a_worker_has_forked_and_not_yet_run_is_no_worker() -> None:
    """Between fork(2) and exec(2) a compiler, or lscpu, is called as the worker is that runs it."""
    tag = "relight.test.e0.4"
    sought = Marks(tag, "/nowhere", None)
    with child(f"{tag}::Worker_TP0", "-c", FORKS, executable=sys.executable) as (_, worker):
        deadline = time.monotonic() + 10
        while len(found := marks.search(sought, ())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        (forked,) = (each for each in found if each.process != worker)
        kill(forked.process)
        assert proc.command_line(worker.pid).startswith(f"{tag}::Worker")
        assert {(each.process, each.role) for each in found} == {
            (worker, "worker"),
            (forked.process, "other"),
        }


def test_a_session_whose_number_another_process_took_is_not_ours() -> None:
    with child(start_new_session=True) as (_, foreign):
        ours = Process(foreign.pid, foreign.start - 1000)
        assert marks.search(Marks("relight.test.e0.2", "/nowhere", ours), ()) == []


def test_an_incarnation_without_marks_has_no_processes() -> None:
    bystander = subprocess.Popen(["sleep", "60"], env={"TMPDIR": "", marks.TAG: ""})
    try:
        assert marks.search(Marks("", "", None), ()) == []
    finally:
        bystander.kill()
        bystander.wait()


def test_tags_of_other_state_directories_and_jobs_differ(tmp_path: Path) -> None:
    ids = {
        marks.slot_id(JobName(job), state_dir=tmp_path / folder)
        for job in ("a", "b")
        for folder in ("x", "y")
    }
    assert len(ids) == 4
    tags = {marks.tag_of("slot", EngineName(name), n) for name in ("e", "e1") for n in (1, 11)}
    assert len(tags) == 4


@pytest.mark.anyio
async def test_a_tree_tells_each_end_once_and_is_emptied() -> None:
    exits: list[Exit] = []
    with child() as (_, first), child() as (_, second):
        tree = Tree(Marks("relight.test.e0.3", "/nowhere", None), exits.append)
        assert tree.add(first, "core") and tree.add(second, "other")
        assert not tree.add(first, "worker") and tree.known[first] == "worker", "seen before its exec"
        assert not tree.add(first, "other") and not tree.add(first, "core")
        assert not tree.add(Process(first.pid, 1), "other")
        assert tree.send(signal.SIGKILL) == 2
        with anyio.fail_after(10):
            await tree.emptied()
        assert {(each.process, each.role) for each in exits} == {(first, "core"), (second, "other")}
        assert all(each.status.signal == 9 for each in exits)
        assert tree.living == ()
        tree.close()


async def test_a_zombie_that_its_parent_never_reaps_is_proven_gone(tmp_path: Path) -> None:
    """As an orphan's is in a container whose first process is no init: dead once, and dead for good."""
    tag = f"relight.{os.getpid()}.zombie.1"
    body = f"import subprocess as s, time; s.Popen({SLEEP}, env={{'RELIGHT_TAG': {tag!r}}}); time.sleep(60)"
    with child(sys.executable, "-c", body) as (parent, _):
        exits: list[Exit] = []
        tree = Tree(Marks(tag, str(tmp_path / "gone"), None), exits.append)
        with anyio.fail_after(10):
            while not tree.find():
                await anyio.sleep(0.01)
        (process,) = tree.living
        await stop.prove_gone(Remains(tree, (), "", frozenset()), within_s=5)
        stat = proc.read_stat(process.pid)
        assert stat is not None and (stat.state, stat.ppid) == ("Z", parent.pid)
        assert [each.process for each in exits] == [process]
        tree.close()


def test_ports_lie_outside_the_range_of_outgoing_connections() -> None:
    low, high = ports.outgoing()
    picked = ports.pick(())
    assert not low <= picked <= high
    assert ports.bindable(picked) and not ports.answers("127.0.0.1", picked)
    with socket.socket() as holder:
        holder.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: old connections rest there
        holder.bind(("127.0.0.1", picked))
        assert not ports.answers("127.0.0.1", picked)
        holder.listen()
        assert ports.answers("127.0.0.1", picked)
        assert not ports.bindable(picked)
        found = sockets.listeners(picked)
        assert [each.host for each in found] == ["127.0.0.1"]
        assert sockets.holds_socket(os.getpid(), {found[0].inode})
        assert picked in sockets.listening_ports([os.getpid()])
        assert str(os.getpid()) in launch.holder(picked)
    assert ports.bindable(picked)


def test_only_segments_of_ours_that_nobody_uses_are_removed() -> None:
    code = (
        "import mmap, sys, time; f = open(sys.argv[1], 'wb+'); f.truncate(4096);"
        "m = mmap.mmap(f.fileno(), 4096); print('up', flush=True); time.sleep(60)"
    )
    path = Path(f"/dev/shm/relight-test-{os.getpid()}")
    old = Path(f"/dev/shm/relight-test-old-{os.getpid()}")
    old.write_bytes(b"x" * 4096)
    began = time.time_ns()
    try:
        with child(sys.executable, "-c", code, str(path), stdout=subprocess.PIPE) as (process, identity):
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            process.stdout.close()
            found = shm.mapped_by([identity], since_ns=began - 50_000_000)
            assert [segment.path for segment in found] == [str(path)]
            assert shm.mapped_by([identity], since_ns=time.time_ns() + 1_000_000_000) == set()
            assert shm.remove(found) == [str(path)]
            assert path.exists()
        with old.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
            mine = Process(os.getpid(), 0)
            assert shm.mapped_by([mine], since_ns=time.time_ns()) == set()
        assert shm.remove(found) == []
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
        old.unlink(missing_ok=True)


@pytest.mark.anyio
async def test_the_pump_times_each_line_and_bounds_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LIMIT_BYTES", 10_000)
    path = tmp_path / "log"
    before = time.time_ns() // 1_000_000
    pump = Pump(path)
    writing = os.dup(pump.writing)
    pump.handed_over()
    for index in range(2000):
        os.write(writing, b"line %d\n" % index)
    os.write(writing, b"no newline")
    os.close(writing)
    with anyio.fail_after(10):
        await pump.ended()
    assert logs.last_lines(path, 2) == ["line 1999", "no newline"]
    assert before <= int(path.read_bytes().split()[0]) <= time.time_ns() // 1_000_000
    assert path.stat().st_size <= 10_000 + 65_536 and (tmp_path / "log.1").exists()
