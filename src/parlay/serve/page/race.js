// The same prompt by two strategies: the same text, at another pace. One runs after the other, so that neither slows the
// other down; then both can be replayed beside each other, at the times that were measured.

import { ApiError, answer, isAbort } from "./api.js";
import { byId, el, figure } from "./dom.js";
import { choices, fillStrategies, requestFields } from "./settings.js";
import { Legend, TokenView, steps } from "./tokens.js";

const ROWS = /** @type {const} */ ([
  ["tokens", "tokens", 0],
  ["steps", "steps", 0],
  ["perStep", "tokens per step", 2],
  ["rate", "tokens/s", 1],
  ["first", "first token, ms", 0],
  ["whole", "whole answer, s", 2],
]);

/** @typedef {import("./tokens.js").Piece} Piece */

/** One side of the race, and when each of its pieces came. */
class Lane {
  /** @param {string} name @param {Legend} legend */
  constructor(name, legend) {
    this.name = name;
    this.legend = legend;
    /** @type {{at: number, pieces: Piece[]}[]} */
    this.times = [];
    /** @type {Piece[]} */
    this.pieces = [];
    /** @type {import("./api.js").Summary | undefined} */
    this.summary = undefined;
    /** @type {import("./api.js").Delta["usage"]} */
    this.usage = undefined;
    this.text = "";
    this.figures = Object.fromEntries(ROWS.map(([key]) => [key, el("dd", {}, "–")]));
    const rows = ROWS.map(([key, words]) => el("div", {}, el("dt", {}, words), this.figures[key]));
    this.bar = el("progress", { max: 1, value: 0, ariaHidden: "true" });
    this.body = el("div", { className: "lane-text", tabIndex: 0 });
    this.view = el("article", { className: "lane", ariaLabel: name }, el("h2", {}, name), el("dl", {}, ...rows), this.bar, this.body);
    this.tokens = new TokenView(legend);
    this.body.append(this.tokens.view);
  }

  clear() {
    this.tokens = new TokenView(this.legend);
    this.body.replaceChildren(this.tokens.view);
  }

  /** @param {{path: string, body: object}} request @param {AbortSignal} signal */
  async run(request, signal) {
    const asked = performance.now();
    for await (const delta of answer(request, signal)) {
      this.summary = delta.summary ?? this.summary;
      this.usage = delta.usage ?? this.usage;
      if (!delta.pieces.length) continue;
      this.times.push({ at: performance.now() - asked, pieces: delta.pieces });
      this.pieces.push(...delta.pieces);
      this.tokens.update(this.pieces);
      this.#count();
    }
    this.text = this.pieces.map(([text]) => text).join("");
    this.#count();
  }

  /** The engine's own figures once there are any: it also counts tokens that have no text. */
  #count() {
    const tokens = this.usage?.completion_tokens ?? this.pieces.length;
    const perStep = this.summary?.tokens_per_step ?? this.pieces.length / Math.max(1, steps(this.pieces).length);
    const [first, last] = [this.times[0]?.at, this.times.at(-1)?.at];
    const shown = {
      tokens,
      steps: Math.round(tokens / Math.max(1, perStep)),
      perStep,
      rate: this.summary?.tokens_per_second,
      first,
      whole: this.summary && last && last / 1000,
    };
    for (const [key, , digits] of ROWS) this.figures[key].textContent = figure(shown[key], digits);
  }

  get seconds() {
    return this.times.at(-1)?.at ?? 0;
  }

  /** Show what there was at a time. @param {number} at milliseconds from the start */
  showAt(at) {
    const pieces = this.times.filter((time) => time.at <= at).flatMap((time) => time.pieces);
    if (pieces.length < this.tokens.shown) this.clear();
    this.tokens.update(pieces);
    this.bar.value = pieces.length / Math.max(1, this.pieces.length);
  }
}

/** @type {AbortController | null} */
let running = null;
/** @type {Lane[]} */
let lanes = [];

/** Listen to the form. */
export function startRace() {
  byId("race-form").onsubmit = (/** @type {Event} */ event) => {
    event.preventDefault();
    race();
  };
  byId("race-stop").onclick = stopRace;
  byId("replay").onclick = replay;
}

