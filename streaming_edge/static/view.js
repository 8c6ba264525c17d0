// The DOM of one turn: the person's message, the reply, its state line and its error.

import { errorAdvice } from "./protocol.js";
import { degradedWords, summary } from "./reply.js";
import { BlockWriter } from "./text.js";

const STEPS = ["accepted", "moderated", "dispatched", "started"];
const WORDS = {
  accepted: "Accepted, being checked",
  moderated: "Waiting in the queue",
  dispatched: "Handed to a worker",
  started: "Reading your message",
  resumed: "Another worker takes over",
};

/** The state of a reply that is not done, in words. `connected` tells whether the socket is up. */
export function stateWords(reply, connected) {
  if (reply.phase === "unsent") return "Waiting for the connection";
  if (!connected) return "Connection lost, the reply goes on when it is back";
  if (reply.wantsCancel) return "Stopping";
  if (reply.phase === "sent") return "Sending";
  if (reply.status === "started" && reply.text !== "") return "Writing";
  const words = WORDS[reply.status] ?? WORDS.accepted;
  return reply.degraded ? `${words} · ${degradedWords(reply.degraded)}` : words;
}

export function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export function textButton(label, onClick) {
  const node = element("button", "text-button", label);
  node.type = "button";
  node.addEventListener("click", onClick);
  return node;
}

/** One turn on the page; `actions` has `retry`, `edit` and `key`, called with the turn. */
export class TurnView {
  #turn;
  #actions;
  #writer;
  #shown = null;
  #text = element("div", "text");
  #track = element("span", "track", ...STEPS.map(() => element("i")));
  #words = element("span", "words");
  #state = element("p", "state");
  #error = element("div", "error");
  #reply;

  constructor(turn, actions) {
    this.#turn = turn;
    this.#actions = actions;
    this.#track.setAttribute("aria-hidden", "true");
    this.#state.append(this.#track, this.#words);
    this.#reply = element("article", "reply", this.#text, this.#state, this.#error);
    this.#reply.setAttribute("aria-label", "Reply");
    const prompt = element("div", "prompt", element("span", "visually-hidden", "You: "), turn.prompt);
    this.node = element("li", "turn", prompt, this.#reply);
  }

  /** Show the turn as it is now. `last` turns offer what can be done about an error. */
  update({ connected, last }) {
    const { reply } = this.#turn;
    const done = reply.phase === "done";
    this.#reply.dataset.phase = reply.phase;
    this.#reply.setAttribute("aria-busy", String(!done));
    this.#updateText(reply, done);
    const step = reply.status === "resumed" ? STEPS.length : STEPS.indexOf(reply.status) + 1;
    this.#track.hidden = done;
    [...this.#track.children].forEach((mark, index) => mark.classList.toggle("on", index < step));
    const words = done ? this.#doneWords(reply) : stateWords(reply, connected);
    if (this.#words.textContent !== words) this.#words.textContent = words;
    this.#state.hidden = words === "";
    this.#updateEnd(reply, done, last);
  }

  #updateText(reply, done) {
    // The end, a retry and a stored answer start afresh; in between the text only grows.
    if (this.#shown === null || done || !reply.text.startsWith(this.#shown)) {
      this.#text.replaceChildren();
      this.#writer = new BlockWriter(this.#text);
      this.#shown = "";
    }
    if (reply.text !== this.#shown || done) this.#writer.update(reply.text, !done);
    this.#shown = reply.text;
    this.#text.hidden = reply.text === "" && (done || reply.status !== "started");
  }

  #doneWords(reply) {
    const words = summary(reply);
    if (reply.status === "cancelled") return words ? `Stopped · ${words}` : "Stopped";
    return reply.text === "" && reply.status === "completed" ? `Empty reply · ${words}` : words;
  }

  #updateEnd(reply, done, last) {
    const failed = done && !["completed", "cancelled"].includes(reply.status);
    const signature = `${done} ${failed} ${last} ${reply.ref}`;
    if (this.#error.dataset.signature === signature) return;
    this.#error.dataset.signature = signature;
    this.#error.replaceChildren();
    this.#error.hidden = !failed;
    this.#state.querySelector(".text-button")?.remove();
    if (done && reply.text !== "" && navigator.clipboard) this.#state.append(this.#copyButton());
    if (!failed) return;
    const { title, message, action } = errorAdvice(reply.error);
    this.#error.append(element("strong", "", title), element("span", "", message));
    if (last) {
      const labels = { retry: "Try again", edit: "Edit the message", key: "Change the key" };
      this.#error.append(textButton(labels[action], () => this.#actions[action](this.#turn)));
    }
  }

  #copyButton() {
    const button = textButton("Copy", async () => {
      await navigator.clipboard.writeText(this.#turn.reply.text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    button.setAttribute("aria-label", "Copy the reply");
    return button;
  }
}
