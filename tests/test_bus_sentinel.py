"""Three Sentinels, two servers, and a job that goes on through fail-overs; and what their URLs say."""

import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
import redis.asyncio as redis

from relight.events import codec
from relight.events.bus import embedded as embedding
from relight.events.bus import urls
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded, embedded
from relight.events.bus.sentinel import Sentinels
from relight.events.errors import BusUnavailable, UsageError
from relight.events.facts import EngineDead
from tests.bus_rig import E0, E1, OPTIONS, PASSWORD, START_S, USER, Rig
from tests.node_support import kill

SERVICE = "the-bus"
ASKER, ASKERS_PASSWORD = "asker", "an0ther-s3cret"
DOWN_MS = 500
"""Silence after which a Sentinel holds the primary for down; a site takes some seconds."""
FAIL_OVER_S = 20.0

CONFIGURATION = """
port {port}
bind 127.0.0.1
dir {directory}
user {asker} on >{password} +@all
sentinel monitor {service} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {service} {down_ms}
sentinel failover-timeout {service} 3000
"""


class Watched(Rig):
    """The job on a primary and a replica that three Sentinels watch."""

    def __init__(self, directory: Path, model: Path, servers: list[Embedded], sentinels: list[int]) -> None:
        hosts = ",".join(f"127.0.0.1:{port}" for port in sentinels)
        where = f"{hosts}/{SERVICE}?sentinel_username={ASKER}&sentinel_password={ASKERS_PASSWORD}"
        url, admin_url = f"redis+sentinel://{USER}:{PASSWORD}@{where}", f"redis+sentinel://{where}"
        super().__init__(directory, model, url=url, admin_url=admin_url)
        self.servers = servers
        self.sentinels = sentinels

    async def primary(self) -> Embedded:
        """The server that the Sentinels name."""
        async with redis.Redis(port=self.sentinels[0], decode_responses=True, protocol=2) as asked:
            _, port = await asked.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    async def has_a_replica(self) -> bool:
        """Whether the primary's writes reach the other server."""
        async with redis.Redis.from_url((await self.primary()).url, protocol=2) as there:
            info = await there.info("replication")
        follower = info.get("slave0")
        return bool(
            follower and follower["state"] == "online" and follower["offset"] == info["master_repl_offset"]
        )

    async def fails_over(self, old: Embedded) -> None:
        """Wait until another server is the primary."""

        async def is_another() -> bool:
            return await self.primary() is not old

        await self.until(is_another, within_s=FAIL_OVER_S)


