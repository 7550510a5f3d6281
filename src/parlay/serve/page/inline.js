// Markdown within a line: emphasis, code, links. Model text becomes text nodes and a few known elements, never HTML.

import { el } from "./dom.js";

const SAFE = new Set(["http:", "https:", "mailto:"]);
const DEEPEST = 8; // emphasis within emphasis
const FARTHEST = 4000; // characters to the end of an emphasis: a bound on the work for hostile text
const ESCAPED = /[!-/:-@[-`{-~]/;
const URL_END = /[.,;:!?'"*_~)\]]+$/;

/**
 * @param {string} text
 * @param {boolean} [open] whether more will come: then what has begun and not ended reaches to the end
 * @param {number} [depth]
 * @returns {Node[]}
 */
export function inline(text, open = false, depth = 0) {
  /** @type {Node[]} */
  const nodes = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const found = special(text, at, open, depth);
    if (found) {
      if (plain) nodes.push(document.createTextNode(plain));
      plain = "";
      nodes.push(found.node);
      at = found.end;
    } else {
      if (text[at] === "\\" && ESCAPED.test(text[at + 1] ?? "")) at += 1;
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/**
 * What begins at a place, if it is more than a letter.
 * @param {string} text @param {number} at @param {boolean} open @param {number} depth
 * @returns {{node: Node, end: number} | null}
 */
function special(text, at, open, depth) {
  switch (text[at]) {
    case "`":
      return code(text, at, open);
    case "*":
    case "_":
    case "~":
      return depth < DEEPEST ? emphasis(text, at, open, depth) : null;
    case "!":
      return text[at + 1] === "[" ? link(text, at + 1, depth) : null; // an image would be a request elsewhere
    case "[":
      return link(text, at, depth);
    case "<":
      return bracketed(text, at);
    case "h":
      return bare(text, at);
    default:
      return null;
  }
}

/** `code`, between as many backticks on both sides. @param {string} text @param {number} at @param {boolean} open */
function code(text, at, open) {
  const ticks = /^`+/.exec(text.slice(at, at + 20))?.[0] ?? "`";
  const from = at + ticks.length;
  let to = text.indexOf(ticks, from);
  while (to >= 0) {
    let end = to;
    while (text[end] === "`") end += 1;
    if (end - to === ticks.length) break;
    to = text.indexOf(ticks, end);
  }
  if (to < 0 && !open) return { node: document.createTextNode(ticks), end: from };
  const inner = to < 0 ? text.slice(from) : text.slice(from, to);
  const trimmed = /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner;
  return { node: el("code", {}, trimmed), end: to < 0 ? text.length : to + ticks.length };
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** **strong**, *em*, ~~del~~. @param {string} text @param {number} at @param {boolean} open @param {number} depth */
function emphasis(text, at, open, depth) {
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    if (/\s|^$/.test(text[from] ?? "")) return null;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return null;
    const to = closing(text, mark, from);
    if (to < 0 && !(open && mark.length === 2)) continue;
    const inner = text.slice(from, to < 0 ? undefined : to);
    return { node: el(name, {}, ...inline(inner, open, depth + 1)), end: to < 0 ? text.length : to + mark.length };
  }
  return null;
}

/** Where an emphasis ends: not after a space, not within a word if it is an underscore; -1 for nowhere. */
function closing(/** @type {string} */ text, /** @type {string} */ mark, /** @type {number} */ from) {
  const last = Math.min(text.length, from + FARTHEST);
  for (let to = text.indexOf(mark, from + 1); to >= 0 && to < last; to = text.indexOf(mark, to + 1)) {
    const after = text[to + mark.length] ?? "";
    if (mark.length === 1 && (after === mark || text[to - 1] === mark)) continue;
    if (mark === "**" && after === "*") continue;
    if (/[\s\\]/.test(text[to - 1]) || (mark[0] === "_" && /\w/.test(after))) continue;
    return to;
  }
  return -1;
}

/** [text](address "title"), where the address is safe. @param {string} text @param {number} at @param {number} depth */
function link(text, at, depth) {
  const near = text.slice(at, at + FARTHEST);
  const found = /^\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/.exec(near);
  const address = found && safe(found[2]);
  if (!found || !address || depth >= DEEPEST) return null;
  return { node: anchor(address, inline(found[1] || found[2], false, DEEPEST - 1)), end: at + found[0].length };
}

/** <https://address> @param {string} text @param {number} at */
function bracketed(text, at) {
  const found = /^<([a-z]+:[^\s<>]+)>/.exec(text.slice(at, at + FARTHEST));
  const address = found && safe(found[1]);
  return found && address ? { node: anchor(address, [found[1]]), end: at + found[0].length } : null;
}

/** An address that stands in the text. @param {string} text @param {number} at */
function bare(text, at) {
  if (!/^https?:\/\//.test(text.slice(at, at + 8)) || /\w/.test(text[at - 1] ?? "")) return null;
  const found = /^[^\s<>`]+/.exec(text.slice(at, at + FARTHEST))?.[0].replace(URL_END, "") ?? "";
  const address = safe(found);
  return address ? { node: anchor(address, [found]), end: at + found.length } : null;
}

/** The address, if following it can only open a page or a letter. @param {string} address */
function safe(address) {
  try {
    return SAFE.has(new URL(address).protocol) ? address : null;
  } catch {
    return null;
  }
}

/** @param {string} href @param {(Node | string)[]} children */
const anchor = (href, children) => el("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
