"""Headless Chromium, one for the whole session; a new context (no shared storage) for each test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.browser.fake_edge import FakeEdge

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Two cores may be busy with a stack and an engine beside the browser.
TIMEOUT_MS = 15_000
expect.set_options(timeout=TIMEOUT_MS)
Shot = Callable[[Page, str], Awaitable[Path]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        pytest.fail("no Chromium: run apt-get install -y chromium", pytrace=False)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext) -> AsyncIterator[Page]:
    """A page on which no script error and no refusal by the content security policy may happen."""
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: (
            faults.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    yield page
    assert faults == []


@pytest_asyncio.fixture(loop_scope="session")
async def fake_edge() -> AsyncIterator[FakeEdge]:
    async with FakeEdge() as edge:
        yield edge


@pytest.fixture
def shot(tmp_path: Path) -> Shot:
    """Saves a screenshot of the page under pytest's folder, for people to look at."""

    async def take(page: Page, name: str) -> Path:
        path = tmp_path / f"{name}.png"
        await page.screenshot(path=path)
        return path

    return take
