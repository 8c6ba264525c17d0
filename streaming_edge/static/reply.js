// One reply as the page knows it: plain data that survives a reload, and the fold of frames into it.
//
// `offset` and `text` change together and are stored together, so whatever snapshot a reload finds,
// subscribing after its `offset` continues its `text` exactly.

import { compareOffsets } from "./protocol.js";

/**
 * A reply before anything was sent.
 *
 * phase: "unsent" (waits for a connection) -> "sent" -> "open" (has a request id) -> "done"
 * status: the last progress or terminal status; times are Unix milliseconds of this machine.
 */
export function newReply(ref, now) {
  return {
    phase: "unsent",
    ref,
    requestId: null,
    offset: null,
    text: "",
    status: null,
    finishReason: null,
    usage: null,
    error: null,
    degraded: null,
    takeovers: 0,
    interrupted: false,
    wantsCancel: false,
    sentAt: now,
    firstTextAt: null,
    endedAt: null,
  };
}

/** End a reply for a reason the page found out itself. */
export function fail(reply, error, now) {
  Object.assign(reply, { phase: "done", status: "failed", error, endedAt: now });
}

/**
 * Fold one `stream.*` frame into the reply.
 *
 * @returns {boolean} false when the frame was seen before, or is of another choice
 */
export function applyFrame(reply, frame, now) {
  const offset = frame.offset ?? null; // an end that is not in the stream (a lost stream) has none
  if (reply.phase !== "open" || (offset !== null && compareOffsets(offset, reply.offset) <= 0)) return false;
  reply.offset = offset ?? reply.offset;
  switch (frame.type) {
    case "stream.text":
      if ((frame.index ?? 0) !== 0) return false;
      reply.firstTextAt ??= now;
      reply.text += frame.text;
      reply.status = "started";
      return true;
    case "stream.end":
      Object.assign(reply, {
        phase: "done",
        status: frame.status,
        finishReason: frame.finish_reason ?? null,
        usage: frame.usage ?? null,
        error: frame.error ?? null,
        endedAt: now,
      });
      return true;
    default:
      reply.status = frame.status;
      if (frame.degraded) reply.degraded = { step: frame.degraded.step, model: frame.model };
      if (frame.status === "resumed") reply.takeovers += 1;
      return true;
  }
}

/** What the person got less of because many others are asking too, in words. */
export function degradedWords({ step, model }) {
  if (step === "standard_smaller_model") return `busy now: answered by ${model}`;
  if (step === "standard_shorter") return "busy now: a shorter reply";
  return "busy now: a longer wait";
}

/** What stands under a finished reply, e.g. `0.31 s to first token · 42.0 tokens/s · 57 tokens`. */
export function summary(reply) {
  const parts = [];
  // What was seen late (after a reload or a lost connection) says nothing about the server's speed.
  if (reply.firstTextAt !== null && !reply.interrupted) {
    parts.push(`${((reply.firstTextAt - reply.sentAt) / 1000).toFixed(2)} s to first token`);
  }
  const tokens = reply.usage?.completion_tokens ?? 0;
  if (tokens > 0) {
    const seconds = (reply.endedAt - reply.firstTextAt) / 1000;
    if (reply.firstTextAt !== null && !reply.interrupted && tokens > 1 && seconds > 0) {
      parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  }
  if (reply.finishReason === "length") parts.push("cut at the length limit");
  if (reply.finishReason === "content_filter") parts.push("ended by moderation");
  if (reply.degraded) parts.push(degradedWords(reply.degraded));
  if (reply.takeovers > 0) parts.push("continued by another worker");
  if (reply.interrupted) parts.push("resumed after an interruption");
  return parts.join(" · ");
}
