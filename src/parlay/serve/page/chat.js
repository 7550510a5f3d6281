// The conversation that is shown: its messages, and the answer that is being written.

import { AnswerView, counted } from "./answer.js";
import { ApiError, answer, isAbort } from "./api.js";
import { announce, button, byId, copyButton, el, figure, focusPrompt } from "./dom.js";
import { choices, known, requestFields, settings } from "./settings.js";
import { add, begin, choose, path, siblings } from "./tree.js";

const SAVE_EVERY = 1500; // milliseconds, while an answer is written

/**
 * @typedef {import("./tree.js").Message} Message
 * @typedef {import("./tree.js").Conversation} Conversation
 *
 * @typedef {object} Running an answer that is being written
 * @property {AbortController} control
 * @property {Conversation} conversation
 * @property {Message} message
 * @property {number} saved when it was saved last
 * @property {boolean} drawing whether the next frame will draw it
 * @property {boolean} wanted whether it is kept; not if the conversation was deleted meanwhile
 */

export class Chat {
  /**
   * @param {(conversation: Conversation) => Promise<void>} save called when a conversation has changed
   * @param {(retry: () => void) => void} unlock asks for the API key
   */
  constructor(save, unlock) {
    this.save = save;
    this.unlock = unlock;
    this.log = byId("messages");
    this.conversation = begin(settings.system);
    /** @type {Running | null} */
    this.running = null;
    /** @type {Map<string, AnswerView>} */
    this.answers = new Map();
  }

  /** Show another conversation; an answer that is being written goes on. @param {Conversation} conversation */
  show(conversation) {
    const running = this.running?.conversation;
    this.conversation = running?.id === conversation.id ? running : conversation;
    this.#draw();
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }

  /** Say something, and have it answered. @param {string} text */
  send(text) {
    if (this.running) return;
    this.#answer(add(this.conversation, this.conversation.leaf, "user", text));
  }

  /** End the answer that is being written; what there is of it stays. */
  stop() {
    this.running?.control.abort();
  }

  /** A conversation that is shown or answered, by its id. @param {string} id */
  held(id) {
    return [this.conversation, this.running?.conversation].find((each) => each?.id === id);
  }

  /** End what is written in a conversation that is deleted. @param {string} id */
  forget(id) {
    if (this.running?.conversation.id !== id) return;
    this.running.wanted = false;
    this.stop();
  }

  // ----------------------------------------------------------------------------------------------------------- messages

  #draw() {
    this.answers.clear();
    const messages = path(this.conversation);
    this.log.replaceChildren(...messages.map((message) => this.#view(message)));
    byId("empty").hidden = messages.length > 0;
    this.#showState();
  }

  /** @param {Message} message */
  #view(message) {
    if (message.role === "user") return this.#question(message);
    const again = button("Regenerate", () => this.#again(message));
    const view = new AnswerView(message, [again, ...this.#versions(message)]);
    this.answers.set(message.id, view);
    view.update(this.running?.message === message);
    return view.view;
  }

  /** @param {Message} message */
  #question(message) {
    const text = el("div", { className: "said" }, message.content);
    const edit = button("Edit", () => this.#edit(message, article));
    const copy = copyButton(() => message.content, "Copy the message");
    const actions = el("div", { className: "actions" }, ...this.#versions(message), copy, edit);
    const article = el("article", { className: "user", ariaLabel: "You" }, text, actions);
    return article;
  }

  /** Steps between what was said in one place. @param {Message} message */
  #versions(message) {
    const all = siblings(this.conversation, message);
    if (all.length < 2) return [];
    const place = all.indexOf(message);
    const step = (/** @type {string} */ text, /** @type {string} */ ariaLabel, /** @type {number} */ to) =>
      button(text, () => this.#choose(all[to]), { ariaLabel, disabled: !all[to] });
    const count = el("span", { className: "count" }, `${place + 1}/${all.length}`);
    return [step("‹", "Earlier version", place - 1), count, step("›", "Later version", place + 1)];
  }

  /** @param {Message} message */
  async #choose(message) {
    choose(this.conversation, message);
    this.#draw();
    focusPrompt();
    await this.save(this.conversation);
  }

  /** Put a field in the place of a question. @param {Message} message @param {HTMLElement} article */
  #edit(message, article) {
    const field = el("textarea", { value: message.content, rows: 3, ariaLabel: "Edited message" });
    const send = () => {
      if (this.running || !field.value.trim()) return;
      this.#answer(add(this.conversation, message.parent, "user", field.value.trim()));
    };
    field.onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (isSend(event)) event.preventDefault(), send();
      if (event.key === "Escape") event.stopPropagation(), cancel();
    };
    const cancel = () => (this.#draw(), focusPrompt());
    const actions = el("div", { className: "actions" }, button("Cancel", cancel), button("Send", send));
    article.replaceChildren(field, actions);
    article.classList.add("edited");
    field.focus();
  }

  // ------------------------------------------------------------------------------------------------------------ answers

  /** @param {Message} message */
  #again(message) {
    const question = this.conversation.messages[message.parent ?? ""];
    if (question && !this.running) this.#answer(question);
  }

  /** Have a question answered. @param {Message} question */
  async #answer(question) {
    const conversation = this.conversation;
    const message = add(conversation, question.id, "assistant", "");
    const running = { control: new AbortController(), conversation, message, saved: Date.now(), drawing: false, wanted: true };
    this.running = running;
    this.#draw();
    focusPrompt();
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
    await this.#keep(running);
    try {
      await Promise.race([known, aborted(running.control.signal)]); // what is asked depends on the choices
      const request = asked(conversation, question);
      for await (const delta of answer(request, running.control.signal)) this.#take(running, delta);
    } catch (error) {
      this.#failed(message, error);
    } finally {
      await this.#end(running);
    }
  }

