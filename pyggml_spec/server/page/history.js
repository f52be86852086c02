// Conversations in the browser's storage: an index, and an entry for each. The oldest go where a limit is reached.

const INDEX = "pyspec.chats", PREFIX = "pyspec.chat.", SETTINGS = "pyspec.settings";
export const MOST = 200, MOST_CHARACTERS = 4_000_000; // browsers keep 5 million characters of one site

const read = (key, otherwise) => {
  try { return JSON.parse(localStorage.getItem(key)) ?? otherwise; } catch { return otherwise; }
};
const identifier = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

/** Entries {id, title, updated, size}, the latest first. */
export const list = () => read(INDEX, []).sort((a, b) => b.updated - a.updated);
export const load = (id) => read(PREFIX + id, null);
export const settings = () => read(SETTINGS, {});
export const saveSettings = (values) => localStorage.setItem(SETTINGS, JSON.stringify(values));

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
  localStorage.setItem(INDEX, JSON.stringify(list().filter((entry) => entry.id !== id)));
}

/** Stores a conversation; the titles of those that went for it. Throws Error: it is too large, or the browser stores nothing. */
export function save(conversation) {
  const text = JSON.stringify(conversation), gone = [], { id, title, updated } = conversation;
  const others = list().filter((entry) => entry.id !== id);
  const drop = () => {
    const oldest = others.pop();
    if (!oldest) throw new Error("This conversation is not kept: the browser stores no more. Export it, or start a new one.");
    localStorage.removeItem(PREFIX + oldest.id);
    gone.push(oldest.title);
  };
  while (others.length >= MOST || (others.length && text.length + others.reduce((sum, entry) => sum + entry.size, 0) > MOST_CHARACTERS)) drop();
  for (;;) {
    try {
      localStorage.setItem(PREFIX + id, text);
      localStorage.setItem(INDEX, JSON.stringify([{ id, title, updated, size: text.length }, ...others]));
      return gone;
    } catch {
      drop();
    }
  }
}

/** All of them, as text of a file. */
export const exported = () => JSON.stringify({ pyspec_conversations: 1, conversations: list().map((entry) => load(entry.id)).filter(Boolean) }, null, 1);

/** Adds those of such a file; how many. Throws Error: it is no such file. */
export function imported(text) {
  let found;
  try { found = JSON.parse(text); } catch { found = null; }
  const whole = (one) => typeof one?.id === "string" && typeof one.title === "string" && typeof one.messages === "object";
  if (!found?.pyspec_conversations || !found.conversations?.every(whole)) throw new Error("This is no file of conversations that this page exported.");
  for (const one of found.conversations) save(one);
  return found.conversations.length;
}

// -- a conversation: messages by id, each with its parent, so that edits and further answers lose nothing; `leaf` ends the path that is shown

export const create = (system) => ({ id: identifier(), title: "New conversation", system, updated: Date.now(), leaf: null, messages: {} });

export function add(conversation, parent, values) {
  const message = { id: identifier(), parent, ...values };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  return message;
}

/** The messages from the first one to `leaf`. */
export function path(conversation, leaf = conversation.leaf) {
  const out = [];
  for (let message = conversation.messages[leaf]; message; message = conversation.messages[message.parent]) out.unshift(message);
  return out;
}

/** The versions of a message: those with the same parent, in order. */
export const versions = (conversation, message) => Object.values(conversation.messages).filter((other) => other.parent === message.parent && other.role === message.role);

/** Shows a version, with the latest of what follows it. */
export function choose(conversation, message) {
  let leaf = message.id;
  for (let next = message; next; next = Object.values(conversation.messages).filter((other) => other.parent === leaf).at(-1)) leaf = next.id;
  conversation.leaf = leaf;
}
