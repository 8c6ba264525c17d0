// Reply text into DOM nodes: paragraphs and ``` code blocks, nothing else. Only text nodes carry what
// the model wrote, so no markup in a reply is ever anything but text.

const OPENING = /^ {0,3}(`{3,})([^`]*)$/;
const CLOSING = /^ {0,3}(`{3,})\s*$/;
const MAYBE_FENCE = /^ {0,3}(?:`{1,2}|`{3,}[^`]*)$/;

/**
 * Split text into blocks from character `from` on.
 *
 * @returns {{kind: "paragraph"|"code", text: string, language: string, start: number}[]}
 *   Only the last one can still change when more text follows. While `open`, an unfinished line that
 *   may become a fence is held back.
 */
export function parseBlocks(text, from, open) {
  const blocks = [];
  let block = null;
  let fence = 0;
  let position = from;
  while (position < text.length) {
    const newline = text.indexOf("\n", position);
    const end = newline === -1 ? text.length : newline;
    const line = text.slice(position, end);
    if (open && newline === -1 && MAYBE_FENCE.test(line)) break;
    const opening = fence === 0 ? OPENING.exec(line) : null;
    if (fence > 0) {
      const closing = CLOSING.exec(line);
      if (closing !== null && closing[1].length >= fence) {
        fence = 0;
        block = null;
      } else {
        block.text += block.lines++ === 0 ? line : `\n${line}`;
      }
    } else if (opening !== null) {
      fence = opening[1].length;
      block = { kind: "code", text: "", language: opening[2].trim(), start: position, lines: 0 };
      blocks.push(block);
    } else if (line.trim() === "") {
      block = null;
    } else if (block === null) {
      block = { kind: "paragraph", text: line, language: "", start: position };
      blocks.push(block);
    } else {
      block.text += `\n${line}`;
    }
    position = end + 1;
  }
  return blocks;
}

function blockNode(block) {
  if (block.kind === "paragraph") {
    const paragraph = document.createElement("p");
    paragraph.append(block.text);
    return paragraph;
  }
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  if (block.language) pre.dataset.language = block.language.slice(0, 32);
  pre.tabIndex = 0;
  code.append(block.text);
  pre.append(code);
  return pre;
}

/** Keeps an element showing a growing text; each update touches only the blocks that changed. */
export class BlockWriter {
  #element;
  #settled = 0;
  #kept = 0;

  constructor(element) {
    this.#element = element;
  }

  /**
   * @param {string} text the whole text so far; must start with what was shown before
   * @param {boolean} open whether more may follow
   */
  update(text, open) {
    const blocks = parseBlocks(text, this.#settled, open);
    while (this.#element.children.length > this.#kept) this.#element.lastChild.remove();
    this.#element.append(...blocks.map(blockNode));
    if (blocks.length > 0) {
      this.#settled = blocks.at(-1).start;
      this.#kept += blocks.length - 1;
    }
  }
}

/** Cuts a growing text into whole sentences, for people who listen to it. */
export class SentenceReader {
  #read = 0;

  /** What has become whole since the last call; everything that is left when `open` is false. */
  next(text, open) {
    const rest = text.slice(this.#read);
    const match = open ? /^[\s\S]*(?:[.!?:]\s|[。！？]|\n)/.exec(rest) : null;
    const whole = open ? (match?.[0] ?? "") : rest;
    this.#read += whole.length;
    return whole.trim();
  }
}
