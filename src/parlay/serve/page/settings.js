// What stays from visit to visit: how to sample, which strategy, which model. And the dialog in which it is chosen.

import { keepKey, read, readKey } from "./api.js";
import { alarm, byId, el } from "./dom.js";

const KEPT = "parlay-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "strategy", "parameters", "system", "model"];
const THEMES = ["", "light", "dark"];

/**
 * @typedef {object} Strategy
 * @property {string} name
 * @property {string} family
 * @property {string} exactness
 * @property {string} summary
 * @property {Record<string, {default: unknown, help: string}>} parameters
 *
 * @typedef {object} Choices what the server lets choose for a model
 * @property {string} model
 * @property {number} max_model_len
 * @property {number | null} max_tokens
 * @property {boolean} chat
 * @property {Record<string, number>} sampling
 * @property {Strategy[]} strategies
 */

/** @type {Record<string, string>} as they are written in the dialog; empty: as the model's makers or the server say */
export const settings = Object.fromEntries(FIELDS.map((name) => [name, ""]));

/** @type {Choices | null} */
export let choices = null;

/** @type {Promise<unknown>} settles when it is known what the server lets choose, or that it does not say */
export let known = Promise.resolve();

/** Note that the choices are being read, and pass that on. @template T @param {Promise<T>} reading @returns {Promise<T>} */
export function reads(reading) {
  known = reading.catch(() => {}); // whoever reads them hears of the fault
  return reading;
}

/** Take up what was kept, and heed the dialog. @param {(name: string) => void} changed called with the field that has changed */
export function startSettings(changed) {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    for (const name of FIELDS) if (typeof kept[name] === "string") settings[name] = kept[name];
  } catch {
    // nothing was kept, or something else
  }
  for (const name of FIELDS) {
    byId(name).value = settings[name];
    byId(name).addEventListener("change", () => {
      settings[name] = byId(name).value.trim();
      keep();
      describe();
      changed(name);
    });
  }
  byId("open-settings").onclick = () => byId("settings").showModal();
  byId("theme").value = document.documentElement.dataset.theme ?? "";
  byId("theme").onchange = () => showTheme(byId("theme").value);
  byId("flip").onclick = () => showTheme(isDark() ? "light" : "dark");
  showTheme(byId("theme").value);
}

/** @param {string} theme empty: the system's */
function showTheme(theme) {
  document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "";
  byId("theme").value = theme;
  byId("flip").ariaPressed = String(isDark());
  store("parlay-theme", theme);
}

const isDark = () =>
  (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "")) === "dark";

const keep = () => store(KEPT, JSON.stringify(settings));

/** @param {string} name @param {string} value */
function store(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // a browser that keeps nothing still chats
  }
}

/** Read which models there are, and what can be chosen for the one that is chosen. */
export async function loadChoices() {
  const { data } = await read("v1/models");
  const names = data.map((/** @type {{id: string}} */ model) => model.id);
  byId("model").replaceChildren(...names.map((/** @type {string} */ name) => el("option", {}, name)));
  settings.model = names.includes(settings.model) ? settings.model : names[0];
  byId("model").value = settings.model;
  await loadModel();
}

/** Read what can be chosen for the model: a server may have to load it first. */
export async function loadModel() {
  choices = null;
  const asked = settings.model;
  const found = await read(`choices?model=${encodeURIComponent(asked)}`);
  if (asked !== settings.model) return; // another one was chosen meanwhile
  choices = found;
  fillStrategies(byId("strategy"), "the server’s default");
  if (!byId("strategy").value) byId("strategy").value = settings.strategy = "";
  for (const name of NUMBERS) byId(name).placeholder = said(name);
  describe();
  alarm(found.chat ? "" : `${found.model} has no chat template: it goes on with the text as it stands.`);
}

/** The strategies that work here, as options. @param {HTMLSelectElement} select @param {string} [none] for no choice */
export function fillStrategies(select, none) {
  const chosen = select.id === "strategy" ? settings.strategy : select.value;
  const strategies = choices?.strategies ?? [];
  const families = [...new Set(strategies.map((each) => each.family))];
  const groups = families.map((family) => {
    const members = strategies.filter((each) => each.family === family);
    return el("optgroup", { label: family }, ...members.map(({ name }) => el("option", { value: name }, name)));
  });
  select.replaceChildren(...(none ? [el("option", { value: "" }, none)] : []), ...groups);
  select.value = chosen || (none ? "" : (strategies[0]?.name ?? ""));
}

/** What applies where nothing is written. @param {string} name */
function said(name) {
  if (name === "max_tokens") {
    const [most, end] = [choices?.max_tokens ?? choices?.max_model_len ?? Infinity, choices?.default_max_tokens ?? Infinity];
    return end < most ? String(end) : `all that fit (${most})`;
  }
  if (name === "seed") return "drawn each time";
  return String(choices?.sampling[name] ?? { top_k: "all", repetition_penalty: "1", min_p: "0" }[name] ?? "");
}

/** Say what the chosen strategy does, and which parameters it takes. */
function describe() {
  const chosen = choices?.strategies.find(({ name }) => name === settings.strategy);
  const parameters = Object.entries(chosen?.parameters ?? {});
  byId("about").textContent = chosen ? `${chosen.summary} Exactness: ${chosen.exactness}.` : "";
  byId("parameters").disabled = !parameters.length;
  byId("parameters").placeholder = parameters.map(([name, option]) => `${name}=${option.default}`).join(",");
}

/** The fields of a request that the settings decide. @returns {Record<string, unknown>} */
export function requestFields() {
  /** @type {Record<string, unknown>} */
  const fields = { model: settings.model, ...choices?.sampling };
  for (const name of NUMBERS) if (settings[name] !== "") fields[name] = Number(settings[name]);
  if (settings.strategy) {
    const parameters = settings.parameters.replaceAll(" ", "");
    fields.strategy = parameters ? `${settings.strategy}:${parameters}` : settings.strategy;
  }
  return fields;
}

/** Ask for the API key. @returns {Promise<void>} when one has been given */
export function askKey() {
  const dialog = byId("access");
  byId("key").value = readKey();
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    byId("enter").onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      keepKey(byId("key").value.trim());
      dialog.close();
      resolve();
    };
  });
}
