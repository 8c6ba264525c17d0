"""The chat page against a scripted edge: what it does when things go wrong, to the character."""

from __future__ import annotations

import asyncio

import pytest
from playwright.async_api import BrowserContext, Page, expect

from streaming_edge.close_codes import CloseCase
from tests.browser.chat_page import (
    ask,
    done,
    last_reply,
    open_chat,
    sideways_scroll,
    stored_reply,
    text_holds,
)
from tests.browser.conftest import Shot
from tests.browser.fake_edge import FakeEdge, ended, error, progress, texts, whole

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PIECES = [f"word{n} " for n in range(40)]
TEXT = "".join(PIECES)
BEFORE_TEXT = 4  # status frames
UNCONFIRMED = "may or may not have arrived"


async def test_a_question_is_answered_and_the_next_turn_sends_only_itself(
    page: Page, fake_edge: FakeEdge, shot: Shot
) -> None:
    await open_chat(page, fake_edge.url)
    await shot(page, "empty")
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 20
    await ask(page, "First question?")
    await text_holds(page, "word19")
    await expect(last_reply(page).locator(".state")).to_contain_text("Writing")
    await shot(page, "streaming")
    fake_edge.release()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT
    await expect(last_reply(page).locator(".state")).to_contain_text("to first token")
    await expect(last_reply(page).locator(".state")).to_contain_text("tokens/s")
    await shot(page, "finished")

    await ask(page, "Second?")
    await expect(page.locator("article.reply")).to_have_count(2)
    await done(page)
    first, second = (f["body"] for f in fake_edge.frames("chat.create"))
    assert first["conversation_id"] == second["conversation_id"]
    assert second["messages"] == [{"role": "user", "content": "Second?"}]
    assert second["model"] == "default"


async def test_progress_is_shown_before_the_first_token(page: Page, fake_edge: FakeEdge) -> None:
    await open_chat(page, fake_edge.url)
    state = last_reply(page).locator(".state")
    for index, words in enumerate(["checked", "queue", "Handed to a worker", "Reading"], 1):
        fake_edge.script, fake_edge.hold_at = whole(PIECES[:3]), index
        await ask(page, f"Question {index}")
        await expect(state).to_contain_text(words)
        fake_edge.release()
        await done(page)


async def test_a_reply_that_is_less_because_of_overload_says_so_until_its_end(
    page: Page, fake_edge: FakeEdge
) -> None:
    first, *others = whole(PIECES)
    degraded = {"step": "standard_smaller_model", "reason": "slow"}
    fake_edge.script = [first | {"model": "small-model", "degraded": degraded}, *others]
    fake_edge.hold_at = 2
    await open_chat(page, fake_edge.url)
    await ask(page, "Question?")
    state = last_reply(page).locator(".state")
    await expect(state).to_contain_text("queue")
    await expect(state).to_contain_text("answered by small-model")
    fake_edge.release()
    await done(page)
    await expect(state).to_contain_text("answered by small-model")


