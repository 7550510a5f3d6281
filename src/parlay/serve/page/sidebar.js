// The list of conversations: open, rename, delete.

import { button, byId, el } from "./dom.js";

/**
 * @typedef {import("./store.js").Entry} Entry
 *
 * @typedef {object} Actions
 * @property {(entry: Entry, title: string) => void} rename
 * @property {(entry: Entry) => void} remove
 */

let shown = "";

/**
 * Show the list, if it has changed: drawing it anew would take the focus away, and end a renaming.
 * @param {Entry[]} entries
 * @param {string} current the id of the one that is shown
 * @param {Actions} actions
 */
export function showList(entries, current, actions) {
  const wanted = JSON.stringify([current, ...entries.map(({ id, title }) => [id, title])]);
  if (wanted === shown || byId("list").querySelector("input")) return;
  shown = wanted;
  const items = entries.map((entry) => {
    const link = el("a", { href: `#chat/${entry.id}`, title: entry.title }, entry.title);
    if (entry.id === current) link.ariaCurrent = "page";
    const item = el("li", {}, link);
    item.append(
      button("✎", () => edit(item, entry, actions), { title: "Rename", ariaLabel: `Rename ${entry.title}` }),
      button("✕", () => ask(entry, actions), { title: "Delete", ariaLabel: `Delete ${entry.title}` }),
    );
    return item;
  });
  byId("list").replaceChildren(...items);
}

/** Put a field in the place of a title. @param {HTMLElement} item @param {Entry} entry @param {Actions} actions */
function edit(item, entry, actions) {
  const before = [...item.childNodes];
  const field = el("input", { value: entry.title, ariaLabel: "Title", maxLength: 80 });
  let over = false;
  const end = (/** @type {boolean} */ take) => {
    if (over) return; // leaving the field by a key takes the focus away, too
    over = true;
    item.replaceChildren(...before);
    if (take && field.value.trim()) actions.rename(entry, field.value.trim());
  };
  field.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") event.stopPropagation(), end(false);
  };
  field.onblur = () => end(true);
  item.replaceChildren(field);
  field.select();
}

/** @param {Entry} entry @param {Actions} actions */
function ask(entry, actions) {
  if (confirm(`Delete “${entry.title}”? It can’t be brought back.`)) actions.remove(entry);
}
