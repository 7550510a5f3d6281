// Asks the server that it came from, and shows where each token came from. Keeps the API key while the tab is open,
// and nothing else.

const TARGET = "target";
const TINTS = 6; // as many as style.css has
const KEY = "parlay-api-key";
const DEFAULT = "the server’s default";
const byId = (id) => document.getElementById(id);

// ------------------------------------------------------------------------------------------------------------- server

class ApiError extends Error {}

/** Fetch from the API. Throws ApiError with one line for people, or the AbortError of `signal`. */
async function call(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (response.ok) return response;
  if (response.status === 401) byId("access").open = true;
  throw new ApiError(await reason(response));
}

/** What an error reply says, in one line. */
async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim();
  }
}

/** The JSON chunks of a streamed reply. Throws ApiError for an error in mid-stream and for a stream that breaks off. */
async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The stream broke off.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}

// -------------------------------------------------------------------------------------------------------------- lanes

/** Tints and legend of one run: a tint for each drafter, in order of appearance. */
class Legend {
  constructor() {
    this.names = new Map();
    byId("legend").replaceChildren();
  }

  /** The class of a token's tint. A token of the target that ends a draft is told from one without a draft. */
  tint(source, afterDraft) {
    if (source !== TARGET) return this.entry(source, `tint-${this.drafters % TINTS}`, `drafted by ${source}`);
    if (afterDraft) return this.entry("correction", "correction", "the model’s own, where a draft ended");
    return this.entry(TARGET, "plain", "the model’s own");
  }

  get drafters() {
    return [...this.names.values()].filter((name) => name.startsWith("tint-")).length;
  }

  entry(source, tint, meaning) {
    if (!this.names.has(source)) {
      this.names.set(source, tint);
      const swatch = element("span", "abc", tint);
      swatch.ariaHidden = "true";
      const item = element("li", meaning);
      item.prepend(swatch);
      byId("legend").append(item);
    }
    return this.names.get(source);
  }
}

/** One answer as it is written, and its figures: counted here while it streams, the engine's own at the end. */
class Lane {
  constructor(title, legend, room) {
    this.view = byId("lane").content.cloneNode(true).firstElementChild;
    this.answer = this.view.querySelector(".answer");
    this.progress = this.view.querySelector("progress");
    this.view.querySelector("h2").textContent = title;
    this.answer.ariaLabel = title;
    this.progress.hidden = !room;
    this.progress.max = room || 1;
    this.legend = legend;
    this.text = "";
    this.tokens = this.steps = 0;
    this.source = TARGET;
    byId("lanes").append(this.view);
  }

  start() {
    this.answer.ariaBusy = "true";
    this.asked = performance.now();
  }

  show(figure, value) {
    this.view.querySelector(`[data-figure=${figure}]`).textContent = value;
  }

  /** Each step ends with a token of the target's own, so those count the steps. */
  add(pieces) {
    const now = performance.now();
    if (!this.tokens) this.show("first", `${Math.round(now - this.asked)} ms`);
    for (const [text, source] of pieces) {
      const token = element("span", text, this.legend.tint(source, this.source !== TARGET));
      token.title = source;
      this.answer.append(token);
      this.text += text;
      this.source = source;
      this.tokens += 1;
      this.steps += source === TARGET;
    }
    this.started ??= { at: now, tokens: this.tokens };
    const rate = (1000 * (this.tokens - this.started.tokens)) / (now - this.started.at);
    this.figures(this.tokens, rate, this.tokens / this.steps);
  }

  figures(tokens, rate, perStep) {
    this.show("tokens", tokens);
    this.show("rate", rate > 0 && Number.isFinite(rate) ? rate.toFixed(rate < 10 ? 1 : 0) : "–");
    this.show("perStep", perStep > 0 && Number.isFinite(perStep) ? perStep.toFixed(2) : "–");
    this.progress.value = tokens;
  }

  finish(seed, reasonToStop, summary, usage) {
    this.answer.ariaBusy = "false";
    this.rate = summary?.tokens_per_second;
    this.exactness = summary?.exactness;
    if (summary) this.figures(usage?.completion_tokens ?? this.tokens, this.rate, summary.tokens_per_step);
    const facts = [summary?.strategy, summary?.exactness, `seed ${seed}`, reasonToStop && `ended by ${reasonToStop}`];
    this.view.querySelector(".note").textContent = facts.filter(Boolean).join(" · ");
  }

