// Markdown as nodes, drawn piece by piece while it is written: blocks that are complete are never touched again.

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*)|$)/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const BEGUN = /(^|\n)[ \t]*(`{1,2}|~{1,2}|#{1,6}|[-*+]|\d{1,9}[.)]?|\||>)[ \t]*$/; // a mark whose meaning is yet to come
const DEEPEST = 12; // lists in quotes in lists
const WIDEST = 2000; // letters of a table's second line

/** @typedef {{start: number, lines: string[], kind: "code" | "heading" | "rule" | "quote" | "list" | "table" | "text"}} Block */

/** An element that shows a text which grows. */
export class Markdown {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    this.text = "";
    this.from = 0; // where the last block begins
    /** @type {HTMLElement | null} */
    this.last = null;
  }

  clear() {
    this.text = "";
    this.from = 0;
    this.last = null;
    this.host.replaceChildren();
  }

  /**
   * @param {string} text all of it, so far
   * @param {boolean} [open] whether more will come
   * @returns {HTMLElement[]} the blocks that are complete now and were not before
   */
  update(text, open = false) {
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const rest = text.slice(this.from);
    const blocks = split((open ? rest.replace(BEGUN, "$1") : rest).split("\n"));
    const done = blocks.map((block, place) => this.#show(block, open && place === blocks.length - 1, place === 0));
    if (open) done.pop();
    if (blocks.length > 1) this.from += blocks[blocks.length - 1].start;
    return done;
  }

  /** @param {Block} block @param {boolean} open @param {boolean} again whether the last one that was shown may be this */
  #show(block, open, again) {
    if (again && this.last && block.kind === "code") {
      const { language, text } = fenced(block.lines);
      const shown = this.last.querySelector(":scope > pre > code")?.firstChild;
      if (shown instanceof Text && this.last.dataset.language === language) {
        shown.data = text; // in place: who selects or scrolls there goes on
        return this.last;
      }
    }
    const made = draw(block, open, 0);
    if (again && this.last) this.last.replaceWith(made);
    else this.host.append(made);
    return (this.last = made);
  }
}

// -------------------------------------------------------------------------------------------------------------- blocks

/** @param {string[]} lines @returns {Block[]} with the places of their first letters */
function split(lines) {
  const blocks = [];
  let start = 0;
  for (let at = 0; at < lines.length; ) {
    const kind = lines[at].trim() ? kindOf(lines, at) : null;
    const end = kind ? Math.max(at + 1, ends(kind, lines, at)) : at + 1;
    if (kind) blocks.push({ start, kind, lines: lines.slice(at, end) });
    for (; at < end; at += 1) start += lines[at].length + 1;
  }
  return blocks;
}

/** @param {string[]} lines @param {number} at @returns {Block["kind"]} */
function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  const next = lines[at + 1] ?? "";
  const divided = line.includes("|") && next.includes("-") && next.length < WIDEST && DELIMITERS.test(next);
  return divided && cells(line).length === cells(next).length ? "table" : "text";
}

/** The line after a block. @param {Block["kind"]} kind @param {string[]} lines @param {number} at */
function ends(kind, lines, at) {
  let end = at + 1;
  if (kind === "code") {
    const mark = FENCE.exec(lines[at])?.[1] ?? "";
    const closes = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
    while (end < lines.length && !closes.test(lines[end])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (kind === "quote") while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (kind === "table") while (end < lines.length && lines[end].includes("|")) end += 1;
  if (kind === "text") while (end < lines.length && lines[end].trim() && kindOf(lines, end) === "text") end += 1;
  if (kind === "list") end = listEnd(lines, at);
  return end;
}

/** A list goes on over blank lines, as long as what follows is an item of its kind or stands further in. */
function listEnd(/** @type {string[]} */ lines, /** @type {number} */ at) {
  const [, indent, mark] = ITEM.exec(lines[at]) ?? ["", "", "-"];
  const ordered = /\d/.test(mark);
  let end = at + 1;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) continue;
    const item = ITEM.exec(line);
    const deeper = line.search(/\S/) > indent.length;
    const same = item && !RULE.test(line) && /\d/.test(item[2]) === ordered;
    const lazy = next === end && !item && kindOf(lines, next) === "text"; // a line of the item before it
    if (!deeper && !same && !lazy) break;
    end = next + 1;
  }
  return end;
}

// ------------------------------------------------------------------------------------------------------------- drawing

/** @param {Block} block @param {boolean} open @param {number} depth @returns {HTMLElement} */
function draw({ kind, lines }, open, depth) {
  switch (kind) {
    case "code":
      return drawCode(lines);
    case "heading": {
      const [, marks, text = ""] = HEADING.exec(lines[0]) ?? ["", "#"];
      const words = text.trim().replace(/(^|\s)#+$/, "");
      return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(words, open)); // the page has levels 1 and 2
    }
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...inner(lines.map((line) => line.replace(QUOTE, "")), open, depth));
    case "list":
      return drawList(lines, open, depth);
    case "table":
      return drawTable(lines, open);
    default:
      return el("p", {}, ...inline(lines.map((line) => line.trim()).join("\n"), open));
  }
}

/** @param {string[]} lines @param {boolean} open @param {number} depth @returns {Node[]} */
function inner(lines, open, depth) {
  if (depth >= DEEPEST) return [document.createTextNode(lines.join("\n"))];
  const blocks = split(lines);
  return blocks.map((block, place) => draw(block, open && place === blocks.length - 1, depth + 1));
}

/** Language and text of a fenced block. @param {string[]} lines */
function fenced(lines) {
  const [, mark, info] = FENCE.exec(lines[0]) ?? ["", "```", ""];
  const last = lines[lines.length - 1].trim();
  const closed = lines.length > 1 && last.length >= mark.length && last === mark[0].repeat(last.length);
  return { language: info.trim().split(/\s/)[0], text: lines.slice(1, closed ? -1 : undefined).join("\n") };
}

