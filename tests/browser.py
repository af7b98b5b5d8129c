"""A headless Chromium for tests, spoken to by its own debugging protocol."""

import itertools
import json
import shutil
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import aiohttp
import anyio
import anyio.abc

NAMES = ("chromium", "chromium-browser", "google-chrome")
WITHIN_S = 30.0


def chromium() -> str | None:
    """Its path, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.said: list[dict[str, Any]] = []
        """What its console and the network said meanwhile."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        name = next(self._ids)
        await self._socket.send_json({"id": name, "method": method, "params": params})
        with anyio.fail_after(WITHIN_S):
            while True:
                told = await self._socket.receive_json()
                if told.get("id") == name:
                    assert "error" not in told, told
                    result: dict[str, Any] = told["result"]
                    return result
                self.said.append(told)

    async def evaluate(self, script: str) -> Any:
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Return when the expression holds."""
        with anyio.fail_after(WITHIN_S):
            while not await self.evaluate(f"Boolean({script})"):
                await anyio.sleep(0.05)

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)

    async def picture(self, path: Path) -> None:
        told = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(b64decode(told["data"]))

    def errors(self) -> list[str]:
        """What went wrong in the page: exceptions, and what was refused to it."""
        return [
            json.dumps(told["params"])
            for told in self.said
            if told.get("method") == "Runtime.exceptionThrown"
            or (told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error")
        ]


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A page of a browser of its own, which ends with the block."""
    binary = chromium()
    assert binary is not None
    with tempfile.TemporaryDirectory(prefix="relight-browser-", ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        options += ["--disable-background-networking", "--hide-scrollbars", "--remote-debugging-port=0"]
        command = [binary, *options, f"--user-data-dir={profile}", "about:blank"]
        async with await anyio.open_process(command, stdout=DEVNULL, stderr=DEVNULL) as process:
            try:
                async with _tab(Path(profile)) as tab:
                    yield tab
                    await tab.call("Browser.close")
                with anyio.move_on_after(5):
                    await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()


@asynccontextmanager
async def _tab(profile: Path) -> AsyncIterator[Tab]:
    told = profile / "DevToolsActivePort"
    with anyio.fail_after(WITHIN_S):
        while not told.exists() or "\n" not in told.read_text():
            await anyio.sleep(0.05)
    port = int(told.read_text().split("\n")[0])
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        async with http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
            yield Tab(socket)
