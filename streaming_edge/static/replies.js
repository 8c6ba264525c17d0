// The replies of all chats of this tab over one connection: sending, reading on, stopping, and what
// a lost connection or a reload means for each of them. No DOM.

import { EdgeConnection } from "./connection.js";
import { backoffMs, isPassing } from "./protocol.js";
import { applyFrame, fail, newReply } from "./reply.js";
import { randomId } from "./store.js";

const HTTP_TIMEOUT_MS = 8_000;
// Greedy: the small model of the demo (135 M parameters) answers wrongly at 0.3 already.
const TEMPERATURE = 0;

export class Replies {
  #store;
  #handlers;
  #connection;
  #wsUrl = null;
  model = null;

  /**
   * @param {ChatStore} store
   * @param {object} handlers
   * @param {(chat: object) => void} handlers.onChange a chat looks different now
   * @param {(chat: object, turn: object) => void} handlers.onEnd a reply is done, well or not
   * @param {(state: object) => void} handlers.onConnection see EdgeConnection
   * @param {(error: object) => void} handlers.onError an error that belongs to no reply
   */
  constructor(store, handlers) {
    this.#store = store;
    this.#handlers = handlers;
    this.#connection = new EdgeConnection({
      loadConfig: (attempt) => this.#loadConfig(attempt),
      onState: handlers.onConnection,
      onReady: () => this.#onReady(),
      onLost: () => this.#onLost(),
      onFrame: (frame) => this.#onFrame(frame),
    });
  }

  get connection() {
    return this.#connection.state;
  }

  /** Take over what a reload has left, then connect; without a key, wait for one. */
  start(key) {
    for (const { chat, turn } of this.#live()) {
      if (turn.reply.phase === "open") turn.reply.interrupted = true;
      else if (turn.reply.phase === "sent") this.#fail(chat, turn, unconfirmed());
      // Never sent by itself after a reload: a duplicated tab would send it too.
      else this.#fail(chat, turn, { code: "unsent", message: "The page was reloaded before there was a connection." });
    }
    this.connect(key);
  }

  /** Connect with this key from now on. */
  connect(key) {
    if (key !== null) this.#connection.open(key);
    else this.#connection.stop({ auth: true, message: "This server needs an API key." });
  }

  reconnectNow() {
    this.#connection.connectNow();
  }

  /** Add a turn to a chat and send it, now or once there is a connection. */
  ask(chat, prompt) {
    const turn = { prompt, reply: newReply(randomId(), Date.now()) };
    chat.turns.push(turn);
    this.#transmit(chat, turn);
  }

  /** Stop the reply that a chat is getting, if any. */
  stop(chat) {
    const turn = chat.turns.at(-1);
    if (turn === undefined || turn.reply.phase === "done") return;
    const { reply } = turn;
    if (reply.phase === "unsent") {
      Object.assign(reply, { phase: "done", status: "cancelled", endedAt: Date.now() });
      this.#handlers.onEnd(chat, turn);
    } else {
      reply.wantsCancel = true; // said again after every reconnect until the reply has ended
      if (reply.phase === "open") this.#cancel(reply);
    }
    this.#changed(chat, true);
  }

  async #loadConfig(attempt) {
    if (this.#wsUrl !== null && attempt <= 1) return this.#wsUrl;
    try {
      const response = await fetch("/chat/config.json", {
        cache: "no-store",
        signal: AbortSignal.timeout(HTTP_TIMEOUT_MS),
      });
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      const config = await response.json();
      this.#wsUrl = config.ws_url;
      this.model = config.model;
    } catch (error) {
      if (this.#wsUrl === null) throw error; // else the address that worked before will do
    }
    return this.#wsUrl;
  }

  /** Turns whose reply is not done; only the last turn of a chat can be one. */
  #live() {
    return this.#store.chats
      .map((chat) => ({ chat, turn: chat.turns.at(-1) }))
      .filter(({ turn }) => turn !== undefined && turn.reply.phase !== "done");
  }

  #find(field, value) {
    if (value === null || value === undefined) return null;
    return this.#live().find(({ turn }) => turn.reply[field] === value) ?? null;
  }

  #changed(chat, now = false) {
    this.#store.save(chat, now);
    this.#handlers.onChange(chat);
  }

  #fail(chat, turn, error) {
    fail(turn.reply, error, Date.now());
    this.#handlers.onEnd(chat, turn);
    this.#changed(chat, true);
  }

  #transmit(chat, turn) {
    const { reply } = turn;
    const body = {
      model: this.model,
      temperature: TEMPERATURE,
      conversation_id: chat.id,
      messages: [{ role: "user", content: turn.prompt }],
    };
    // With the key it may be sent again where the answer to it was lost: that makes no second request.
    if (this.#connection.send({ type: "chat.create", ref: reply.ref, idempotency_key: reply.ref, body })) {
      reply.phase = "sent";
      reply.sentAt = Date.now();
    }
    this.#changed(chat, true);
  }

  /** Read on after the last offset seen. Harmless where the socket reads the stream already. */
  #resume(reply) {
    this.#connection.send({ type: "stream.subscribe", request_id: reply.requestId, after: reply.offset });
    if (reply.wantsCancel) this.#cancel(reply);
  }

  #cancel(reply) {
    this.#connection.send({ type: "chat.cancel", request_id: reply.requestId });
  }

  #onReady() {
    for (const { chat, turn } of this.#live()) {
      if (turn.reply.phase === "open") this.#resume(turn.reply);
      else this.#transmit(chat, turn);
    }
  }

  #onLost() {
    for (const { chat, turn } of this.#live()) {
      turn.reply.interrupted = turn.reply.phase === "open";
      this.#changed(chat);
    }
  }

  #onFrame(frame) {
    if (frame.type === "error") this.#onError(frame);
    else if (frame.type === "chat.accepted") this.#onAccepted(frame);
    else if (frame.type?.startsWith("stream.")) this.#onStream(frame);
  }

  #onAccepted(frame) {
    const found = this.#find("ref", frame.ref);
    if (found === null) return;
    const { reply } = found.turn;
    reply.requestId = frame.request_id;
    reply.phase = "open";
    if (reply.wantsCancel) this.#cancel(reply);
    this.#changed(found.chat, true);
  }

  #onStream(frame) {
    const found = this.#find("requestId", frame.request_id);
    if (found === null || !applyFrame(found.turn.reply, frame, Date.now())) return;
    const done = found.turn.reply.phase === "done";
    if (done) this.#handlers.onEnd(found.chat, found.turn);
    this.#changed(found.chat, done);
  }

  #onError({ ref, request_id: requestId, error }) {
    const found = this.#find("ref", ref) ?? this.#find("requestId", requestId);
    if (found === null) {
      if (!ref && !requestId) this.#handlers.onError(error);
      return;
    }
    const { reply } = found.turn;
    if (reply.phase === "open" && isPassing(error)) {
      setTimeout(() => reply.phase === "open" && this.#resume(reply), backoffMs(2, Math.random()));
    } else {
      this.#fail(found.chat, found.turn, error);
    }
  }
}

function unconfirmed() {
  return {
    code: "unconfirmed",
    message:
      "The page was reloaded before the server confirmed your message, so it may or may not have arrived. " +
      "Trying again may ask it twice.",
  };
}
