// Where tokens came from: each tinted by who wrote it, or by the drafter that proposed it, and the steps as a row of bars.

import { el, svg } from "./dom.js";

const TARGET = "target";
const TINTS = 6; // as many as style.css has

/**
 * A token and the drafter that proposed it, or the model itself. Where several models write, or a drafter's tokens are
 * kept that are not the model's own, the writer is the one whose choice the token is. Where the model writes with a
 * datastore, the origin is the token's place there.
 * @typedef {[text: string, source: string, writer?: string, origin?: Origin]} Piece
 * @typedef {{document: string, position: number, share: number}} Origin
 */

/** Whether a token is mostly from the datastore. @param {Origin | undefined} origin @returns {origin is Origin} */
const quoted = (origin) => origin !== undefined && origin !== null && origin.share >= 0.5;

/**
 * The steps of an answer. Each ends with a token of the model's own, after what was accepted of a draft.
 * @param {Piece[]} pieces
 * @returns {Piece[][]}
 */
export function steps(pieces) {
  /** @type {Piece[][]} */
  const found = [];
  let open = false;
  for (const piece of pieces) {
    if (open) found[found.length - 1].push(piece);
    else found.push([piece]);
    open = piece[1] !== TARGET;
  }
  return found;
}

/** A tint for each drafter, in order of appearance, and what the tints mean. */
export class Legend {
  constructor() {
    /** @type {Map<string, string>} */
    this.tints = new Map();
    this.view = el("ul", { className: "legend", ariaLabel: "Where the tokens came from" });
    this.#enter("plain", "the model’s own");
  }

  /** The class of the tint of a drafter or writer. @param {string} from @param {string} meaning */
  tint(from, meaning) {
    if (!this.tints.has(from)) {
      this.tints.set(from, `tint-${this.tints.size % TINTS}`);
      this.#enter(this.tints.get(from) ?? "", meaning);
    }
    return this.tints.get(from) ?? "";
  }

  /** @param {string} tint @param {string} meaning */
  #enter(tint, meaning) {
    this.view.append(el("li", {}, el("span", { className: tint, ariaHidden: "true" }, "abc"), meaning));
  }
}

/** An answer as its tokens. What one model wrote, or was accepted of one draft, stands in one run. */
export class TokenView {
  /** @param {Legend} legend */
  constructor(legend) {
    this.legend = legend;
    this.view = el("div", { className: "tokens" });
    this.shown = 0;
    this.from = TARGET;
  }

  /** Add what is new. @param {Piece[]} pieces all of them, so far */
  update(pieces) {
    for (const [text, source, writer, origin] of pieces.slice(this.shown)) {
      const from = writer ?? source;
      const token = el("span", { className: from === TARGET ? "plain" : "" }, text);
      if (quoted(origin)) {
        token.classList.add("quoted");
        token.title = `${origin.document}, token ${origin.position}: ${Math.round(100 * origin.share)} % from there`;
      }
      if (from === TARGET) this.view.append(token);
      else this.#run(from, writer === undefined).append(token);
      this.from = from;
    }
    this.shown = pieces.length;
  }

  /** The run that a token joins. @param {string} from who wrote it @param {boolean} drafted or who only proposed it */
  #run(from, drafted) {
    if (from !== this.from) {
      const meaning = drafted ? `proposed by ${from}, accepted` : `written by ${from}`;
      this.view.append(el("span", { className: `run ${this.legend.tint(from, meaning)}` }));
    }
    const run = /** @type {HTMLElement} */ (this.view.lastChild);
    run.title = `${from}: ${run.childElementCount + 1} ${drafted ? "accepted" : "written"}`;
    return run;
  }

  /** Outline the token in which another text begins to differ. @param {number} position */
  mark(position) {
    let end = 0;
    const tokens = [...this.view.querySelectorAll("span:not(.run)")];
    tokens.find((token) => (end += token.textContent.length) > position)?.classList.add("differs");
  }
}

/**
 * The documents that the answer quotes, those with most tokens first; nothing where it quotes none.
 * @param {Piece[]} pieces
 */
export function documents(pieces) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const [, , , origin] of pieces) {
    if (quoted(origin)) counts.set(origin.document, (counts.get(origin.document) ?? 0) + 1);
  }
  const ranked = [...counts].sort(([, one], [, other]) => other - one);
  const entries = ranked.map(([name, count]) => el("li", {}, `${name}: ${count} of ${pieces.length} tokens`));
  return entries.length ? el("ul", { className: "documents", ariaLabel: "Documents that the answer quotes" }, ...entries) : undefined;
}

/**
 * The steps as bars, each as high as it committed tokens.
 * @param {Piece[]} pieces
 * @param {number} [perStep] the engine's own tokens per step: a step that ends with a drafted token shows in no piece
 */
export function stepBars(pieces, perStep) {
  const sizes = steps(pieces).map((step) => step.length);
  const [shown, most] = [sizes.slice(-240), Math.max(2, ...sizes)];
  const bars = shown.map((size, place) =>
    svg("rect", { x: 3 * place, y: 24 - (24 * size) / most, width: 2, height: (24 * size) / most }),
  );
  const mean = perStep ?? pieces.length / Math.max(1, sizes.length);
  const label = `${Math.round(pieces.length / Math.max(1, mean))} steps: ${mean.toFixed(2)} tokens in each on average, ${Math.max(0, ...sizes)} at most`;
  const drawing = svg("svg", { viewBox: `0 0 ${3 * shown.length} 24`, height: 24, width: 3 * shown.length }, ...bars);
  drawing.ariaHidden = "true";
  return el("figure", { className: "steps" }, drawing, el("figcaption", {}, label));
}