async def test_drop_mid_reply_continues_exactly(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    """E1, E13: cut at several places; the frames before the offset come again and are ignored."""
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.repeats = whole(PIECES), 3
    cuts = [2, BEFORE_TEXT + 1, BEFORE_TEXT + 17, BEFORE_TEXT + 40]
    fake_edge.hold_at = cuts[0]
    await ask(page, "Go on")
    for number, cut in enumerate(cuts):
        if cut > BEFORE_TEXT:
            await text_holds(page, PIECES[cut - BEFORE_TEXT - 1].strip())
        else:
            await expect(last_reply(page).locator(".state")).to_contain_text("queue")
        fake_edge.drop()
        await expect(page.locator("#link")).not_to_have_attribute("data-state", "ready")
        await shot(page, f"dropped-{cut}")
        await expect(page.locator("#link")).to_have_attribute("data-state", "ready")
        fake_edge.release(until=cuts[number + 1] if number + 1 < len(cuts) else None)
    await done(page)
    reply = await stored_reply(page)
    assert reply["text"] == TEXT
    assert reply["status"] == "completed"
    assert len(fake_edge.frames("chat.create")) == 1
    await expect(last_reply(page).locator(".state")).to_contain_text("resumed after an interruption")


async def test_end_missed_while_disconnected_is_read_afterwards(page: Page, fake_edge: FakeEdge) -> None:
    """E2: the socket is gone exactly while the terminal entry is written."""
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + len(PIECES)
    await ask(page, "Miss the end")
    await text_holds(page, PIECES[-1].strip())
    fake_edge.refusing = True
    fake_edge.drop()
    await expect(page.locator("#link-text")).to_contain_text("Reconnecting in")
    fake_edge.release()
    fake_edge.refusing = False
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT


@pytest.mark.parametrize("cut", [2, BEFORE_TEXT + 9])
async def test_reload_mid_reply_is_exact(page: Page, fake_edge: FakeEdge, cut: int) -> None:
    """E7: with an earlier turn in the conversation, before and after the first text."""
    await open_chat(page, fake_edge.url)
    await ask(page, "First turn")
    await done(page)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), cut
    await ask(page, "Second turn")
    if cut > BEFORE_TEXT:
        await text_holds(page, PIECES[cut - BEFORE_TEXT - 1].strip())
    else:
        await expect(last_reply(page).locator(".state")).to_contain_text("queue")
    await page.reload()
    fake_edge.release()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT
    await expect(page.locator("article.reply")).to_have_count(2)
    await expect(page.locator("article.reply").first).to_contain_text("Hello there.")
    await expect(page.locator(".prompt").last).to_have_text("You: Second turn")
    assert len(fake_edge.frames("chat.create")) == 2


async def test_reload_after_an_old_snapshot_is_exact(page: Page, fake_edge: FakeEdge) -> None:
    """A tab that crashes loses its last frames: the older text continues from its own offset."""
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 5
    await ask(page, "Crash")
    await page.wait_for_function(
        """() => { const { current } = JSON.parse(sessionStorage.getItem("headrace.chats"));
        const kept = sessionStorage.getItem(`headrace.chat.${current}`);
        return kept.includes("word4") && (window.kept = kept); }"""
    )
    fake_edge.release(until=BEFORE_TEXT + 25)
    await text_holds(page, "word24")
    await page.evaluate(
        """() => { const { current } = JSON.parse(sessionStorage.getItem("headrace.chats"));
        const restore = () => sessionStorage.setItem(`headrace.chat.${current}`, window.kept);
        addEventListener("pagehide", restore); }"""
    )
    await page.reload()
    fake_edge.release()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT
    assert fake_edge.frames("stream.subscribe")[-1]["after"] == "1-5"


