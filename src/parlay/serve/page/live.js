// What the server does now, drawn from its metrics every two seconds while the view is open.

import { ApiError, call } from "./api.js";
import { alarm, byId, el, figure, svg } from "./dom.js";

const EVERY = 2000; // milliseconds
const KEPT = 90; // readings: three minutes
const [WIDTH, HEIGHT] = [320, 96];

/**
 * @typedef {{name: string, labels: Record<string, string>, value: number}} Sample a line of Prometheus's text format
 * @typedef {{at: number, samples: Sample[]}} Reading
 *
 * @typedef {object} Chart
 * @property {string} title
 * @property {string} about
 * @property {[string, (now: Reading, before: Reading) => number | undefined][]} lines what each is called, and its value
 * @property {number} [digits] after the point
 * @property {(now: Reading) => number} [limit] the most there can be
 */

/** @type {Chart[]} */
const CHARTS = [
  {
    title: "Tokens per step",
    digits: 2,
    about: "of requests that ended since the reading before; plain decoding has 1",
    lines: [["tokens per step", (now, before) => since(now, before, "parlay_completion_tokens_total") / since(now, before, "parlay_steps_total")]],
  },
  {
    title: "Tokens per second",
    about: "of requests that ended since the reading before",
    lines: [["tokens/s", (now, before) => (1000 * since(now, before, "parlay_completion_tokens_total")) / (now.at - before.at)]],
  },
  {
    title: "Queue",
    about: "samples that take part in steps, and samples that wait for a place",
    lines: [
      ["running", (now) => sum(now, "vllm:num_requests_running")],
      ["waiting", (now) => sum(now, "vllm:num_requests_waiting")],
    ],
  },
  {
    title: "Memory",
    about: "tokens that running requests hold in the cache",
    lines: [
      ["tokens", (now) => sum(now, "parlay_cache_used_tokens")],
    ],
    limit: (now) => sum(now, "parlay_cache_room_tokens"),
  },
];

/** @type {Reading[]} */
let readings = [];
let timer = 0;

/** Begin to read, or go on. */
export function startLive() {
  stopLive();
  byId("charts").ariaBusy = "true";
  look();
  timer = setInterval(() => document.visibilityState === "visible" && look(), EVERY);
}

export function stopLive() {
  clearInterval(timer);
}

async function look() {
  try {
    const samples = parse(await (await call("metrics")).text());
    readings = [...readings, { at: performance.now(), samples }].slice(-KEPT - 1);
    alarm();
    draw();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    alarm(error.message);
  }
}

/** @param {string} text @returns {Sample[]} */
export function parse(text) {
  return [...text.matchAll(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/gm)].map(([, name, labels = "", value]) => ({
    name,
    labels: Object.fromEntries([...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, said]) => [key, said])),
    value: Number(value),
  }));
}

/** @param {Reading} reading @param {string} name @param {(labels: Record<string, string>) => boolean} [which] */
const sum = ({ samples }, name, which = () => true) =>
  samples.filter((each) => each.name === name && which(each.labels)).reduce((total, { value }) => total + value, 0);

/** @param {Reading} now @param {Reading} before @param {string} name */
const since = (now, before, name) => sum(now, name) - sum(before, name);

// ------------------------------------------------------------------------------------------------------------- drawing

function draw() {
  byId("charts").ariaBusy = "false";
  byId("charts").replaceChildren(...CHARTS.map(drawChart));
  byId("totals").replaceChildren(...totals(readings[readings.length - 1]));
}

/** @param {Chart} chart */
function drawChart({ title, about, lines, digits = 0, limit }) {
  const pairs = readings.slice(1).map((now, place) => /** @type {const} */ ([now, readings[place]]));
  const series = lines.map(([, value]) => pairs.map(([now, before]) => value(now, before)));
  const top = Math.ceil(1.05 * Math.max(1, ...series.flat().filter(isNumber)));
  const words = lines.map(([name], place) => `${name}: ${figure(series[place].findLast(isNumber), digits)}`);
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" },
    ...[0.25, 0.5, 0.75].map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part })),
    ...series.map((values, place) => svg("path", { class: `line line-${place}`, d: outline(values, top) })),
  );
  drawing.role = "img";
  drawing.ariaLabel = `${title} in the last three minutes; now ${words.join(", ")}`;
  const now = lines.map(([name], place) => {
    const value = el("b", {}, figure(series[place].findLast(isNumber), digits));
    return el("span", { className: `key line-${place}` }, lines.length > 1 ? `${name} ` : "", value);
  });
  const scale = el("span", { className: "scale" }, `0 to ${figure(top)}`);
  const caption = limit ? `${about}, which has room for ${figure(limit(readings[readings.length - 1]))}` : about;
  return el("figure", { className: "chart" }, el("h3", {}, title), el("p", {}, ...now, scale), drawing, el("figcaption", {}, caption));
}

/** @param {number | undefined} value @returns {value is number} */
const isNumber = (value) => value !== undefined && Number.isFinite(value);

/** A line from reading to reading; where there is no value, the last one goes on. @param {(number | undefined)[]} values @param {number} top */
function outline(values, top) {
  let path = "";
  for (const [place, value] of values.entries()) {
    if (!isNumber(value)) continue;
    const x = WIDTH - ((values.length - 1 - place) * WIDTH) / (KEPT - 1);
    path += `${path ? "L" : "M"}${x.toFixed(1)} ${(HEIGHT - (HEIGHT * value) / top).toFixed(1)}h0`; // a dot, if alone
  }
  return path;
}

/** A row for each strategy that has been used. @param {Reading} reading */
function totals(reading) {
  const used = reading.samples.filter(({ name }) => name === "parlay_steps_total").map(({ labels }) => labels.strategy);
  return [...new Set(used)].map((strategy) => {
    const of = (/** @type {string} */ name) => sum(reading, name, (labels) => labels.strategy === strategy);
    const [drafted, accepted] = [of("parlay_draft_tokens_total"), of("parlay_accepted_tokens_total")];
    const cells = [
      figure(of("parlay_requests_total")),
      figure(of("parlay_completion_tokens_total")),
      figure(of("parlay_completion_tokens_total") / of("parlay_steps_total"), 2),
      figure(drafted ? (100 * accepted) / drafted : undefined),
    ];
    return el("tr", {}, el("th", { scope: "row" }, strategy), ...cells.map((value) => el("td", {}, value)));
  });
}
