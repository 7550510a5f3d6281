// What a router chose for an answer, when, and why: a table by drafter, and the answer's life as bars.

import { el, figure, svg } from "./dom.js";

const TINTS = 6; // as many as style.css has
const [WIDTH, HEIGHT] = [12, 48]; // of a bar

/**
 * @typedef {object} Drafter
 * @property {string} drafter
 * @property {number} asked
 * @property {number} verified
 * @property {number} trials
 * @property {number} expected
 * @property {number} accepted
 * @property {number} expected_seconds
 * @property {number} seconds
 *
 * @typedef {object} Stretch steps that follow each other
 * @property {number} steps
 * @property {number} tokens
 * @property {number} expected
 * @property {Record<string, number>} choices steps by drafter, or by the reason why nothing was verified
 *
 * @typedef {object} Routing
 * @property {Drafter[]} drafters
 * @property {Record<string, number>} reasons
 * @property {string} kind
 * @property {Stretch[]} life
 */

/** The panel, closed at first. @param {Routing} routing */
export function choicesView({ drafters, reasons, kind, life }) {
  const tints = new Map(drafters.map(({ drafter }, place) => [drafter, `tint-${place % TINTS}`]));
  const counted = Object.entries(reasons).sort(([, one], [, other]) => other - one);
  const why = counted.map(([reason, count]) => `${figure(count)} ${reason}`).join(" · ");
  const facts = [kind ? `taken for: ${kind}` : "", why].filter(Boolean).join(" · ");
  return el(
    "details",
    { className: "choices" },
    el("summary", {}, "Choices"),
    el("div", { className: "table" }, table(drafters, tints)),
    el("p", {}, facts),
    ...(life.length ? [lifeBars(life, tints)] : []),
  );
}

/** @param {Drafter[]} drafters @param {Map<string, string>} tints */
function table(drafters, tints) {
  const head = ["drafter", "asked", "verified", "tokens (expected)", "ms (expected)"];
  const rows = drafters.map((each) => {
    const name = el("td", {}, el("span", { className: tints.get(each.drafter) }, each.drafter));
    const trials = each.trials ? ` (${figure(each.trials)} tried)` : "";
    const cells = [
      figure(each.asked),
      figure(each.verified) + trials,
      `${figure(each.accepted)} (${figure(each.expected, 1)})`,
      `${figure(1000 * each.seconds, 1)} (${figure(1000 * each.expected_seconds, 1)})`,
    ];
    return el("tr", {}, name, ...cells.map((cell) => el("td", { className: "right" }, cell)));
  });
  const first = el("tr", {}, ...head.map((words) => el("th", { scope: "col" }, words)));
  return el("table", {}, el("thead", {}, first), el("tbody", {}, ...rows));
}

/**
 * A bar for each stretch, as high as its tokens per step, parted by what was chosen; a line where they were expected.
 * @param {Stretch[]} life
 * @param {Map<string, string>} tints
 */
function lifeBars(life, tints) {
  const most = Math.max(2, ...life.flatMap(({ steps, tokens, expected }) => [tokens / steps, expected / steps]));
  const parts = life.flatMap((stretch, place) => bar(stretch, place, most, tints));
  const width = WIDTH * life.length;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, width }, ...parts);
  drawing.ariaHidden = "true";
  const [steps, long] = [life.reduce((sum, each) => sum + each.steps, 0), life[0].steps];
  const each = long === 1 ? "each bar is a step" : `each bar is ${figure(long)} steps`;
  const caption = `${figure(steps)} steps: ${each}, as high as its tokens per step (${figure(most, 1)} at most); the line is what was expected`;
  return el("figure", { className: "steps life" }, drawing, el("figcaption", {}, caption));
}

/** @param {Stretch} stretch @param {number} place @param {number} most @param {Map<string, string>} tints */
function bar({ steps, tokens, expected, choices }, place, most, tints) {
  const height = (HEIGHT * tokens) / steps / most;
  let top = HEIGHT - height;
  const told = Object.entries(choices).map(([choice, count]) => `${figure(count)} ${choice}`).join(", ");
  const order = [...tints.keys()].reverse();
  const sorted = Object.entries(choices).sort(([one], [other]) => order.indexOf(other) - order.indexOf(one));
  const boxes = sorted.map(([choice, count]) => {
    const part = (height * count) / steps;
    const box = { x: WIDTH * place, y: top, width: WIDTH - 1, height: part, class: tints.get(choice) ?? "plain" };
    top += part;
    return svg("rect", box, svg("title", {}, told));
  });
  const y = HEIGHT - (HEIGHT * expected) / steps / most;
  return [...boxes, svg("rect", { x: WIDTH * place, y: Math.min(y, HEIGHT - 1), width: WIDTH - 1, height: 1, class: "expected" })];
}
