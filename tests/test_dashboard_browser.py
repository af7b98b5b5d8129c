"""The page in a real browser, where there is one: what it shows, and that nothing it is told runs."""

import pytest

from relight.events import codec
from relight.events.bus.client import open_bus
from relight.events.bus.embedded import Embedded
from relight.events.ids import EngineName, JobName
from relight.events.schema import EngineState
from tests.browser import browser, chromium
from tests.dashboard_rig import LargeJob, dashboard

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        chromium() is None, reason="no Chromium is on PATH (Debian: apt-get install chromium)"
    ),
]

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


async def test_what_stands_on_a_bus_is_text_on_the_page_and_live(server: Embedded) -> None:
    async with open_bus(server.url) as bus:
        job = LargeJob(bus, "grpo-1", engines=12)
        await job.put()
        engine = EngineState(node=job.nodes[0], incarnation=1, retired_because=EVIL)
        await job.story.commit(**dict([codec.encode_engine(EngineName(EVIL), engine)]))
        await job.alarm(EVIL, EVIL)
        await bus.enrol(JobName(EVIL))
        async with dashboard(server.url) as page, browser() as tab:
            await tab.call(
                "Page.addScriptToEvaluateOnNewDocument", source="window.alert = () => { window.ran = true }"
            )
            await tab.open(f"{page.address}/#/")
            await tab.until("document.querySelectorAll('table.jobs tbody tr').length === 1")
            await tab.evaluate("document.querySelector('table.jobs tbody a').click()")
            await tab.until("document.querySelectorAll('table.engines tbody tr').length === 13")
            await tab.until(f"document.querySelector('table.engines').textContent.includes({EVIL!r})")
            await tab.until(f"document.querySelector('.alarms').textContent.includes({EVIL!r})")
            await tab.until(f"document.querySelector('.tail').textContent.includes({EVIL!r})")
            await job.alarm("live", "said while somebody looks")
            await tab.until(
                "document.querySelector('.tail li').textContent.includes('said while somebody looks')"
            )
            await tab.evaluate("document.querySelector('.recoveries a').click()")
            await tab.until(
                "document.querySelector('#sheet').open && document.querySelectorAll('.chain li').length > 0"
            )
            assert await tab.evaluate(
                "window.ran === undefined && document.querySelectorAll('main img, main script').length === 0"
            )
            for width in (400, 1600):
                await tab.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=900,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert await tab.evaluate(overflow) <= 0
            assert tab.errors() == []


async def test_pages_that_are_left_keep_no_connection(server: Embedded) -> None:
    """A browser opens six to one address: with a seventh that is held, no page of it loads any more."""
    async with open_bus(server.url) as bus:
        await LargeJob(bus, "grpo-1", engines=2, troubled=False).put()
        async with dashboard(server.url) as page, browser() as tab:
            await tab.open(f"{page.address}/#/jobs/nobody")
            await tab.until("document.querySelector('#banner')?.textContent.includes('has no job')")
            for _ in range(7):
                await tab.call("Page.navigate", url="about:blank")
                await tab.call("Page.navigate", url=f"{page.address}/#/jobs/grpo-1")
                await tab.until("document.querySelector('#pulse')?.dataset.state === 'live'")