  /** Outline the token in which another text begins to differ. */
  mark(position) {
    let end = 0;
    const tokens = [...this.answer.children];
    tokens.find((token) => (end += token.textContent.length) > position)?.classList.add("differs");
  }
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

// --------------------------------------------------------------------------------------------------------------- runs

let running = null; // AbortController of the run under way

/** The form as a request body, without what was left empty. */
function request(fields) {
  const prompt = fields.get("prompt");
  const chat = fields.get("kind") === "chat";
  const body = { model: fields.get("model"), stream: true, stream_options: { include_usage: true } };
  Object.assign(body, chat ? { messages: [{ role: "user", content: prompt }] } : { prompt });
  for (const name of ["max_tokens", "temperature", "seed"]) {
    if (fields.get(name)) body[name] = Number(fields.get(name));
  }
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0]; // drawn here, so that a race can use it twice
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

/** The strategy as it is spelled in a request; empty for the server's default. */
function spelled(fields) {
  const parameters = fields.get("parameters").replaceAll(" ", "");
  const name = fields.get("strategy");
  if (parameters && !name) throw new ApiError("Parameters belong to a strategy: choose one.");
  return parameters ? `${name}:${parameters}` : name;
}

/** Stream an answer into a lane. */
async function decode({ path, body }, strategy, lane, signal) {
  let ended, summary, usage;
  lane.start();
  try {
    const response = await call(path, { body: strategy ? { ...body, strategy } : body, signal });
    for await (const chunk of chunks(response)) {
      for (const choice of chunk.choices) {
        if (choice.parlay?.pieces.length) lane.add(choice.parlay.pieces);
        ended = choice.finish_reason ?? ended;
      }
      summary = chunk.parlay ?? summary;
      usage = chunk.usage ?? usage;
    }
  } finally {
    lane.finish(body.seed, ended, summary, usage);
  }
}

async function generate(fields, legend, signal) {
  const [asked, strategy] = [request(fields), spelled(fields)];
  const lane = new Lane(strategy || DEFAULT, legend, asked.body.max_tokens);
  await decode(asked, strategy, lane, signal);
  return lane.tokens ? "" : "The answer is empty.";
}

/** Plain decoding, then the strategy: one after the other, so that neither slows the other down. */
async function race(fields, legend, signal) {
  const [asked, strategy] = [request(fields), spelled(fields)];
  if (strategy === "none") throw new ApiError("Plain against plain is no race: choose another strategy.");
  asked.body.store = false; // or a strategy that learns would have learnt the answer from the first run
  const titles = ["plain decoding", strategy || DEFAULT];
  const [plain, fast] = titles.map((title) => new Lane(title, legend, asked.body.max_tokens));
  await decode(asked, "none", plain, signal);
  await decode(asked, strategy, fast, signal);
  return verdict(plain, fast);
}

/** Whether the texts match, and how the rates compare. */
function verdict(plain, fast) {
  const ratio = fast.rate / plain.rate;
  const pace = ratio > 0 && Number.isFinite(ratio) ? ` ${ratio.toFixed(2)} times the tokens/s of plain decoding.` : "";
  if (plain.text === fast.text) return `Same text.${pace}`;
  let position = 0;
  while (plain.text[position] === fast.text[position]) position += 1;
  plain.mark(position);
  fast.mark(position);
  const promise = fast.exactness ? ` (exactness: ${fast.exactness})` : "";
  return `The texts differ from character ${position + 1} on${promise}.${pace}`;
}

/** Clear the page, run, and say how it ended; a new run ends the one before. */
async function run(work) {
  running?.abort();
  const control = (running = new AbortController());
  byId("lanes").replaceChildren();
  say("", "");
  byId("stop").disabled = false;
  try {
    const ending = await work(new FormData(byId("ask")), new Legend(), control.signal);
    if (running === control) say("", ending);
  } catch (error) {
    if (running === control) say(...(error.name === "AbortError" ? ["", "Stopped."] : [error.message, ""]));
  } finally {
    if (running === control) rest();
  }
}

function say(error, verdict) {
  byId("error").textContent = error;
  byId("verdict").textContent = verdict;
}

/** Nothing runs any more; lanes to which nothing came go. */
function rest() {
  running = null;
  byId("stop").disabled = true;
  for (const lane of document.querySelectorAll("article:has(.answer:empty)")) lane.remove();
}

// ----------------------------------------------------------------------------------------------------------- the form

let strategies = [];

/** Fill the choices from the server; what was chosen stays chosen. */
async function load() {
  try {
    const read = async (path) => (await call(path)).json();
    const [models, listed] = await Promise.all([read("v1/models"), read("strategies")]);
    strategies = listed;
    refill(byId("model"), models.data.map(({ id }) => option(id)));
    const groups = Map.groupBy(listed, ({ family }) => family);
    refill(byId("strategy"), [byId("strategy").firstElementChild, ...[...groups].map(group)]);
    say("", "");
  } catch (error) {
    say(error.message, "");
  }
}

function refill(select, choices) {
  const chosen = select.value;
  select.replaceChildren(...choices);
  if ([...select.options].some(({ value }) => value === chosen)) select.value = chosen;
}

function option(name) {
  const made = element("option", name);
  made.value = name;
  return made;
}

function group([family, members]) {
  const made = document.createElement("optgroup");
  made.label = family;
  made.append(...members.map(({ name }) => option(name)));
  return made;
}

function describe() {
  const chosen = strategies.find(({ name }) => name === byId("strategy").value);
  byId("about").textContent = chosen ? chosen.summary : "";
}

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value);
  load();
});
byId("strategy").addEventListener("change", describe);
byId("stop").addEventListener("click", () => running?.abort());
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run(event.submitter?.value === "race" ? race : generate);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    byId("ask").requestSubmit(byId("generate"));
  }
});
load();