/** Whether there was one to stop. */
export function stopRace() {
  running?.abort();
  return running !== null;
}

/** The strategies that work for this model; plain decoding against the default, to begin with. */
export function fillRace() {
  fillStrategies(byId("left"));
  fillStrategies(byId("right"));
  if (byId("left").value !== byId("right").value) return;
  const names = (choices?.strategies ?? []).map(({ name }) => name);
  byId("right").value = names.includes("auto") ? "auto" : (names[1] ?? "none");
}

async function race() {
  const names = [byId("left").value, byId("right").value];
  if (names[0] === names[1]) return say("Choose two different strategies.");
  running?.abort();
  const control = (running = new AbortController());
  const legend = new Legend();
  lanes = names.map((name) => new Lane(name, legend));
  byId("lanes").replaceChildren(...lanes.map((lane) => lane.view));
  byId("race-legend").replaceChildren(legend.view);
  byId("verdict").scrollIntoView();
  showState(true);
  try {
    const seed = crypto.getRandomValues(new Uint32Array(1))[0];
    await prime(request("none", seed), control.signal);
    for (const [place, lane] of lanes.entries()) {
      say(`${names[place]} is running.`);
      await lane.run(request(names[place], seed), control.signal);
    }
    for (const lane of lanes) lane.bar.value = lane.seconds / Math.max(...lanes.map((each) => each.seconds));
    say(verdict(lanes[0], lanes[1]));
  } catch (error) {
    if (running === control && isAbort(error)) say("Stopped.");
    else if (running === control && error instanceof ApiError) say(error.message);
    else if (!isAbort(error)) throw error;
  } finally {
    if (running === control) showState(false);
  }
}

/** @param {boolean} busy */
function showState(busy) {
  if (!busy) running = null;
  byId("race-stop").disabled = !busy;
  byId("replay").disabled = busy || !lanes.every((lane) => lane.summary);
}

/** The same for both but for the strategy. Nothing is learnt from it, or the second would know what the first wrote. */
function request(/** @type {string} */ strategy, /** @type {number} */ seed) {
  const prompt = byId("race-prompt").value;
  const most = Number(byId("race-tokens").value) || 256;
  const body = { seed, ...requestFields(), strategy, max_tokens: most, store: false };
  if (choices?.chat === false) return { path: "v1/completions", body: { ...body, prompt } };
  return { path: "v1/chat/completions", body: { ...body, messages: [{ role: "user", content: prompt }] } };
}

/** Have the prompt read beforehand, so that it is cached for both. @param {{path: string, body: object}} request @param {AbortSignal} signal */
async function prime({ path, body }, signal) {
  say("The prompt is read.");
  for await (const _ of answer({ path, body: { ...body, max_tokens: 1 } }, signal)) void _;
}

/** Whether the texts are the same, and how the rates compare. @param {Lane} left @param {Lane} right */
function verdict(left, right) {
  const ratio = (right.summary?.tokens_per_second ?? 0) / (left.summary?.tokens_per_second ?? 0);
  const pace = ratio > 0 && Number.isFinite(ratio) ? ` ${right.name}: ${ratio.toFixed(2)} times the tokens/s of ${left.name}.` : "";
  if (left.text === right.text) return `Same text.${pace}`;
  let position = 0;
  while (left.text[position] === right.text[position]) position += 1;
  for (const lane of [left, right]) lane.tokens.mark(position);
  const promises = [left, right].map(({ summary }) => summary?.exactness).join(" and ");
  return `The texts differ from letter ${position + 1} on (exactness: ${promises}).${pace}`;
}

/** Both at once, as they were timed. */
function replay() {
  const [from, last] = [performance.now(), Math.max(...lanes.map((lane) => lane.seconds))];
  const racing = lanes;
  const frame = () => {
    const at = performance.now() - from;
    if (racing !== lanes) return;
    for (const lane of racing) lane.showAt(at);
    if (at < last) requestAnimationFrame(frame);
  };
  for (const lane of lanes) lane.clear();
  frame();
}

/** @param {string} text */
function say(text) {
  byId("verdict").textContent = text;
}
