// The chat page: what the person does, and what they see and hear.

import { errorAdvice } from "./protocol.js";
import { Replies } from "./replies.js";
import { summary } from "./reply.js";
import { ChatStore, keyState, loadKey, onLoopback, saveKey } from "./store.js";
import { SentenceReader } from "./text.js";
import { TurnView, element } from "./view.js";

const NOTICE_AFTER_MS = 800;
const NEAR_END_PX = 80;
const TITLE_CHARACTERS = 60;

const $ = (id) => document.getElementById(id);
const store = new ChatStore();
const views = new Map(); // turn -> TurnView, of the chat shown
let reader = new SentenceReader();
let frameRequested = false;
let followEnd = true;
let everReady = false;
let noticeTimer = 0;

const replies = new Replies(store, {
  onChange: showSoon,
  onEnd: announceEnd,
  onConnection: showConnection,
  onError: (error) => showNotice(errorAdvice(error).title, error.message),
});

// ---- what the person does ----------------------------------------------------------------------

function currentReply() {
  return store.current?.turns.at(-1)?.reply ?? null;
}

function isLive(reply) {
  return reply !== null && reply.phase !== "done";
}

/** Send a message in the current chat; false when there is none, or a reply is still being written. */
function ask(prompt) {
  if (prompt.trim() === "" || isLive(currentReply())) return false;
  const chat = store.current ?? store.create(titleOf(prompt));
  reader = new SentenceReader();
  followEnd = true;
  replies.ask(chat, prompt);
  showChat();
  return true;
}

function titleOf(prompt) {
  const characters = Array.from(prompt.trim().split("\n", 1)[0]);
  const cut = characters.length > TITLE_CHARACTERS;
  return cut ? `${characters.slice(0, TITLE_CHARACTERS - 1).join("")}…` : characters.join("");
}

function stopReply() {
  if (store.current !== null) replies.stop(store.current);
}

const actions = {
  retry(turn) {
    store.current.turns.pop();
    ask(turn.prompt);
    $("prompt").focus();
  },
  edit(turn) {
    const chat = store.current;
    chat.turns.pop();
    if (chat.turns.length === 0) store.remove(chat);
    else store.save(chat, true);
    showChat();
    $("prompt").value = turn.prompt;
    composerChanged();
    $("prompt").focus();
  },
  key: () => openSettings(),
};

function submit() {
  if (ask($("prompt").value)) {
    $("prompt").value = "";
    composerChanged();
  }
}

function composerChanged() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  const live = isLive(currentReply());
  $("send").hidden = live;
  $("send").disabled = prompt.value.trim() === "";
  $("stop").hidden = !live;
  $("stop").disabled = live && currentReply().wantsCancel;
  // A button that goes away hands the focus on; it would be lost otherwise.
  const focused = [$("send"), $("stop")].find((button) => button === document.activeElement);
  if (focused?.hidden || focused?.disabled) prompt.focus();
}

function openSettings(message = "") {
  const { typed, remembered } = keyState();
  $("settings-error").textContent = message;
  $("settings-error").hidden = message === "";
  $("api-key").value = typed ? loadKey() : "";
  $("remember").checked = remembered;
  if (onLoopback) $("api-key").placeholder = "development key";
  if (!$("settings").open) $("settings").showModal();
}

function openMenu(open) {
  document.body.classList.toggle("menu-open", open);
  $("scrim").hidden = !open;
  $("menu").setAttribute("aria-expanded", String(open));
  document.querySelector("main").inert = open; // what lies behind the scrim is out of reach
  if (open) $("new-chat").focus();
}

// ---- showing -----------------------------------------------------------------------------------

/** A chat changed: show it with the next frame of the screen. */
function showSoon(chat) {
  if (chat !== store.current) {
    showList();
  } else if (!frameRequested) {
    frameRequested = true;
    requestAnimationFrame(showTurns);
  }
}

function showTurns() {
  frameRequested = false;
  const turns = store.current?.turns ?? [];
  const connected = replies.connection.name === "ready";
  turns.forEach((turn, index) => views.get(turn)?.update({ connected, last: index === turns.length - 1 }));
  composerChanged();
  showList();
  announceText();
  if (followEnd) $("log").scrollTop = $("log").scrollHeight;
}

/** Build the page for the current chat anew. */
function showChat() {
  const chat = store.current;
  views.clear();
  for (const turn of chat?.turns ?? []) views.set(turn, new TurnView(turn, actions));
  $("turns").replaceChildren(...[...views.values()].map((view) => view.node));
  $("empty").hidden = chat !== null;
  $("title").textContent = chat?.title ?? "New chat";
  document.title = chat ? `${chat.title} · Headrace` : "Headrace";
  showTurns();
}

function switchTo(chat) {
  store.select(chat);
  reader = new SentenceReader();
  reader.next(currentReply()?.text ?? "", false);
  followEnd = true;
  openMenu(false);
  showChat();
  $("prompt").focus();
}

