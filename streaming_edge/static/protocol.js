// The page's pure decisions about the websocket protocol: offsets, back-off, close codes, errors.
// No I/O, no clock; the tests import this module as it is.

const BACKOFF_FIRST_MS = 500;
const BACKOFF_CAP_MS = 15_000;

/** Order of two stream offsets `<a>-<n>`; null is before every offset. Parts go up to 2**64 - 1. */
export function compareOffsets(left, right) {
  if (left === right) return 0;
  if (left === null) return -1;
  if (right === null) return 1;
  const [a, b] = [left, right].map((offset) => offset.split("-").map(BigInt));
  const part = a[0] === b[0] ? 1 : 0;
  return a[part] < b[part] ? -1 : a[part] > b[part] ? 1 : 0;
}

/**
 * Milliseconds to wait before reconnect number `attempt` (from 0): exponential, capped, and spread over
 * the upper half, so that an edge that comes back is not met by every page at once.
 *
 * @param {number} random from [0, 1)
 */
export function backoffMs(attempt, random) {
  const ceiling = Math.min(BACKOFF_CAP_MS, BACKOFF_FIRST_MS * 2 ** Math.min(attempt, 16));
  return ceiling * (0.5 + random / 2);
}

// The rows of streaming_edge/close_codes.py that say "do not reconnect"; every other code means "do".
const STOP_CODES = new Map([
  [1007, "The server did not understand this page. Reload it."],
  [1009, "The message was too big for the server."],
  [4401, "The server does not accept this API key."],
  [4408, "The server did not get the API key in time."],
]);

/** What to do after a close: `{reconnect: true}` or `{reconnect: false, auth, message}`. */
export function closeAction(code) {
  const message = STOP_CODES.get(code);
  return message === undefined ? { reconnect: true } : { reconnect: false, auth: code === 4401, message };
}

// Refused by what it says: sending the same again changes nothing, so the text goes back to be edited.
const EDIT = new Set([
  "content_filter",
  "context_length_exceeded",
  "request_too_large",
  "invalid_request",
  "invalid_value",
  "invalid_json",
  "unsupported_parameter",
  "model_not_found",
  "model_not_allowed",
]);
const KEY = new Set(["invalid_api_key", "not_authenticated"]);
// The stream itself is fine; only this attempt to read it was turned away.
const PASSING = new Set(["service_unavailable", "rate_limited", "too_many_streams"]);

const TITLES = {
  content_filter: "Refused by moderation",
  context_length_exceeded: "The conversation is too long for the model",
  request_too_large: "The message is too large",
  rate_limited: "Too many requests just now",
  queue_full: "The queue is full",
  overloaded: "Too many people are asking just now",
  too_many_streams: "Too many replies at once",
  conversation_busy: "The previous reply of this conversation is still being written",
  invalid_api_key: "The API key is not accepted",
  not_authenticated: "The API key is not accepted",
  service_unavailable: "The service is not available just now",
  moderation_unavailable: "Moderation is not available just now",
  deadline_exceeded: "It took too long",
  stream_expired: "The reply is no longer kept for resuming",
  stream_lost: "The server lost this reply",
  not_found: "The server does not know this reply",
  worker_lost: "The worker was lost",
  engine_error: "The reply failed",
  internal_error: "The reply failed",
  unconfirmed: "Not confirmed",
  unsent: "Not sent",
};

/** How to show an error: a title, and what the person can do: "edit", "retry" or "key". */
export function errorAdvice(error) {
  const code = error?.code ?? null;
  const action = KEY.has(code) ? "key" : EDIT.has(code) ? "edit" : "retry";
  return { title: TITLES[code] ?? "Something went wrong", message: error?.message ?? "", action };
}

/** Whether reading a stream should be tried again after this error, rather than given up. */
export function isPassing(error) {
  return PASSING.has(error?.code);
}

/** Whether the connection as a whole is refused because of its key. */
export function isKeyError(error) {
  return KEY.has(error?.code);
}
