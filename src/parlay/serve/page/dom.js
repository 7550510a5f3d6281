// Nodes of the document. Text only ever becomes text: nothing here, or elsewhere in the page, parses HTML.

/**
 * @param {string} id
 * @returns {any} the element of that id
 */
export const byId = (id) => document.getElementById(id);

/**
 * A new element.
 * @param {string} name
 * @param {Record<string, unknown>} [properties] as the element has them: className, onclick, ariaLabel
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function el(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/**
 * A new element of a drawing.
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @param {...(Node | string)} children
 */
export function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/**
 * A button.
 * @param {string} text
 * @param {(event: Event) => void} onclick
 * @param {Record<string, unknown>} [properties]
 */
export const button = (text, onclick, properties = {}) =>
  el("button", { type: "button", onclick, ...properties }, text);

/** A button that copies a text and says so. @param {() => string} text @param {string} [label] */
export function copyButton(text, label = "Copy") {
  const made = button("Copy", async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not copied";
    announce(made.textContent);
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  if (label !== "Copy") made.ariaLabel = label;
  return made;
}

/** @param {string} text @returns {Promise<boolean>} whether the clipboard has it now */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = el("textarea", { value: text, className: "unseen" }); // without HTTPS there is no clipboard
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** Go back to where messages are written; not where a keyboard would rise over the page. */
export function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) byId("prompt").focus();
}

/** Something to read out to those who listen to the page. @param {string} text */
export function announce(text) {
  const heard = byId("heard");
  if (text.trim()) heard.append(el("p", {}, text));
  while (heard.childElementCount > 20) heard.firstElementChild.remove();
}

/** What went wrong, at the top of the page; empty when nothing did. @param {string} [text] */
export function alarm(text = "") {
  byId("alarm").textContent = text;
}

/** A number for people. @param {number | undefined} value @param {number} [digits] after the point */
export function figure(value, digits = 0) {
  if (value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