function showList() {
  const list = $("chat-list");
  const signature = JSON.stringify(
    store.chats.map((chat) => [chat.id, chat === store.current, isLive(chat.turns.at(-1)?.reply ?? null)]),
  );
  if (list.dataset.signature === signature) return;
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.chat : null;
  list.dataset.signature = signature;
  list.replaceChildren(
    ...store.chats.map((chat) => {
      const live = isLive(chat.turns.at(-1)?.reply ?? null);
      const button = element("button", "", element("span", "", chat.title));
      button.type = "button";
      button.dataset.chat = chat.id;
      if (chat === store.current) button.setAttribute("aria-current", "true");
      if (live) button.append(element("span", "live", element("span", "visually-hidden", "reply running")));
      button.addEventListener("click", () => switchTo(chat));
      return element("li", "", button);
    }),
  );
  list.querySelector(focused === null ? ":not(*)" : `[data-chat="${focused}"]`)?.focus();
}

function showConnection(state) {
  clearTimeout(noticeTimer);
  $("link").dataset.state = state.name;
  if (state.name === "ready") {
    everReady = true;
    $("model").textContent = replies.model;
    $("notice").hidden = true;
  } else if (state.name === "stopped") {
    if (state.auth) openSettings(state.message);
    const action = state.auth ? ["Change the key", () => openSettings()] : ["Connect again", () => replies.reconnectNow()];
    showNotice("Not connected.", state.message, ...action);
  } else {
    noticeTimer = setTimeout(() => {
      const [title, text] = everReady
        ? ["Connection lost.", "A running reply continues where it stopped as soon as it is back."]
        : ["The server cannot be reached.", "Still trying."];
      showNotice(title, text, "Reconnect now", () => replies.reconnectNow());
    }, $("notice").hidden ? NOTICE_AFTER_MS : 0);
  }
  showCountdown();
  showTurns();
}

function showCountdown() {
  const state = replies.connection;
  const words = { connecting: "Connecting", ready: "Connected", stopped: "Not connected" };
  if (state.name !== "waiting") {
    $("link-text").textContent = words[state.name];
    return;
  }
  const seconds = Math.max(1, Math.ceil((state.until - performance.now()) / 1000));
  $("link-text").textContent = `Reconnecting in ${seconds} s`;
  setTimeout(() => replies.connection === state && showCountdown(), 250);
}

function showNotice(title, text, label = "Dismiss", onClick = () => ($("notice").hidden = true)) {
  const words = `${title} ${text}`.trim();
  if ($("notice-text").textContent !== words) $("notice-text").textContent = words;
  $("notice-action").textContent = label;
  $("notice-action").onclick = onClick;
  $("notice").hidden = false;
}

// ---- for people who listen ---------------------------------------------------------------------

/** Screen readers get whole sentences, not tokens. */
function announce(text) {
  if (text === "") return;
  $("announcer").append(element("p", "", text));
  while ($("announcer").children.length > 20) $("announcer").firstChild.remove();
}

function announceText() {
  const reply = currentReply();
  if (isLive(reply)) announce(reader.next(reply.text, true));
}

function announceEnd(chat, { reply }) {
  if (chat !== store.current) return;
  announce(reader.next(reply.text, false));
  if (reply.status === "cancelled") announce("Stopped.");
  else if (reply.status !== "completed") {
    const { title, message } = errorAdvice(reply.error);
    announce(`${title}. ${message}`);
  } else announce(`Reply complete. ${summary(reply)}`);
}

// ---- events ------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("prompt").addEventListener("input", composerChanged);
$("prompt").addEventListener("keydown", (event) => {
  // Enter also ends the composition of an input method; that one must not send.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", stopReply);
$("new-chat").addEventListener("click", () => switchTo(null));
$("menu").addEventListener("click", () => openMenu(!document.body.classList.contains("menu-open")));
$("scrim").addEventListener("click", () => openMenu(false));
$("open-settings").addEventListener("click", () => openSettings());
$("settings-cancel").addEventListener("click", () => $("settings").close());
$("settings-form").addEventListener("submit", () => {
  saveKey($("api-key").value.trim(), $("remember").checked);
  replies.connect(loadKey());
});
$("examples").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button !== null) ask(button.textContent) && $("prompt").focus();
});
$("to-end").addEventListener("click", () => {
  followEnd = true;
  showTurns();
  $("prompt").focus();
});
$("log").addEventListener("scroll", () => {
  const log = $("log");
  followEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  $("to-end").hidden = followEnd;
});
matchMedia("(max-width: 52rem)").addEventListener("change", () => openMenu(false));
addEventListener("resize", () => followEnd && showTurns());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || $("settings").open) return;
  if (document.body.classList.contains("menu-open")) {
    openMenu(false);
    $("menu").focus();
  } else {
    stopReply();
  }
});

// ---- start -------------------------------------------------------------------------------------

reader.next(currentReply()?.text ?? "", false);
replies.start(loadKey());
showChat();
// Not on touch screens, where it would cover half the page with a keyboard.
if (matchMedia("(pointer: fine)").matches && !$("settings").open) $("prompt").focus();
