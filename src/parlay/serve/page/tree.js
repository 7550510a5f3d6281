// A conversation is a tree of messages, so that an edited question or a second answer replaces nothing. What is shown
// is the path from the root to one leaf.

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {string} [thought] the reasoning before an answer
 * @property {import("./tokens.js").Piece[]} [pieces] an answer's tokens with their sources
 * @property {import("./answer.js").Figures} [figures]
 * @property {import("./choices.js").Routing} [routing] what was chosen for an answer, where there was a choice
 * @property {string} [note] how an answer ended, if not by itself
 * @property {string} [error]
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated milliseconds since 1970
 * @property {string} system
 * @property {Record<string, Message>} messages
 * @property {string | null} leaf
 */

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");

/** @param {string} system @returns {Conversation} */
export const begin = (system) => ({
  id: newId(),
  title: "New chat",
  updated: Date.now(),
  system,
  messages: {},
  leaf: null,
});

/**
 * Add a message, which is then the leaf. The first question names the conversation.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {Message["role"]} role
 * @param {string} content
 * @returns {Message}
 */
export function add(conversation, parent, role, content) {
  if (!Object.keys(conversation.messages).length) {
    conversation.title = content.trim().replace(/\s+/g, " ").slice(0, 60) || conversation.title;
  }
  const message = { id: newId(), parent, role, content };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  return message;
}

/** From the first message to one, or to the leaf. @param {Conversation} conversation @param {string | null} [last] */
export function path(conversation, last = conversation.leaf) {
  const found = [];
  for (let id = last; id; id = conversation.messages[id].parent) found.unshift(conversation.messages[id]);
  return found;
}

/** All that were said in one message's place, itself included. @param {Conversation} conversation @param {Message} message */
export const siblings = (conversation, message) =>
  Object.values(conversation.messages).filter((other) => other.parent === message.parent);

/** Show the path that leads over a message, to the latest leaf below. @param {Conversation} conversation @param {Message} message */
export function choose(conversation, message) {
  const parents = new Map(Object.values(conversation.messages).map((each) => [each.parent, each.id])); // the latest wins
  let leaf = message.id;
  for (let child = parents.get(leaf); child; child = parents.get(leaf)) leaf = child;
  conversation.leaf = leaf;
}
