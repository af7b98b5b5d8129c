"""The dashboard as programs see it: the same as the commands tell, and nothing that could be changed."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis.asyncio as redis

from relight.events.bus.client import Bus, open_bus
from relight.events.bus.embedded import Embedded
from relight.events.envelope import Entry
from relight.events.ids import JobName
from relight.orchestrator import metrics
from relight.orchestrator.annals import Annals
from relight.orchestrator.cli.main import main
from relight.orchestrator.dashboard import files, guard
from tests import cli_job
from tests.dashboard_rig import LargeJob, Page, dashboard, until

pytestmark = pytest.mark.anyio

JOB = "grpo-1"
RELIGHT = (sys.executable, "-m", "relight.orchestrator.cli")
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
async def bus(server: Embedded) -> AsyncIterator[Bus]:
    async with open_bus(server.url) as opened:
        yield opened


@pytest.fixture
async def page(server: Embedded) -> AsyncIterator[Page]:
    """A dashboard of a bus with one job in the middle of a recovery."""
    await cli_job.record(server.url, JOB)
    async with dashboard(server.url) as shown:
        yield shown


def timeless(value: Any) -> Any:
    """Less what moves with time alone."""
    if isinstance(value, dict):
        return {name: timeless(inner) for name, inner in value.items() if not name.endswith("_s")}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


async def said(server: Embedded, *words: str) -> list[Any]:
    """What a command prints as JSON."""
    command = [*RELIGHT, *words, "--bus", server.url, "--format", "json"]
    done = await anyio.run_process(command)
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


# --- the same as the commands ----------------------------------------------------------------------


async def test_a_job_is_told_as_status_tells_it(page: Page, server: Embedded) -> None:
    [status] = await said(server, "status")
    told = await page.get(f"/api/jobs/{JOB}")
    assert timeless(told) == timeless(status)
    assert told.keys() == status.keys()
    assert told["engines"][0]["recovery"] == "r1"


async def test_events_and_explanations_are_told_as_the_commands_tell_them(
    page: Page, server: Embedded
) -> None:
    words = {"who", "of", "reason", "gist"}
    told = await page.get(f"/api/jobs/{JOB}/events")
    assert [less(entry, words) for entry in told] == await said(server, "events")
    [explained] = await said(server, "explain", "e0")
    shown = await page.get(f"/api/jobs/{JOB}/explain/e0")
    assert {**shown, "chain": [less(entry, words) for entry in shown["chain"]]} == explained


def less(entry: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


async def test_events_are_chosen_by_engine_and_type(page: Page) -> None:
    told = await page.get(f"/api/jobs/{JOB}/events?engine=e1&type=LoadWeights&type=RouteSuspected")
    assert sorted((entry["type"], entry["of"]) for entry in told) == [
        ("LoadWeights", "e1.4"),
        ("RouteSuspected", "e1.4"),
    ]


async def test_the_overview_names_what_is_stale_parked_and_silent(page: Page, bus: Bus) -> None:
    await LargeJob(bus, "large", engines=100).put()
    told = await page.get("/api/jobs")
    large, small = sorted(told["jobs"], key=lambda row: -row["engines"])
    assert (small["job"], small["parked"], small["holder"]) == (JOB, 1, "host-1")
    assert large["engines"] == len(large["strip"]) == 100 and large["serving"] < 100
    kinds = {concern["kind"] for concern in (await page.get("/api/jobs/large"))["concerns"]}
    assert {"stale", "node", "approval", "retired"} <= kinds
    [stale, *_] = [c for c in (await page.get("/api/jobs/large"))["concerns"] if c["kind"] == "stale"]
    assert "to export 7.41" in stale["text"] and stale["for_s"] > 0
    assert large["last_alarm"]["kind"] == "waiting"


async def test_a_job_that_cannot_be_read_is_named_and_the_others_are_shown(
    page: Page, bus: Bus, server: Embedded
) -> None:
    await bus.enrol(JobName("broken"))
    async with redis.Redis.from_url(server.url, protocol=2) as raw:
        await raw.set("relight:{broken}:state", "no hash")
    broken, well = (await page.get("/api/jobs"))["jobs"]
    assert "WRONGTYPE" in broken["error"] and "relight:{broken}:state" in broken["error"]
    assert well["error"] is None and well["engines"] == 2


# --- nothing can be changed, nothing is told to strangers ------------------------------------------

PATHS = [
    "/",
    "/static/app.js",
    "/api/jobs",
    f"/api/jobs/{JOB}",
    "/api/live",
    "/metrics",
    "/health",
    "/nowhere",
]


async def test_every_method_but_get_is_refused_everywhere(page: Page) -> None:
    for path in PATHS:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            async with page.http.request(method, page.address + path) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD"), (method, path)
    async with page.http.post(f"{page.address}/api/jobs/{JOB}") as answer:
        assert "relight restart" in (await answer.json())["error"]


async def test_every_answer_forbids_what_a_page_could_be_made_to_do(page: Page) -> None:
    for path in (*PATHS[:4], "/metrics", "/nowhere"):
        async with page.http.get(page.address + path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8266", 200),
        ("10.1.2.3:80", 200),
        ("proxy.example", 200),
        ("evil.example", 421),
        ("localhost.evil.example:8266", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
async def test_a_name_that_was_made_to_point_here_gets_nothing(
    server: Embedded, host: str, status: int
) -> None:
    async with (
        dashboard(server.url, allowed=("proxy.example",)) as page,
        page.http.get(f"{page.address}/api/jobs", headers={"Host": host}) as answer,
    ):
        assert answer.status == status


async def test_a_page_of_another_site_gets_nothing(page: Page) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    async with page.http.get(f"{page.address}/api/jobs", headers=headers) as answer:
        assert answer.status == 403


async def test_what_is_not_there_is_named(page: Page) -> None:
    for path, sentence in {
        "/api/jobs/nobody": "has no job 'nobody'",
        f"/api/jobs/{JOB}/explain/nobody": "has no engine 'nobody'",
        "/api/jobs/%3Cscript%3E": "job name '<script>' must match",
        "/static/..%2fserve.py": "Not Found",
        "/static/serve.py": "Not Found",
    }.items():
        async with page.http.get(page.address + path) as answer:
            assert answer.status == 404 and answer.content_type == "application/json"
            assert sentence in (await answer.json())["error"]
    async with page.http.get(f"{page.address}/api/jobs/{JOB}/events?count=0") as answer:
        assert answer.status == 400


def test_the_page_makes_text_of_whatever_it_is_told() -> None:
    """No script of it can make markup or code of a string; a browser test shows the same by doing it."""
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|javascript:"
    )
    for name, file in files.load().items():
        assert not ways.search(file.body.decode()), name
        assert not re.search(r"https?://(?!www\.w3\.org/)", file.body.decode().replace("^https?:", "")), name
    index = files.load()["index.html"].body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=", index)


async def test_files_are_sent_again_only_when_they_have_changed(page: Page) -> None:
    async with page.http.get(f"{page.address}/static/app.js") as answer:
        tag = answer.headers["ETag"]
    async with page.http.get(f"{page.address}/static/app.js", headers={"If-None-Match": tag}) as answer:
        assert answer.status == 304


# --- metrics ---------------------------------------------------------------------------------------

LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.e+-]+|\+Inf|NaN)')


def parsed(text: str) -> dict[tuple[str, str], float]:
    """Samples by name and labels; fails for what is no metric or is told twice."""
    found: dict[tuple[str, str], float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, name, rest = line.split(" ", 3)
            if word == "TYPE":
                assert name not in kinds
                kinds[name] = rest
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert re.sub(r"_(bucket|sum|count)$", "", match[1]) in kinds or match[1] in kinds, line
        key = match[1], match[2] or ""
        assert key not in found, line
        found[key] = float(match[3])
    return found


async def test_metrics_tell_engines_recoveries_alarms_and_how_far_behind_the_orchestrator_is(
    page: Page, bus: Bus
) -> None:
    await LargeJob(bus, "large", engines=100).put()
    async with page.http.get(f"{page.address}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        told = parsed(await answer.text())
    large = 'job="large"'
    phases = [
        value for (name, labels), value in told.items() if name == "relight_engines" and large in labels
    ]
    assert sum(phases) == 100 and len(phases) == 12
    assert told["relight_recoveries_total", f'{large},outcome="done"'] == 11
    assert told["relight_recoveries_total", f'{large},outcome="retired"'] == 1
    assert told["relight_recovery_phase_seconds_count", f'{large},phase="start"'] == 11
    assert told["relight_recovery_phase_seconds_bucket", f'{large},phase="fence",le="0.01"'] == 11
    assert told["relight_alarms_total", f'{large},kind="waiting"'] == 1
    assert told["relight_facts_behind", large] == 15  # its cursor stands at the beginning
    assert told["relight_parked_entries", f'job="{JOB}"'] == 1
    assert told["relight_held", large] == 1 and told["relight_bus_up", ""] == 1


async def test_what_was_counted_once_is_not_counted_again(page: Page, bus: Bus, server: Embedded) -> None:
    large = LargeJob(bus, "large", engines=20)
    await large.put()
    key = ("relight_recoveries_total", 'job="large",outcome="done"')
    for done in (11, 12):
        async with page.http.get(f"{page.address}/metrics") as answer:
            assert parsed(await answer.text())[key] == done
        await large.recovered(large.names[0], 30)
        await anyio.sleep(0.25)  # what was read is fresh for less than that


def test_decisions_that_come_again_after_a_rollback_count_once_and_are_shown() -> None:
    data = '{"type":"Alarm","id":"5-1","epoch":5,"reason":"r","kind":"stop","detail":"d"}'
    entry = Entry(entry_id="1-1", type="Alarm", source="orchestrator/o", data=data, after="0-0")  # type: ignore[arg-type]
    annals = Annals()
    annals.add([entry])
    annals.forget_shown()
    annals.add([entry])
    assert (annals.alarms["stop"], len(annals.alarmed)) == (1, 1)


def test_the_page_about_metrics_names_each_of_them() -> None:
    told = re.findall(r"^\| `(relight_\w+)", (DOCS / "dashboard.md").read_text(), re.MULTILINE)
    assert told == metrics.names()


# --- the command -----------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_sentence(server: Embedded, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["dashboard", "--bus", server.url, "--port", port]) == 2
    said = capsys.readouterr().err.splitlines()
    assert f"relight: dashboard cannot listen on 127.0.0.1:{port}: Address already in use" in said


def test_ctrl_c_ends_it_with_130_although_somebody_looks(server: Embedded) -> None:
    command = [*RELIGHT, "dashboard", "--bus", server.url, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            port = _announced(process.stderr)
            with socket.create_connection(("127.0.0.1", port), timeout=20) as browser:
                browser.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                heard = b""
                while b"event: jobs" not in heard:
                    heard += browser.recv(4096)
                process.send_signal(2)
                while block := browser.recv(4096):
                    heard += block
                assert b"event: reload" in heard
            assert process.wait(20) == 130
        finally:
            process.kill()


def _announced(lines: Any) -> int:
    for line in lines:
        if found := re.search(r"listens on http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise AssertionError("it ended before it listened")


def test_names_and_addresses_are_told_apart() -> None:
    names = guard.known_names("0.0.0.0", ["Proxy.Example."])
    assert guard.is_known("proxy.example:443", names) and guard.is_known("LOCALHOST", names)
    assert not guard.is_known("", names) and not guard.is_known("proxy.example.evil:1", names)


async def test_a_user_that_may_only_read_is_enough(server: Embedded) -> None:
    """So nothing of it can change anything, whatever it is asked."""
    await cli_job.record(server.url, JOB)
    rights = ("on", ">pw", "~relight:*", "+@read", "+@scripting", "+@connection", "+info", "+time")
    async with redis.Redis.from_url(server.url, protocol=2) as raw:
        await raw.execute_command("ACL", "SETUSER", "looker", *rights)
    async with dashboard(server.url.replace("redis://", "redis://looker:pw@")) as page:
        async with page.live(f"/api/jobs/{JOB}/live") as told:
            await until(told, "begin")
            await until(told, "view", lambda view: len(view["engines"]) == 2)
        assert (await page.get("/api/jobs"))["jobs"][0]["engines"] == 2
        assert len((await page.get(f"/api/jobs/{JOB}/explain/e0"))["chain"]) > 5
        assert "pw" not in (await page.get("/api/jobs"))["bus"]
