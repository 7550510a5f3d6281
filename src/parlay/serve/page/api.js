// Requests to the server that the page came from. The API key is kept while the tab is open.

const KEY = "parlay-api-key";

/** An error in one line for people. */
export class ApiError extends Error {
  /** @param {string} message @param {number} [status] of the reply, if there was one */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const readKey = () => sessionStorage.getItem(KEY) ?? "";

/** @param {string} key */
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

/**
 * @typedef {object} Delta what a chunk of an answer adds
 * @property {string} text
 * @property {string} thought
 * @property {import("./tokens.js").Piece[]} pieces tokens with their sources
 * @property {string | null | undefined} finish
 * @property {Summary | undefined} summary with the last chunk
 * @property {import("./choices.js").Routing | undefined} routing with the last chunk, where there was a choice
 * @property {{prompt_tokens: number, completion_tokens: number} | undefined} usage with the last chunk
 *
 * @typedef {object} Summary how an answer was decoded
 * @property {string} strategy
 * @property {string} exactness
 * @property {number | null} seed
 * @property {number} tokens_per_step
 * @property {number} tokens_per_second
 */

/**
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} [options] a body makes it a POST
 * @returns {Promise<Response>} Throws ApiError, or the AbortError of the signal.
 */
export async function call(path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = { "Content-Type": "application/json" };
  if (readKey()) headers.Authorization = `Bearer ${readKey()}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError("The server does not answer.");
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

/** @param {string} path @returns {Promise<any>} */
export const read = async (path) => (await call(path)).json();

/** @param {unknown} error */
export const isAbort = (error) => error instanceof DOMException && error.name === "AbortError";

/** What an error reply says. @param {Response} response */
async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim();
  }
}

/**
 * Ask for an answer and give it as it comes.
 * @param {{path: string, body: object}} request
 * @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<Delta>}
 */
export async function* answer({ path, body }, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true }, explain: true };
  for await (const chunk of chunks(await call(path, { body: streamed, signal }))) {
    const choice = chunk.choices?.[0];
    yield {
      text: choice?.delta?.content ?? choice?.text ?? "",
      thought: choice?.delta?.reasoning_content ?? "",
      pieces: pieces(choice?.parlay),
      finish: choice?.finish_reason,
      summary: chunk.parlay,
      routing: chunk.metrics?.router ?? undefined,
      usage: chunk.usage,
    };
  }
}

/**
 * A chunk's tokens with their sources, and their writers and origins where there are some.
 * @param {{pieces: [string, string][], writers?: string[], origins?: (import("./tokens.js").Origin | null)[]} | undefined} told
 * @returns {import("./tokens.js").Piece[]}
 */
const pieces = (told) =>
  (told?.pieces ?? []).map(([text, source], place) => [
    text,
    source,
    told?.writers?.[place] || undefined,
    told?.origins?.[place] ?? undefined,
  ]);

/**
 * The JSON chunks of a stream. Throws ApiError for an error in mid-stream, and for a stream that breaks off.
 * @param {Response} response
 */
async function* chunks(response) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(brokenOff);
    if (done) brokenOff();
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines.filter((line) => line.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}

/** @param {unknown} [error] @returns {never} */
function brokenOff(error) {
  throw isAbort(error) ? error : new ApiError("The stream broke off.");
}