  /** An answer is kept before it is shown as over. @param {Running} running */
  async #end(running) {
    const { message } = running;
    message.figures ??= counted(message);
    await this.#keep(running);
    this.running = null;
    this.#follow(() => this.answers.get(message.id)?.update().forEach(announce));
    this.#showState();
  }

  /** @param {Running} running @param {import("./api.js").Delta} delta */
  #take(running, { text, thought, pieces, finish, summary, routing, usage }) {
    const { message } = running;
    message.content += text;
    if (thought) message.thought = (message.thought ?? "") + thought;
    message.pieces = [...(message.pieces ?? []), ...pieces];
    if (finish === "length") message.note = "ended by its limit of tokens";
    if (summary) message.figures = figures(message, summary, usage);
    if (routing) message.routing = routing;
    if (Date.now() - running.saved > SAVE_EVERY) this.#keep(running);
    if (running.drawing) return;
    running.drawing = true;
    requestAnimationFrame(() => {
      running.drawing = false;
      if (this.running !== running) return;
      this.#follow(() => this.answers.get(message.id)?.update(true).forEach(announce));
    });
  }

  /** @param {Message} message @param {unknown} error */
  #failed(message, error) {
    if (isAbort(error)) message.note = "stopped";
    else if (error instanceof ApiError) message.error = error.message;
    else throw error;
    if (error instanceof ApiError && error.status === 401) this.unlock(() => this.#again(message));
  }

  /** Save what there is. @param {Running} running */
  async #keep(running) {
    if (!running.wanted) return;
    running.saved = Date.now();
    running.conversation.updated = running.saved;
    await this.save(running.conversation);
  }

  /** Change what is shown, and stay at its end if the end was in sight. @param {() => void} change */
  #follow(change) {
    const scroll = byId("scroll");
    const near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    change();
    if (near) scroll.scrollTop = scroll.scrollHeight;
  }

  #showState() {
    const last = path(this.conversation).findLast((message) => message.figures?.prompt)?.figures;
    byId("stop").hidden = !this.running;
    byId("send").hidden = this.running !== null;
    byId("room").textContent =
      last && choices ? `${figure((last.prompt ?? 0) + last.tokens)} of ${figure(choices.max_model_len)} tokens used` : "";
  }
}

/** @param {AbortSignal} signal */
const aborted = (signal) => new Promise((done) => signal.addEventListener("abort", done));

/** What is asked of the server. A model without a chat template goes on with the text. @param {Conversation} conversation @param {Message} question */
function asked(conversation, question) {
  const messages = path(conversation, question.id).map(({ role, content }) => ({ role, content }));
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  if (choices?.chat !== false) {
    return { path: "v1/chat/completions", body: { ...requestFields(), messages: [...system, ...messages] } };
  }
  const prompt = [...system, ...messages].map(({ content }) => content).join("");
  return { path: "v1/completions", body: { max_tokens: choices.max_model_len, ...requestFields(), prompt } };
}

/** @param {Message} message @param {import("./api.js").Summary} summary @param {import("./api.js").Delta["usage"]} usage */
const figures = (message, summary, usage) => ({
  tokens: usage?.completion_tokens ?? message.pieces?.length ?? 0,
  perStep: summary.tokens_per_step,
  perSecond: summary.tokens_per_second,
  strategy: summary.strategy,
  exactness: summary.exactness,
  seed: summary.seed,
  prompt: usage?.prompt_tokens,
});

/** Whether a key sends: Enter, where there is a keyboard to hold Shift on. @param {KeyboardEvent} event */
export const isSend = (event) =>
  event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
