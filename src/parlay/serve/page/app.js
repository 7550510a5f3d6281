// Joins the parts of the page: which view is shown, which conversation, and what the keys do.

import { ApiError } from "./api.js";
import { Chat, isSend } from "./chat.js";
import { alarm, byId, focusPrompt } from "./dom.js";
import { startLive, stopLive } from "./live.js";
import { fillRace, startRace, stopRace } from "./race.js";
import { askKey, loadChoices, loadModel, reads, settings, startSettings } from "./settings.js";
import { showList } from "./sidebar.js";
import * as store from "./store.js";
import { begin } from "./tree.js";

const VIEWS = ["chat", "race", "live"];
const chat = new Chat(save, unlock);
/** @type {() => void} */
let ready;
/** @type {Promise<void>} the first conversation is shown */
const started = new Promise((done) => (ready = done));

/** @param {import("./tree.js").Conversation} conversation */
async function save(conversation) {
  await store.save(conversation).catch((error) => alarm(`This browser could not keep the chat: ${error.message}`));
  if (conversation === chat.conversation && !byId("chat").hidden) history.replaceState(null, "", `#chat/${conversation.id}`);
  await refresh();
}

async function refresh() {
  document.title = chat.conversation.leaf ? `${chat.conversation.title} – Parlay` : "Parlay";
  showList(await store.list(), chat.conversation.id, { rename, remove });
}

/** @param {store.Entry} entry @param {string} title */
async function rename(entry, title) {
  const kept = chat.held(entry.id) ?? (await store.load(entry.id));
  if (kept) await store.save(Object.assign(kept, { title }));
  await refresh();
}

/** @param {store.Entry} entry */
async function remove(entry) {
  chat.forget(entry.id);
  await store.remove(entry.id);
  if (chat.conversation.id === entry.id) startNew();
  await refresh();
}

function startNew() {
  if (location.hash === "#chat" || !location.hash) open();
  else location.hash = "#chat";
  focusPrompt();
}

/** Show what the address names: a view, and of chats which one. */
async function open() {
  const [view, id] = location.hash.slice(1).split("/");
  const shown = VIEWS.includes(view) ? view : "chat";
  for (const name of VIEWS) {
    byId(name).hidden = name !== shown;
    byId(`to-${name}`).ariaCurrent = name === shown ? "page" : null;
  }
  showSide(false);
  shown === "live" ? startLive() : stopLive();
  if (shown !== "chat") return;
  chat.show((id && (await store.load(id))) || begin(settings.system));
  byId("system").value = chat.conversation.system;
  await refresh();
}

/** Ask the server what there is. */
async function load(again = loadChoices) {
  try {
    alarm();
    await reads(again());
    fillRace();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    alarm(error.message);
    if (error.status === 401) unlock();
  }
}

/** @param {() => void} [retry] */
async function unlock(retry) {
  await askKey();
  await load();
  retry?.();
}

/** A setting has changed. @param {string} name */
function changed(name) {
  if (name === "model") load(loadModel);
  if (name !== "system") return;
  chat.conversation.system = settings.system;
  if (chat.conversation.leaf) save(chat.conversation);
}

/** @param {boolean} open the list of conversations, where there is no room beside it */
function showSide(open) {
  document.body.classList.toggle("side", open);
  byId("menu").ariaExpanded = String(open);
}

/** What is said before the first conversation is shown waits for it. */
async function send() {
  await started;
  const text = byId("prompt").value.trim();
  if (!text || chat.running) return;
  byId("prompt").value = "";
  chat.send(text);
}

function heedKeys() {
  byId("prompt").onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (!isSend(event)) return;
    event.preventDefault();
    send();
  };
  byId("skip").onclick = (/** @type {Event} */ event) => (event.preventDefault(), byId("prompt").focus());
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (document.body.classList.contains("side")) showSide(false), byId("menu").focus();
    else stopRace() || chat.stop();
  });
}

async function start() {
  startSettings(changed);
  startRace();
  heedKeys();
  byId("composer").onsubmit = (/** @type {Event} */ event) => (event.preventDefault(), send());
  byId("stop").onclick = () => (chat.stop(), focusPrompt());
  byId("new").onclick = startNew;
  byId("menu").onclick = () => showSide(!document.body.classList.contains("side"));
  byId("close-settings").onclick = () => byId("settings").close();
  byId("set-key").onclick = () => unlock();
  addEventListener("hashchange", open);
  addEventListener("focus", refresh); // another tab may have changed the list
  byId("unkept").hidden = await store.open();
  await open();
  byId("send").disabled = false;
  ready();
  await load();
  chat.show(chat.conversation); // now with what is known of the model
}

start();