async def test_stop_keeps_what_was_written(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 6
    await ask(page, "Stop me")
    await text_holds(page, "word5")
    await page.get_by_role("button", name="Stop the reply").click()
    await done(page)
    await expect(last_reply(page).locator(".state")).to_contain_text("Stopped")
    assert (await stored_reply(page))["text"] == "".join(PIECES[:6])
    await shot(page, "stopped")
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()


async def test_stop_after_a_reload_and_while_disconnected(page: Page, fake_edge: FakeEdge) -> None:
    """D8: stopping goes by request id, and is said again on the next connection."""
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 6
    await ask(page, "Stop me later")
    await text_holds(page, "word5")
    await page.reload()
    await text_holds(page, "word5")
    fake_edge.refusing = True
    fake_edge.drop()
    await expect(page.locator("#link")).not_to_have_attribute("data-state", "ready")
    await page.keyboard.press("Escape")
    fake_edge.refusing = False
    await done(page)
    assert (await stored_reply(page))["status"] == "cancelled"


@pytest.mark.parametrize(
    ("code", "title", "button"),
    [
        ("content_filter", "Refused by moderation", "Edit the message"),
        ("context_length_exceeded", "too long", "Edit the message"),
        ("rate_limited", "Too many requests", "Try again"),
        ("queue_full", "queue is full", "Try again"),
        ("made_up_tomorrow", "Something went wrong", "Try again"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
async def test_errors_are_shown_in_place(
    page: Page, fake_edge: FakeEdge, shot: Shot, code: str, title: str, button: str, late: bool
) -> None:
    """Refused at once (an error frame) or after acceptance (the terminal entry): the same for people."""
    await open_chat(page, fake_edge.url)
    body = error(code, "What the server says about it.")
    fake_edge.script = [*progress("accepted"), ended("refused", error=body)] if late else body
    await ask(page, "A question that fails")
    await expect(last_reply(page).locator(".error")).to_contain_text(title)
    await expect(last_reply(page).locator(".error")).to_contain_text(body["message"])
    await shot(page, f"error-{code}")
    fake_edge.script = whole(["Fine", " now."])
    await page.get_by_role("button", name=button).click()
    if button == "Edit the message":
        await expect(page.get_by_label("Message", exact=True)).to_have_value("A question that fails")
        await expect(page.locator("article.reply")).to_have_count(0)
        await page.keyboard.press("Enter")
    await done(page)
    await text_holds(page, "Fine now.")
    await expect(page.locator("article.reply")).to_have_count(1)


async def test_failure_after_text_keeps_the_text_and_says_so(
    page: Page, fake_edge: FakeEdge, shot: Shot
) -> None:
    """B7, B8: never a clean end, and the error is not part of the reply."""
    await open_chat(page, fake_edge.url)
    fake_edge.script = [
        *progress("accepted", "moderated", "dispatched", "started"),
        *texts(PIECES[:5]),
        ended("failed", 5, error=error("engine_error", "The engine failed.")),
    ]
    await ask(page, "Fail late")
    await expect(last_reply(page).locator(".error")).to_contain_text("The engine failed.")
    reply = await stored_reply(page)
    assert (reply["text"], reply["status"]) == ("".join(PIECES[:5]), "failed")
    await shot(page, "failed")


async def test_lost_before_acceptance_is_sent_again_with_the_same_key_o5(
    page: Page, fake_edge: FakeEdge
) -> None:
    """So it can become one request only, whether or not the first one has arrived."""
    await open_chat(page, fake_edge.url)
    fake_edge.silent = True
    await ask(page, "Did you get this?")
    await expect(last_reply(page).locator(".state")).to_contain_text("Sending")
    fake_edge.silent = False
    fake_edge.drop()
    await text_holds(page, "Hello there.")
    first, second = fake_edge.frames("chat.create")
    assert first == second
    assert first["idempotency_key"]


async def test_reload_before_acceptance_is_told(page: Page, fake_edge: FakeEdge) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.silent = True
    await ask(page, "Did you get this?")
    await expect(last_reply(page)).to_have_attribute("data-phase", "sent")
    await page.reload()
    await expect(last_reply(page).locator(".error")).to_contain_text(UNCONFIRMED)
    assert len(fake_edge.frames("chat.create")) == 1


async def test_a_question_asked_while_disconnected_is_sent_once_connected(
    page: Page, fake_edge: FakeEdge, shot: Shot
) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.refusing = True
    fake_edge.drop()
    await expect(page.locator("#notice")).to_contain_text("Connection lost")
    await ask(page, "Later")
    await expect(last_reply(page).locator(".state")).to_contain_text("Waiting for the connection")
    await shot(page, "disconnected")
    fake_edge.refusing = False
    # Not by a real click: the page may be quicker to reconnect by itself, and then the button is gone.
    await page.get_by_role("button", name="Reconnect now", include_hidden=True).dispatch_event("click")
    await text_holds(page, "Hello there.")
    await expect(page.locator("#notice")).to_be_hidden()
    # Where both ways to reconnect were taken, it was sent over both sockets, as one and the same request.
    assert len({frame["idempotency_key"] for frame in fake_edge.frames("chat.create")}) == 1


async def test_connection_that_died_without_a_word_is_replaced(page: Page, fake_edge: FakeEdge) -> None:
    """A dead network closes nothing: after 20 s of silence the page pings, 10 s later it reconnects."""
    await page.clock.install()
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 5
    await ask(page, "Pull the plug")
    await page.clock.run_for(1_000)
    await text_holds(page, "word4")
    fake_edge.dead |= fake_edge.sockets
    await page.clock.run_for(24_000)
    await expect(page.locator("#link")).to_have_attribute("data-state", "ready")
    await page.clock.run_for(10_000)
    fake_edge.release()
    await page.clock.resume()
    await done(page, timeout=60_000)
    assert (await stored_reply(page))["text"] == TEXT
    assert len(fake_edge.frames("ping")) == 1
    assert len(fake_edge.frames("auth")) == 2


async def test_quiet_connection_that_answers_pings_is_kept(page: Page, fake_edge: FakeEdge) -> None:
    pongs: asyncio.Queue[str] = asyncio.Queue()

    def keep_pong(payload: str | bytes) -> None:
        if "pong" in str(payload):
            pongs.put_nowait(str(payload))

    page.on("websocket", lambda socket: socket.on("framereceived", keep_pong))
    await page.clock.install()
    await open_chat(page, fake_edge.url)
    for _ in range(3):
        await page.clock.run_for(24_000)
        await asyncio.wait_for(pongs.get(), 10)
        await expect(page.locator("#link")).to_have_attribute("data-state", "ready")
    assert len(fake_edge.frames("auth")) == 1


async def test_takeover_by_another_worker_is_shown_and_exact(page: Page, fake_edge: FakeEdge) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.script = [
        *progress("accepted", "moderated", "dispatched", "started"),
        *texts(PIECES[:10]),
        {"type": "stream.status", "offset": "2-0", "status": "resumed"},
        *texts(PIECES[10:], attempt=2, first=11),
        ended(tokens=len(PIECES)),
    ]
    fake_edge.hold_at = BEFORE_TEXT + 11
    await ask(page, "Lose a worker")
    await expect(last_reply(page).locator(".state")).to_contain_text("Another worker takes over")
    fake_edge.release()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT
    await expect(last_reply(page).locator(".state")).to_contain_text("continued by another worker")


async def test_stream_that_is_busy_is_asked_for_again(page: Page, fake_edge: FakeEdge) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 5
    await ask(page, "Busy")
    await text_holds(page, "word4")
    fake_edge.subscribe_error = error("service_unavailable", "Not now.")
    fake_edge.drop()
    fake_edge.release()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT


@pytest.mark.parametrize("code", ["stream_expired", "stream_lost", "not_found"])
async def test_stream_that_is_gone_is_told_and_nothing_starts_again(
    page: Page, fake_edge: FakeEdge, code: str
) -> None:
    """E4, E10: what was read stays; a new generation is the person's decision."""
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 5
    await ask(page, "Come back late")
    await text_holds(page, "word4")
    fake_edge.subscribe_error = error(code, "It is gone.")
    fake_edge.drop()
    await done(page)
    await expect(last_reply(page).locator(".error")).to_contain_text("It is gone.")
    assert (await stored_reply(page))["text"] == "".join(PIECES[:5])
    assert len(fake_edge.frames("chat.create")) == 1


async def test_a_refused_key_stops_and_asks_for_another(
    page: Page, fake_edge: FakeEdge, shot: Shot
) -> None:
    await page.add_init_script("sessionStorage.setItem('headrace.key', 'sk-wrong')")
    await page.goto(fake_edge.url)
    await expect(page.locator("#settings-error")).to_contain_text("not known")
    await expect(page.locator("#link")).to_have_attribute("data-state", "stopped")
    await shot(page, "settings")
    await page.get_by_label("API key").fill("sk-headrace-dev")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator("#link")).to_have_attribute("data-state", "ready")
    assert "sk-" not in page.url


async def test_markup_in_messages_stays_text(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    await open_chat(page, fake_edge.url)
    evil = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    reply = (
        f"{evil} and **bold**\n\n```html\n<b>{evil}</b>\n\nstill code\n```\nAfter &amp; the end\u2028."
    )
    fake_edge.script = whole([reply[i : i + 3] for i in range(0, len(reply), 3)])
    await ask(page, evil)
    await done(page)
    assert await page.locator("#turns img, #turns script, #turns b").count() == 0
    assert await page.title() != "owned"
    await expect(last_reply(page).locator("pre code")).to_have_text(f"<b>{evil}</b>\n\nstill code")
    await expect(last_reply(page).locator(".text p").first).to_have_text(f"{evil} and **bold**")
    await expect(last_reply(page).locator(".text p").last).to_contain_text("After &amp; the end")
    await shot(page, "markup")


async def test_text_shown_while_it_grows_equals_text_shown_at_once(
    page: Page, fake_edge: FakeEdge
) -> None:
    """Wherever the pieces are cut, the incremental rendering ends as the whole one."""
    await page.goto(fake_edge.url)
    samples = [
        "a\n\nb\nc\n```py\nx = 1\n\n\ny\n```\nd\n\n\n\n  ```\nopen to the end\n",
        "```inline``` is no fence\n``two``\n````\n```\nnested\n````\nend",
        "text\n```\n\n```\n```",
        "\n\n  \n`a`\n```c++\nint main() {}",
    ]
    differences = await page.evaluate(
        """async (samples) => {
            const { BlockWriter } = await import("/static/text.js");
            const wrong = [];
            for (const sample of samples) {
                const once = document.createElement("div");
                new BlockWriter(once).update(sample, false);
                for (let step = 1; step <= sample.length; step++) {
                    const grown = document.createElement("div");
                    const writer = new BlockWriter(grown);
                    for (let end = step; end < sample.length; end += step) {
                        writer.update(sample.slice(0, end), true);
                    }
                    writer.update(sample, false);
                    const [is, should] = [grown.innerHTML, once.innerHTML];
                    if (is !== should) wrong.push([step, is, should]);
                }
            }
            return wrong;
        }""",
        samples,
    )
    assert differences == []


async def test_offsets_compare_as_pairs_of_64_bits(page: Page, fake_edge: FakeEdge) -> None:
    """E13: no rounding near 2**64, and 1-10 comes after 1-9."""
    await page.goto(fake_edge.url)
    top = 2**64 - 1
    ordered = [
        None,
        "0-1",
        "0-3",
        "1-0",
        "1-9",
        "1-10",
        "2-0",
        f"{top - 1}-{top}",
        f"{top}-{top - 1}",
        f"{top}-{top}",
    ]
    signs = await page.evaluate(
        """async (ordered) => {
            const { compareOffsets } = await import("/static/protocol.js");
            return ordered.map((a) => ordered.map((b) => compareOffsets(a, b)));
        }""",
        ordered,
    )
    assert signs == [[(i > j) - (i < j) for j in range(len(ordered))] for i in range(len(ordered))]


async def test_backoff_grows_to_a_bound_and_is_spread(page: Page, fake_edge: FakeEdge) -> None:
    await page.goto(fake_edge.url)
    lowest, highest = await page.evaluate(
        """async () => {
            const { backoffMs } = await import("/static/protocol.js");
            const attempts = [0, 1, 2, 3, 4, 5, 6, 2000];
            return [0, 0.999999].map((random) => attempts.map((attempt) => backoffMs(attempt, random)));
        }"""
    )
    assert lowest == sorted(lowest)
    assert lowest[0] == 250
    assert lowest[-1] == 7500
    assert all(low < high <= 15_000 for low, high in zip(lowest, highest, strict=True))


async def test_close_codes_are_those_of_the_edge(page: Page, fake_edge: FakeEdge) -> None:
    await page.goto(fake_edge.url)
    codes = {case.value.code: case.value.reconnect for case in CloseCase} | {1001: True, 1006: True}
    reconnects = await page.evaluate(
        """async (codes) => {
            const { closeAction } = await import("/static/protocol.js");
            return codes.map((code) => closeAction(code).reconnect);
        }""",
        list(codes),
    )
    assert dict(zip(codes, reconnects, strict=True)) == codes


async def test_close_that_means_stop_stops_until_asked(page: Page, fake_edge: FakeEdge) -> None:
    await open_chat(page, fake_edge.url)
    await fake_edge.close_all(1009)
    await expect(page.locator("#link")).to_have_attribute("data-state", "stopped")
    await page.get_by_role("button", name="Connect again").click()
    await expect(page.locator("#link")).to_have_attribute("data-state", "ready")


async def test_two_tabs_do_not_disturb_each_other(
    page: Page, context: BrowserContext, fake_edge: FakeEdge
) -> None:
    """E8: own conversation, own cursor, own socket."""
    other = await context.new_page()
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 8
    for tab, question in ((page, "In the first tab"), (other, "In the second tab")):
        await open_chat(tab, fake_edge.url)
        await ask(tab, question)
        await text_holds(tab, "word7")
    await other.keyboard.press("Escape")
    await done(other)
    assert (await stored_reply(other))["status"] == "cancelled"
    await other.reload()
    await expect(other.locator("article.reply")).to_have_count(1)
    fake_edge.release()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT
    conversations = {f["body"]["conversation_id"] for f in fake_edge.frames("chat.create")}
    assert len(conversations) == 2


async def test_chats_of_the_tab_reply_side_by_side(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 8
    await ask(page, "The long one")
    await text_holds(page, "word7")
    await page.get_by_role("button", name="New chat").click()
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()
    await ask(page, "Another one")
    await text_holds(page, "word7")
    await shot(page, "two-chats")
    fake_edge.release()
    await done(page)
    await page.locator("#chat-list").get_by_text("The long one").click()
    await done(page)
    assert (await stored_reply(page))["text"] == TEXT
    await expect(page.get_by_role("heading", level=1)).to_have_text("The long one")


async def test_fits_a_phone(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    await page.set_viewport_size({"width": 390, "height": 780})
    await open_chat(page, fake_edge.url)
    await shot(page, "phone-empty")
    assert await sideways_scroll(page) <= 0
    line = "x" * 200
    fake_edge.script = whole([f"{line}\n\n```\n{line} = {line}\n```\n", "Short."])
    await ask(page, f"{line} and some words")
    await done(page)
    assert await sideways_scroll(page) <= 0
    await shot(page, "phone-long")
    fake_edge.script = error("queue_full", "The queue is full, try again in a few seconds.")
    await ask(page, "One more")
    await expect(last_reply(page).locator(".error")).to_be_visible()
    await shot(page, "phone-error")
    await page.get_by_role("button", name="Conversations").click()
    await expect(page.get_by_role("button", name="New chat")).to_be_focused()
    await expect(page.locator("#sidebar")).to_be_in_viewport(ratio=1)
    await shot(page, "phone-menu")
    assert await sideways_scroll(page) <= 0
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("button", name="Conversations")).to_be_focused()
    await expect(page.locator("#sidebar")).not_to_be_in_viewport()


async def test_keyboard_alone_is_enough(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    await open_chat(page, fake_edge.url)
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()
    for _ in range(10):  # backwards to the very first stop
        await page.keyboard.press("Shift+Tab")
        if await page.evaluate("document.activeElement.className") == "skip":
            break
    await expect(page.get_by_text("Skip to the message field")).to_be_focused()
    await shot(page, "skip-link")
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()
    await page.keyboard.type("one")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("two")
    fake_edge.script, fake_edge.hold_at = whole(PIECES), BEFORE_TEXT + 2
    await page.keyboard.press("Enter")
    await text_holds(page, "word1")
    assert fake_edge.frames("chat.create")[0]["body"]["messages"][0]["content"] == "one\ntwo"
    await page.keyboard.press("Escape")
    await done(page)
    await page.keyboard.press("Shift+Tab")  # from the field to the reply's own buttons
    await page.keyboard.press("Shift+Tab")
    outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    names = await page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea")]
            .filter((node) => node.checkVisibility())
            .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
            .map((node) => node.outerHTML)"""
    )
    assert names == []


async def test_listeners_hear_whole_sentences(page: Page, fake_edge: FakeEdge) -> None:
    await open_chat(page, fake_edge.url)
    fake_edge.script = whole(["The sky", " is blue. The", " sea is", " too"])
    fake_edge.hold_at = BEFORE_TEXT + 3
    await ask(page, "Colours?")
    heard = page.locator("#announcer p")
    await expect(heard).to_have_text(["The sky is blue."])
    fake_edge.release()
    await expect(heard).to_have_count(3)
    assert await heard.nth(1).text_content() == "The sea is too"
    await expect(heard.nth(2)).to_contain_text("Reply complete.")


async def test_dark_scheme(page: Page, fake_edge: FakeEdge, shot: Shot) -> None:
    await page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    await open_chat(page, fake_edge.url)
    await shot(page, "dark-empty")
    fake_edge.script = whole(
        ["Use a loop:\n\n```py\nfor n in range(3):\n    print(n)\n```\n\nThat ", "prints it."]
    )
    await ask(page, "How do I count?")
    await done(page)
    await shot(page, "dark-finished")
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(17, 23, 24)"
    running = await page.evaluate("document.getAnimations().length")
    assert running == 0