/** @param {string[]} lines */
function drawCode(lines) {
  const { language, text } = fenced(lines);
  const code = el("code", {}, document.createTextNode(text));
  const copy = copyButton(() => code.textContent, "Copy this code");
  const caption = el("figcaption", {}, language || "code", copy);
  const figure = el("figure", { className: "code" }, caption, el("pre", { tabIndex: 0 }, code));
  figure.dataset.language = language;
  return figure;
}

/** @param {string[]} lines @param {boolean} open @param {number} depth */
function drawList(lines, open, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]) ?? ["", "", "-"];
  /** @type {string[][]} */
  const items = [];
  let inset = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + (items.length ? 1 : 0)) {
      inset = item[0].length > item[1].length + item[2].length + 4 ? item[1].length + item[2].length + 1 : item[0].length;
      items.push([line.slice(inset)]);
    } else {
      const blank = line.search(/\S|$/);
      items[items.length - 1].push(line.slice(Math.min(blank, inset)));
    }
  }
  const loose = items.some((item) => /\n\s*\n/.test(item.join("\n").trimEnd()));
  const made = items.map((item, place) => drawItem(item, loose, open && place === items.length - 1, depth));
  const number = Number.parseInt(mark, 10);
  return el(Number.isNaN(number) ? "ul" : "ol", Number.isNaN(number) || number === 1 ? {} : { start: number }, ...made);
}

/** @param {string[]} lines @param {boolean} loose whether paragraphs stay such @param {boolean} open @param {number} depth */
function drawItem(lines, loose, open, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
  const nodes = inner(lines, open, depth);
  const flat = loose ? nodes : nodes.flatMap((node) => (node.nodeName === "P" ? [...node.childNodes] : [node]));
  const box = task ? [el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", ariaLabel: "task" }), " "] : [];
  return el("li", {}, ...box, ...flat);
}

/** The cells of a row: a bar that is escaped or in code divides none. @param {string} line */
function cells(line) {
  const parts = line.trim().match(/(?:\\.|`[^`]*`|[^|\\`]|[\\`])+|\|/g) ?? [];
  /** @type {string[]} */
  const found = [];
  let cell = "";
  for (const part of parts) {
    if (part !== "|") cell += part;
    else {
      found.push(cell);
      cell = "";
    }
  }
  found.push(cell);
  if (!found[0].trim()) found.shift();
  if (found.length && !found[found.length - 1].trim()) found.pop();
  return found.map((text) => text.trim());
}

/** @param {string[]} lines @param {boolean} open */
function drawTable([head, delimiters, ...rows], open) {
  const sides = cells(delimiters).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (/** @type {string} */ name, /** @type {string} */ line, /** @type {boolean} */ last) => {
    const found = cells(line);
    return el("tr", {}, ...sides.map((side, place) => el(name, { className: side }, ...inline(found[place] ?? "", last))));
  };
  const body = rows.map((line, place) => row("td", line, open && place === rows.length - 1));
  const table = el("table", {}, el("thead", {}, row("th", head, false)), el("tbody", {}, ...body));
  return el("div", { className: "table", tabIndex: 0 }, table);
}
