// What outlives a reload. Chats live in sessionStorage, which every tab has for itself, so two tabs
// never touch each other's; the API key lives there too, or in localStorage if it shall be remembered.

const CHATS = "headrace.chats";
const CHAT = "headrace.chat.";
const KEY = "headrace.key";
const MAX_CHATS = 30;
const SAVE_EVERY_MS = 200;
const DEVELOPMENT_KEY = "sk-headrace-dev";
const LOOPBACK = new Set(["127.0.0.1", "localhost", "[::1]"]);

/** Whether the page comes from this machine. */
export const onLoopback = LOOPBACK.has(location.hostname);

/** The API key to use, or null when the person must be asked for one. */
export function loadKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? (onLoopback ? DEVELOPMENT_KEY : null);
}

/** Whether the key in use was typed by the person and is remembered on this device. */
export function keyState() {
  const remembered = localStorage.getItem(KEY) !== null;
  return { typed: remembered || sessionStorage.getItem(KEY) !== null, remembered };
}

/** Keep a key for this tab, or for this device; an empty one forgets it. */
export function saveKey(key, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key !== "") (remember ? localStorage : sessionStorage).setItem(KEY, key);
}

/** The chats of this tab, newest first. Each one is stored as one item, so it is never half written. */
export class ChatStore {
  #chats = [];
  #currentId = null;
  #dirty = new Set();
  #timer = 0;

  constructor() {
    const { ids = [], current = null } = read(CHATS) ?? {};
    this.#chats = ids.map((id) => read(CHAT + id)).filter((chat) => chat !== null);
    this.#currentId = current;
    addEventListener("pagehide", () => this.flush());
    document.addEventListener("visibilitychange", () => this.flush());
  }

  get chats() {
    return this.#chats;
  }

  /** The chat shown, or null for a new one that has no message yet. */
  get current() {
    return this.#chats.find((chat) => chat.id === this.#currentId) ?? null;
  }

  select(chat) {
    this.#currentId = chat?.id ?? null;
    this.#writeIndex();
  }

  /** A new chat, which becomes the current one. Its id is the `conversation_id` on the server. */
  create(title) {
    const chat = { id: randomId(), title, turns: [] };
    this.#chats.unshift(chat);
    for (const old of this.#chats.splice(MAX_CHATS)) sessionStorage.removeItem(CHAT + old.id);
    this.select(chat);
    return chat;
  }

  /** Forget a chat (the server keeps its own copy until that expires). */
  remove(chat) {
    this.#chats = this.#chats.filter((other) => other !== chat);
    sessionStorage.removeItem(CHAT + chat.id);
    this.#dirty.delete(chat);
    if (this.#currentId === chat.id) this.#currentId = null;
    this.#writeIndex();
  }

  /** Store a chat soon; `now` for what must not be lost with a crashing tab. */
  save(chat, now = false) {
    this.#dirty.add(chat);
    if (now) this.flush();
    else if (this.#timer === 0) this.#timer = setTimeout(() => this.flush(), SAVE_EVERY_MS);
  }

  flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    for (const chat of this.#dirty) this.#write(CHAT + chat.id, chat);
    this.#dirty.clear();
  }

  #writeIndex() {
    this.#write(CHATS, { ids: this.#chats.map((chat) => chat.id), current: this.#currentId });
  }

  /** When the quota is used up, the oldest chats give way. */
  #write(key, value) {
    const text = JSON.stringify(value);
    for (;;) {
      try {
        sessionStorage.setItem(key, text);
        return;
      } catch {
        const oldest = this.#chats.at(-1);
        if (oldest === undefined || oldest.id === this.#currentId) return;
        this.#chats.pop();
        this.#dirty.delete(oldest);
        sessionStorage.removeItem(CHAT + oldest.id);
      }
    }
  }
}

/** A random id of 32 hex digits; `crypto.randomUUID` exists on secure origins only. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

function read(key) {
  try {
    return JSON.parse(sessionStorage.getItem(key));
  } catch {
    return null;
  }
}
