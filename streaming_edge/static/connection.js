// One websocket to the edge that comes back by itself. It knows nothing of replies: after every
// (re)connection `onReady` is called, and whoever reads streams subscribes again from its own offsets.

import { backoffMs, closeAction, isKeyError } from "./protocol.js";

const CONNECT_TIMEOUT_MS = 10_000;
const STABLE_MS = 5_000;
const QUIET_MS = 20_000;
const PONG_MS = 10_000;
const WATCH_MS = 2_000;

/**
 * States passed to `onState`:
 * - `{name: "connecting"}`
 * - `{name: "ready"}`
 * - `{name: "waiting", until}`: reconnects at `until` (performance.now() milliseconds)
 * - `{name: "stopped", auth, message}`: will not reconnect by itself; `auth` means the key is at fault
 */
export class EdgeConnection {
  #handlers;
  #loadConfig;
  #apiKey = null;
  #socket = null;
  #attempt = 0;
  #timers = { connect: 0, retry: 0, stable: 0 };
  #heardAt = 0;
  #pingAt = null;
  state = { name: "connecting" };

  /**
   * @param {object} options
   * @param {(attempt: number) => Promise<string>} options.loadConfig the websocket's URL; `attempt` counts
   *   the failures in a row
   * @param {(state: object) => void} options.onState
   * @param {() => void} options.onReady the socket is open and the key is on its way
   * @param {(frame: object) => void} options.onFrame
   * @param {() => void} options.onLost a socket that was ready is gone
   */
  constructor({ loadConfig, ...handlers }) {
    this.#loadConfig = loadConfig;
    this.#handlers = handlers;
    setInterval(() => this.#watch(), WATCH_MS);
    addEventListener("online", () => this.#state("waiting") && this.connectNow());
  }

  /** Use this key from now on; drops a connection that was made with another one. */
  open(apiKey) {
    this.#apiKey = apiKey;
    this.#attempt = 0;
    this.connectNow();
  }

  /** Give up the present socket, if any, and try at once. */
  connectNow() {
    this.#drop();
    this.#connect();
  }

  /** Stop for good, until `open` or `connectNow`. */
  stop(reason) {
    this.#drop();
    this.#enter({ name: "stopped", auth: false, ...reason });
  }

  /** Send a frame; false when there is no open socket (nothing was sent then). */
  send(frame) {
    if (!this.#state("ready") || this.#socket.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  #state(name) {
    return this.state.name === name;
  }

  #enter(state) {
    this.state = state;
    this.#handlers.onState(state);
  }

  async #connect() {
    const attempt = {};
    this.#socket = attempt;
    this.#enter({ name: "connecting" });
    this.#timers.connect = setTimeout(() => this.#lost(), CONNECT_TIMEOUT_MS);
    let socket;
    try {
      const url = await this.#loadConfig(this.#attempt);
      if (this.#socket !== attempt) return;
      socket = new WebSocket(url);
    } catch {
      if (this.#socket === attempt) this.#lost();
      return;
    }
    this.#socket = socket;
    const ours = (handler) => (event) => this.#socket === socket && handler(event);
    socket.onopen = ours(() => this.#opened());
    socket.onmessage = ours((event) => this.#received(event.data));
    socket.onclose = ours((event) => this.#lost(event.code));
  }

  #opened() {
    clearTimeout(this.#timers.connect);
    this.#heardAt = performance.now();
    this.#pingAt = null;
    // An edge that accepts and drops at once must not be met without back-off.
    this.#timers.stable = setTimeout(() => (this.#attempt = 0), STABLE_MS);
    this.#socket.send(JSON.stringify({ type: "auth", api_key: this.#apiKey }));
    this.#enter({ name: "ready" });
    this.#handlers.onReady();
  }

  #received(data) {
    this.#heardAt = performance.now();
    this.#pingAt = null;
    let frame;
    try {
      frame = JSON.parse(data);
    } catch {
      return;
    }
    if (frame.type === "error" && isKeyError(frame.error)) {
      this.stop({ auth: true, message: frame.error.message });
      return;
    }
    this.#handlers.onFrame(frame);
  }

  #lost(code) {
    const wasReady = this.#state("ready");
    this.#drop(false);
    const action = closeAction(code);
    if (action.reconnect) {
      const delay = backoffMs(this.#attempt, Math.random());
      this.#attempt += 1;
      this.#timers.retry = setTimeout(() => this.#connect(), delay);
      this.#enter({ name: "waiting", until: performance.now() + delay });
    } else {
      this.#enter({ name: "stopped", auth: action.auth, message: action.message });
    }
    if (wasReady) this.#handlers.onLost();
  }

  #drop(tell = true) {
    Object.values(this.#timers).forEach(clearTimeout);
    const socket = this.#socket;
    this.#socket = null;
    if (socket instanceof WebSocket) socket.close();
    if (tell && this.#state("ready")) {
      this.state = { name: "connecting" };
      this.#handlers.onLost();
    }
  }

  /** A dead network closes nothing: what stays silent after a ping is taken for lost. */
  #watch() {
    if (!this.#state("ready")) return;
    const now = performance.now();
    if (this.#pingAt !== null && now - this.#pingAt > PONG_MS) {
      this.#lost();
    } else if (this.#pingAt === null && now - this.#heardAt > QUIET_MS) {
      this.#pingAt = now;
      this.send({ type: "ping" });
    }
  }
}