@contextmanager
def sentinels(directory: Path, primary: int) -> Iterator[list[int]]:
    """The ports of three Sentinels that watch the server on `primary`."""
    ports = [embedding.free_port() for _ in range(3)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for port in ports:
            home = directory / str(port)
            home.mkdir()
            file = home / "sentinel.conf"
            file.write_text(
                CONFIGURATION.format(
                    port=port,
                    directory=home,
                    asker=ASKER,
                    password=ASKERS_PASSWORD,
                    service=SERVICE,
                    primary=primary,
                    down_ms=DOWN_MS,
                )
            )
            command = [embedding.server_binary(), file, "--sentinel"]
            with (home / "log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        yield ports
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


async def know_each_other(ports: list[int], job: Watched) -> None:
    """Wait until each Sentinel knows the other two and the replica: they can fail over."""

    async def all_know() -> bool:
        for port in ports:
            async with redis.Redis(port=port, decode_responses=True, protocol=2) as asked:
                try:
                    known = (await asked.sentinel_masters())[SERVICE]
                except redis.RedisError:
                    return False
            if known["num-other-sentinels"] != 2 or known["num-slaves"] != 1:
                return False
        return True

    await job.until(all_know, within_s=FAIL_OVER_S)


@pytest.fixture(scope="module")
async def job(tmp_path_factory: pytest.TempPathFactory, stub_model: Path) -> AsyncIterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    async with embedded(directory / "a", options=OPTIONS) as first:
        follows = (*OPTIONS, "--replicaof", "127.0.0.1", str(first.port))
        async with embedded(directory / "b", options=follows) as second:
            with sentinels(directory, first.port) as ports:
                watched = Watched(directory, stub_model, [first, second], ports)
                await know_each_other(ports, watched)
                async with watched.works():
                    yield watched


@pytest.mark.anyio
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_the_job_goes_on_when_its_primary_is_lost(job: Watched, how: signal.Signals) -> None:
    await job.until(job.has_a_replica, within_s=FAIL_OVER_S)
    well, lost, turns = job.processes(E0), job.processes(E1), job.turns
    before = await job.state()
    assert before is not None and before.meta is not None
    old = await job.primary()
    began = time.monotonic()
    os.kill(old.process.pid, how)
    kill(lost[1][0])
    await job.fails_over(old)
    promoted_s = time.monotonic() - began
    try:
        fault = f"Sentinel, {how.name} (promoted after {promoted_s:.1f} s)"
        await job.converges(fault=fault, within_s=START_S)
        assert job.processes(E0) == well
        assert job.processes(E1)[0] == lost[0] + 1
        after = await job.state()
        assert after is not None and after.meta is not None
        assert after.epoch > before.epoch and after.meta.bus != before.meta.bus
        assert after.meta.birth == before.meta.birth
        told = [codec.decode_fact(entry) for entry in await job.facts() if entry.type == EngineDead.__name__]
        deaths = [(fact.engine, fact.incarnation) for fact in told if isinstance(fact, EngineDead)]
        assert deaths.count((E1, lost[0])) == 1
        await job.assert_no_wrong_word()
        assert job.turns > turns
    finally:
        if how is signal.SIGSTOP:
            os.kill(old.process.pid, signal.SIGCONT)
            async with redis.Redis.from_url(old.url, protocol=2) as there:  # as Sentinels do 8 s later
                await there.replicaof("127.0.0.1", (await job.primary()).port)


@pytest.mark.anyio
async def test_a_sentinel_that_missed_a_fail_over_leads_nobody_to_the_old_primary(
    job: Watched, tmp_path: Path
) -> None:
    """What it says is of a lower configuration epoch than what the others say."""
    await has_failed_over(job)
    options = {"username": ASKER, "password": ASKERS_PASSWORD, "protocol": 2}
    async with embedded(tmp_path / "old") as old:
        with sentinels(tmp_path, old.port) as behind:
            lone = Sentinels([("127.0.0.1", behind[0])], options)
            most = Sentinels([("127.0.0.1", port) for port in (behind[0], *job.sentinels[:2])], options)
            async with aclosing(lone), aclosing(most):
                await job.until(lambda: _answers(lone), within_s=FAIL_OVER_S)
                assert (await lone.discover_master(SERVICE))[1] == old.port
                for _ in range(20):
                    assert (await most.discover_master(SERVICE))[1] == (await job.primary()).port


async def has_failed_over(job: Watched) -> None:
    """Once at least, by an order where none of the tests before this one made it."""
    async with redis.Redis(port=job.sentinels[0], decode_responses=True, protocol=2) as asked:
        if (await asked.sentinel_masters())[SERVICE]["config-epoch"] == 0:
            old = await job.primary()
            await asked.sentinel_failover(SERVICE)
            await job.fails_over(old)


async def _answers(asked: Sentinels) -> bool:
    try:
        await asked.discover_master(SERVICE)
    except redis.ConnectionError:
        return False
    return True


@pytest.mark.anyio
async def test_what_sentinels_refuse_or_do_not_know_is_one_sentence(job: Watched) -> None:
    wrong = job.url.replace(ASKERS_PASSWORD, "wr0ng")
    with pytest.raises(BusUnavailable, match="invalid username-password") as refused:
        async with open_bus(wrong):
            pass
    assert "wr0ng" not in str(refused.value) and PASSWORD not in str(refused.value)
    with pytest.raises(BusUnavailable, match=r"the Sentinels 127\.0\.0\.1:\d+, .* know no service 'other'"):
        async with open_bus(job.url.replace(SERVICE, "other")):
            pass


@pytest.mark.anyio
async def test_sentinels_that_are_not_there_are_named(free_port: int) -> None:
    url = f"redis+sentinel://me:hunter2@127.0.0.1:{free_port}/{SERVICE}"
    with pytest.raises(BusUnavailable) as error:
        async with open_bus(url):
            pass
    said = str(error.value)
    assert "hunter2" not in said
    assert re.search(rf"cannot be reached: no Sentinel of 127\.0\.0\.1:{free_port} answers", said)


# --- URLs --------------------------------------------------------------------------------------------


def test_a_url_names_sentinels_service_database_and_both_credentials() -> None:
    target = urls.sentinel_target(
        "redis+sentinel://me:p%40ss%2F@a:1,[::1]:2,c/main/3?sentinel_username=s&sentinel_password=x%20y"
    )
    assert target.sentinels == (("a", 1), ("::1", 2), ("c", urls.SENTINEL_PORT))
    assert target.service == "main"
    assert target.of_servers == {"username": "me", "password": "p@ss/", "db": 3}
    assert target.of_sentinels == {"username": "s", "password": "x y"}


def test_tls_is_spoken_with_servers_and_sentinels() -> None:
    target = urls.sentinel_target("rediss+sentinel://a/main?ssl_ca_certs=/ca.pem")
    assert target.of_servers == {"db": 0, "ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert target.of_sentinels == {"ssl": True, "ssl_ca_certs": "/ca.pem"}


WRONG = {
    "redis+sentinel://a:1": "expected redis",
    "redis+sentinel://me:hunter2@a:1": "expected redis",
    "redis+sentinel://a:1/": "the service is missing",
    "redis+sentinel:///main": "'' is no HOST:PORT of a Sentinel",
    "redis+sentinel://a,,b/main": "'' is no HOST:PORT of a Sentinel",
    "redis+sentinel://a:99999/main": "'a:99999' is no HOST:PORT of a Sentinel",
    "redis+sentinel://a:b/main": "'a:b' is no HOST:PORT of a Sentinel",
    "redis+sentinel://a/main/x": "the database must be a number, not 'x'",
    "redis+sentinel://a/main?colour=blue": "unexpected keyword argument 'colour'",
    "redis+sentinel://a/main?socket_timeout=0.1": "socket_timeout is set by relight",
    "redis+sentinel://me:hunter2@x@a/main": "expected redis",
    "redis+sentinel://me:hunter2/x@a/main": "the database must be a number",
    "redis://a?socket_timeout=0.1": "socket_timeout is set by relight",
    "redis://a?protocol=3": "protocol is set by relight",
    "redis://me:hunter2#x@a": "the port must be a number",
    "http://me:hunter2@a": "must specify one of the following schemes",
}


@pytest.mark.anyio
@pytest.mark.parametrize("url", WRONG)
async def test_a_wrong_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(UsageError, match=WRONG[url]) as error:
        async with open_bus(url, reached=False):
            pass
    assert "hunter2" not in str(error.value)
