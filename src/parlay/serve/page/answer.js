// One answer: as Markdown, or as its tokens; its reasoning, its figures, and what can be done with it.

import { choicesView } from "./choices.js";
import { button, copyButton, el, figure } from "./dom.js";
import { Markdown } from "./markdown.js";
import { Legend, TokenView, documents, stepBars, steps } from "./tokens.js";

/**
 * @typedef {object} Figures how an answer was decoded: the engine's own at the end
 * @property {number} tokens
 * @property {number} perStep
 * @property {number} [perSecond]
 * @property {string} [strategy]
 * @property {string} [exactness]
 * @property {number | null} [seed]
 * @property {number} [prompt] tokens before the answer
 */

/** @typedef {import("./tree.js").Message} Message */

/** Figures of an answer that is still written, or was stopped. @param {Message} message @returns {Figures} */
export function counted(message) {
  const pieces = message.pieces ?? [];
  return { tokens: pieces.length, perStep: pieces.length / Math.max(1, steps(pieces).length) };
}

export class AnswerView {
  /**
   * @param {Message} message
   * @param {HTMLElement[]} actions buttons beside the view's own
   */
  constructor(message, actions) {
    this.message = message;
    this.body = el("div", { className: "body" });
    this.markdown = new Markdown(this.body);
    this.thought = el("div", {});
    this.thoughts = new Markdown(this.thought);
    this.summary = el("summary", {}, "Reasoning");
    this.reasoning = el("details", { className: "reasoning", hidden: true }, this.summary, this.thought);
    this.sources = el("div", { className: "sources", hidden: true });
    this.note = el("p", { className: "note" });
    this.choices = el("div", {});
    this.quotes = el("div", {});
    this.toggle = button("Sources", () => this.#toggle(), {
      ariaPressed: "false",
      title: "Colour the tokens by who wrote or proposed them",
    });
    const copy = copyButton(() => this.message.content, "Copy the answer");
    this.actions = el("div", { className: "actions" }, copy, ...actions, this.toggle);
    this.view = el(
      "article",
      { className: "assistant", ariaLabel: "Answer" },
      this.reasoning,
      this.body,
      this.sources,
      this.note,
      this.quotes,
      this.choices,
      this.actions,
    );
  }

  /**
   * Show what the message is now.
   * @param {boolean} [open] whether more will come
   * @returns {string[]} texts that are complete now, to be read out
   */
  update(open = false) {
    const { content, thought, pieces = [], figures, routing, note, error } = this.message;
    this.view.ariaBusy = String(open);
    this.view.classList.toggle("open", open);
    this.reasoning.hidden = !thought;
    this.summary.textContent = open && !content ? "Reasoning …" : "Reasoning";
    if (thought) this.thoughts.update(thought, open);
    const complete = this.markdown.update(content, open);
    this.toggle.hidden = !pieces.length;
    this.note.replaceChildren(this.#facts(figures, note), ...(error ? [el("strong", { role: "alert" }, error)] : []));
    if (!open && routing && !this.choices.firstChild) this.choices.append(choicesView(routing));
    if (!open) this.quotes.replaceChildren(...[documents(pieces)].filter((list) => list !== undefined));
    if (!this.sources.hidden) this.#showSources(open);
    return complete.map((block) => block.textContent ?? "");
  }

  /** @param {Figures | undefined} figures @param {string | undefined} note */
  #facts(figures, note) {
    if (!figures) return note ?? "";
    const facts = [
      `${figure(figures.tokens)} tokens`,
      figures.perSecond ? `${figure(figures.perSecond, 1)} tokens/s` : "",
      `${figure(figures.perStep, 2)} tokens per step`,
      figures.strategy,
      figures.exactness,
      figures.seed === undefined || figures.seed === null ? "" : `seed ${figures.seed}`,
      note,
    ];
    return facts.filter(Boolean).join(" · ");
  }

  #toggle() {
    const wanted = this.sources.hidden;
    this.toggle.ariaPressed = String(wanted);
    this.sources.hidden = !wanted;
    this.body.hidden = wanted;
    this.tokens = undefined;
    if (wanted) this.#showSources(this.view.ariaBusy === "true");
  }

  /** @param {boolean} open */
  #showSources(open) {
    const { pieces = [], figures } = this.message;
    if (!this.tokens) {
      const legend = new Legend();
      this.tokens = new TokenView(legend);
      this.sources.replaceChildren(this.tokens.view, legend.view);
    }
    this.tokens.update(pieces);
    this.bars?.remove();
    this.bars = open ? undefined : stepBars(pieces, figures?.perStep);
    if (this.bars) this.sources.append(this.bars);
  }
}
