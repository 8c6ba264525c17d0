"""What the browser tests do with the chat page, in the words of a person."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Locator, Page, expect


async def open_chat(page: Page, url: str) -> None:
    await page.goto(url)
    await expect(page.locator("#link")).to_have_attribute("data-state", "ready")


async def ask(page: Page, question: str) -> None:
    """Type a question and send it, by keyboard."""
    await page.get_by_label("Message", exact=True).fill(question)
    await page.keyboard.press("Enter")


def last_reply(page: Page) -> Locator:
    return page.locator("article.reply").last


async def done(page: Page, timeout: float = 15_000) -> None:
    await expect(last_reply(page)).to_have_attribute("data-phase", "done", timeout=timeout)


async def stored_reply(page: Page) -> dict[str, Any]:
    """The last reply of the current chat as the page keeps it; its text is exact, unlike the DOM's."""
    reply: dict[str, Any] = await page.evaluate(
        """() => {
            const { current } = JSON.parse(sessionStorage.getItem("headrace.chats"));
            return JSON.parse(sessionStorage.getItem(`headrace.chat.${current}`)).turns.at(-1).reply;
        }"""
    )
    return reply


async def text_holds(page: Page, part: str, timeout: float = 15_000) -> None:
    await expect(last_reply(page).locator(".text")).to_contain_text(part, timeout=timeout)


async def sideways_scroll(page: Page) -> int:
    """How many pixels the page is wider than its window."""
    width: int = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return width
