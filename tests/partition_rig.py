"""Machines of a job that can be cut off from each other, without a word to anybody: nothing is refused.

Each is a network namespace on one bridge where this machine allows that. What is cut goes to a hardware
address that nobody has. Elsewhere the way from an agent to the bus leads over a link that can be cut, and
every other way stays.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import msgspec

from relight.agents.node.config import NodeFile
from relight.events.bus.embedded import embedded, free_port, server_binary
from relight.events.ids import NodeName
from tests.node_support import JOB, swept
from tests.slow_link import Link, Way, link_to

NOBODY = "02:00:00:00:00:00"
"""A hardware address that no interface has: frames to it are lost on the wire."""
BRIDGE = "02:00:00:00:00:01"
NET = "198.18"
"""Set aside for tests of networks (RFC 2544)."""
WITHIN_S = 120.0


_worlds = itertools.count()
"""The kernel takes a while to forget a namespace and its links: no name is used twice."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Namespaces:
    """Hosts on one bridge. The bus's host is this process's own namespace."""

    def __init__(self) -> None:
        world = next(_worlds)
        self._tag = f"rl{os.getpid() % 0x10000:x}{world}"
        self._numbers = itertools.count(2)
        self._net = f"{NET}.{(os.getpid() + world) % 256}"
        self.addresses: dict[str, str] = {"bus": f"{self._net}.1"}
        self._devices = {"bus": self._tag}
        self._outside: list[str] = []
        """This end of each host's link."""

    def __enter__(self) -> "Namespaces":
        with ExitStack() as undo:
            undo.callback(self.remove)
            # Without one of its own its address changes when a host comes, unknown to the others.
            _ip("link", "add", self._tag, "address", BRIDGE, "type", "bridge")
            _ip("address", "add", f"{self.addresses['bus']}/24", "dev", self._tag)
            _ip("link", "set", self._tag, "up")
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        for link in (*self._outside, self._tag):
            with suppress(OSError):
                _ip("link", "del", link)
        for name in self._devices.keys() - {"bus"}:
            with suppress(OSError):
                _ip("netns", "del", self._space(name))

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def add(self, name: str) -> str:
        """A host; its address."""
        number = next(self._numbers)
        space, outside = self._space(name), f"{self._tag}v{number}"
        self._devices[name], self.addresses[name] = "eth0", f"{self._net}.{number}"
        _ip("netns", "add", space)
        self._outside.append(outside)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._tag, "up")
        _ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        return self.addresses[name]

    def inside(self, name: str) -> tuple[str, ...]:
        """What a command of that host begins with."""
        return () if name == "bus" else ("nsenter", f"--net=/run/netns/{self._space(name)}")

    def cut(self, one: str, other: str) -> None:
        """Lose all that the two send to each other."""
        for here, there in ((one, other), (other, one)):
            self._neighbour(here, "replace", self.addresses[there], "lladdr", NOBODY, "nud", "permanent")

    def join(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            self._neighbour(here, "del", self.addresses[there])

    def _neighbour(self, name: str, action: str, *words: str) -> None:
        space = () if name == "bus" else ("-n", self._space(name))
        _ip(*space, "neighbour", action, *words, "dev", self._devices[name])


@cache
def namespaces_are_allowed() -> bool:
    """Whether namespaces can be made here and reach each other."""
    if not shutil.which("ip") or not shutil.which("nsenter") or os.geteuid() != 0:
        return False
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"
    try:
        with Namespaces() as net, _server(net.addresses["bus"]) as port:
            net.add("probe")
            command = (*net.inside("probe"), sys.executable, "-c", reach, net.addresses["bus"], str(port))
            subprocess.run(command, check=True, capture_output=True, timeout=WITHIN_S)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@contextmanager
def _server(address: str) -> Iterator[int]:
    """A bus that other hosts reach; its port."""
    port = free_port()
    command = [str(server_binary()), "--bind", address, "127.0.0.1", "--port", str(port)]
    command += ["--protected-mode", "no", "--save", "", "--loglevel", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        subprocess.run(
            [sys.executable, "-c", _WAIT, str(port)], check=True, capture_output=True, timeout=WITHIN_S
        )
        yield port
    finally:
        process.terminate()
        process.wait(WITHIN_S)


_WAIT = """
import socket, sys, time
while True:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5).close()
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
"""


class Machines:
    """The nodes of a job and the client's host, each process on its own."""

    def __init__(self, url: str, net: Namespaces | None, folder: Path) -> None:
        self.url = url
        """Of the bus, as this process reaches it."""
        self.net = net
        self._folder = folder
        self._links: dict[str, Link] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._way: Way | None = None
        self._stack = AsyncExitStack()

    def address(self, host: str) -> str:
        return "127.0.0.1" if self.net is None else self.net.addresses[host]

    async def agent(self, file: NodeFile) -> NodeFile:
        """Start the agent of `file` on a host of its own; the file as it was given to it."""
        host = str(file.node)
        if self.net is None:
            link = await self._stack.enter_async_context(link_to(int(self.url.rpartition(":")[2])))
            self._links[host] = link
            url = f"redis://127.0.0.1:{link.port}"
        else:
            self.net.add(host)
            url = self.url.replace("127.0.0.1", self.net.addresses["bus"])
        path = self._folder / f"{host}.toml"
        path.write_text(_toml(file, self.address(host)))
        guests = file.spare.engines if file.spare is not None else ()
        self._stack.enter_context(swept(msgspec.structs.replace(file, engines=(*file.engines, *guests))))
        self._run(host, "agent", "--bus", url, "--config", str(path))
        return file

    async def gateway(self, *, apart: tuple[NodeName, str] | None = None) -> str:
        """Start the client's host; the address of its gateway, which listens before this returns.

        `apart`: a node that it can be cut from, and the address there of an engine.
        """
        url = self.url
        if self.net is not None:
            self.net.add("client")
            url = url.replace("127.0.0.1", self.net.addresses["bus"])
        address, port = self.address("client"), free_port()
        words = (
            "gateway",
            "--bus",
            url,
            "--job",
            JOB,
            "--host",
            address,
            "--port",
            str(port),
            "--drain",
            "0",
        )
        if self.net is None and apart is not None:
            port_there = int(apart[1].rpartition(":")[2])
            self._way = await self._stack.enter_async_context(Way(port_there))
            words = (f"{port_there}:{self._way.link.port}", *words)
        self._run(
            "client", *words, program="relight.orchestrator.cli" if self._way is None else "tests.detoured"
        )
        with anyio.fail_after(WITHIN_S):
            while True:
                with suppress(OSError):
                    stream = await anyio.connect_tcp(address, port)
                    await stream.aclose()
                    return f"http://{address}:{port}"
                await anyio.sleep(0.05)

    def _run(self, host: str, *words: str, program: str = "relight.orchestrator.cli") -> None:
        inside = () if self.net is None else self.net.inside(host)
        command = [*inside, sys.executable, "-m", program, *words]
        out = self._stack.enter_context((self._folder / f"{host}.log").open("wb"))
        process = self._processes[host] = subprocess.Popen(command, stdout=out, stderr=out)
        self._stack.callback(_ended, process)

    def cut_from_bus(self, node: NodeName) -> None:
        """Of this node's agent and the bus: whatever else it talks to is as before."""
        if self.net is not None:
            self.net.cut(node, "bus")
        else:
            self._links[node].cut_to_server()
            self._links[node].cut_to_client()

    async def cut_from_client(self, node: NodeName) -> None:
        """Of the client's gateway and the node that it was told to be apart from."""
        if self.net is not None:
            self.net.cut("client", node)
        else:
            assert self._way is not None
            await self._way.cut()

    def join_to_bus(self, node: NodeName) -> None:
        if self.net is not None:
            self.net.join(node, "bus")
        else:
            self._links[node].join()

    def logs(self) -> dict[str, str]:
        """What each host's process has said last, and whether it runs, for whoever reads of a failure."""
        return {
            f"{host} ({'runs' if process.poll() is None else f'ended with {process.returncode}'})": (
                self._folder / f"{host}.log"
            ).read_text(errors="replace")[-6000:]
            for host, process in self._processes.items()
        }

    async def close(self) -> None:
        await self._stack.aclose()


def _ended(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(WITHIN_S)


@asynccontextmanager
async def machines(folder: Path, *, namespaces: bool) -> AsyncIterator[Machines]:
    """Nothing is left of them behind the block."""
    with ExitStack() as undo:
        if namespaces:
            net = undo.enter_context(Namespaces())
            port = undo.enter_context(_server(net.addresses["bus"]))
            made = Machines(f"redis://127.0.0.1:{port}", net, folder)
        else:
            server = undo.enter_context(embedded(folder / "bus"))
            made = Machines(server.url, None, folder)
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.close()


def _toml(file: NodeFile, host: str) -> str:
    """A node file for stubs that listen everywhere."""
    lines = [f"{key} = {_text(value)}" for key, value in (("job", file.job), ("node", file.node))]
    lines += [f"host = {_text(host)}", f"state_dir = {_text(file.state_dir)}"]
    for engine in file.engines:
        lines += ["[[engines]]", f"name = {_text(engine.name)}", f"command = {_words(engine.command)}"]
    if file.spare is not None:
        lines += ["[spare]", f"slots = {file.spare.slots}"]
        for engine in file.spare.engines:
            lines += ["[[spare.engines]]", f"name = {_text(engine.name)}"]
            lines += [f"command = {_words(engine.command)}"]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    return json.dumps(str(value))


def _words(words: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, words))}]"
