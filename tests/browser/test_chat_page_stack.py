"""The chat page on a whole stack with the simulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.browser.chat_page import ask, done, last_reply, open_chat, stored_reply
from tests.browser.conftest import Shot
from tests.stack_process import PAID_KEY, StackProcess

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def resumed_over_sse(url: str, request_id: str) -> str:
    """The text of a reply as the gateway tells it, read from its very beginning."""
    text = ""
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {PAID_KEY}"}
    ) as client:
        path = f"/v1/chat/completions/{request_id}"
        async with client.stream("GET", path, params={"stream": "true", "after": "0-0"}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
    return text


async def some_text(page: Page) -> str:
    """Wait until the reply has begun and is not over; returns what is out."""
    reply = last_reply(page)
    await expect(reply.locator(".text p").first).to_be_visible()
    await expect(reply).to_have_attribute("data-phase", "open")
    return await reply.locator(".text").inner_text()


async def test_a_question_streams_to_its_end(page: Page, sim_stack: StackProcess, shot: Shot) -> None:
    await open_chat(page, sim_stack.url)
    await ask(page, "What is the capital of France?")
    first = await some_text(page)
    await shot(page, "stack-streaming")
    await done(page, timeout=60_000)
    reply = await stored_reply(page)
    assert reply["status"] == "completed"
    assert reply["text"].startswith(first.rstrip())
    assert len(reply["text"]) > len(first)
    assert reply["text"] == await resumed_over_sse(sim_stack.url, reply["requestId"])
    await expect(last_reply(page).locator(".state")).to_contain_text("tokens/s")
    await shot(page, "stack-finished")


async def test_killed_edge_mid_reply_continues_exactly(
    page: Page, sim_stack: StackProcess, shot: Shot
) -> None:
    edge = sim_stack.process_state("edge")
    assert edge.pid is not None
    await open_chat(page, sim_stack.url)
    await ask(page, "Tell me something long about rivers.")
    await some_text(page)
    await expect(last_reply(page)).to_have_attribute("data-phase", "open")
    os.kill(edge.pid, signal.SIGKILL)
    await expect(page.locator("#link")).not_to_have_attribute("data-state", "ready")
    await shot(page, "stack-edge-killed")
    await done(page, timeout=60_000)
    reply = await stored_reply(page)
    assert reply["status"] == "completed"
    assert reply["text"] == await resumed_over_sse(sim_stack.url, reply["requestId"])
    await expect(last_reply(page).locator(".state")).to_contain_text("resumed after an interruption")
    await asyncio.to_thread(sim_stack.wait_ready)


async def test_reload_mid_reply_continues_exactly(page: Page, sim_stack: StackProcess) -> None:
    """E7."""
    await open_chat(page, sim_stack.url)
    await ask(page, "First turn")
    await done(page, timeout=60_000)
    await ask(page, "Second turn")
    await some_text(page)
    await page.reload()
    await done(page, timeout=60_000)
    reply = await stored_reply(page)
    assert reply["text"] == await resumed_over_sse(sim_stack.url, reply["requestId"])
    await expect(page.locator("article.reply")).to_have_count(2)


async def test_stop_ends_the_generation(page: Page, sim_stack: StackProcess) -> None:
    await open_chat(page, sim_stack.url)
    await ask(page, "Stop this one early")
    await some_text(page)
    await page.keyboard.press("Escape")
    await done(page)
    reply = await stored_reply(page)
    assert reply["status"] == "cancelled"
    await expect(last_reply(page).locator(".state")).to_contain_text("Stopped")


async def test_refusal_by_moderation_is_shown_in_place(
    page: Page, sim_stack: StackProcess, shot: Shot
) -> None:
    await open_chat(page, sim_stack.url)
    await ask(page, "I will kill you, you worthless idiot")
    await expect(last_reply(page).locator(".error")).to_contain_text("Refused by moderation")
    await shot(page, "stack-refused")
    await page.get_by_role("button", name="Edit the message").click()
    await page.get_by_label("Message", exact=True).fill("How do rivers begin?")
    await page.keyboard.press("Enter")
    await done(page, timeout=60_000)
    assert (await stored_reply(page))["status"] == "completed"


async def test_the_gateways_policy_lets_the_page_work(page: Page, sim_stack: StackProcess) -> None:
    """The `page` fixture fails on any refusal by the policy; here that the policy is there at all."""
    response = await page.goto(sim_stack.url)
    assert response is not None
    assert "default-src 'self'" in (await response.all_headers())["content-security-policy"]
    await expect(page.locator("#link")).to_have_attribute("data-state", "ready")
