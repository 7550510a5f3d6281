// Conversations in this browser's IndexedDB, and nowhere else. Where there is none, they last as long as the tab.

/** @typedef {import("./tree.js").Conversation} Conversation */
/** @typedef {Pick<Conversation, "id" | "title" | "updated">} Entry a conversation in the list */

const TITLES = "titles"; // apart, so that the list opens without reading what was said
const WHOLE = "conversations";

/** @type {IDBDatabase | null} */
let database = null;
/** @type {Map<string, Conversation>} */
const unkept = new Map();

/** @returns {Promise<boolean>} whether conversations are kept */
export async function open() {
  try {
    const request = indexedDB.open("parlay", 1);
    request.onupgradeneeded = () => [TITLES, WHOLE].forEach((name) => request.result.createObjectStore(name));
    database = await settled(request);
  } catch {
    database = null;
  }
  return database !== null;
}

/** @returns {Promise<Entry[]>} the latest first */
export async function list() {
  const entries = database ? await settled(stores("readonly")[0].getAll()) : [...unkept.values()];
  return entries.sort((one, other) => other.updated - one.updated);
}

/** @param {string} id @returns {Promise<Conversation | undefined>} */
export const load = async (id) => (database ? settled(stores("readonly")[1].get(id)) : unkept.get(id));

/** @param {Conversation} conversation */
export async function save(conversation) {
  if (!database) return void unkept.set(conversation.id, conversation);
  const { id, title, updated } = conversation;
  const [titles, whole] = stores("readwrite");
  titles.put({ id, title, updated }, id);
  await settled(whole.put(conversation, id));
}

/** @param {string} id */
export async function remove(id) {
  if (!database) return void unkept.delete(id);
  await Promise.all(stores("readwrite").map((store) => settled(store.delete(id))));
}

/** Both object stores, in one transaction. @param {IDBTransactionMode} mode */
function stores(mode) {
  const transaction = /** @type {IDBDatabase} */ (database).transaction([TITLES, WHOLE], mode);
  return [TITLES, WHOLE].map((name) => transaction.objectStore(name));
}

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
