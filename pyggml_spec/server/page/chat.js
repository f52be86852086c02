// The chat: conversations, the composer, and requests. What is shown is made anew from the conversation; an answer that comes updates its own view.

import { explain, generation, request, setApiKey } from "./api.js";
import { kept } from "./figures.js";
import * as history from "./history.js";
import { dataUrl, filesOf } from "./images.js";
import { assistantView, keepSteps, userView } from "./message.js";
import { openSettings, requestFields } from "./settings.js";
import { $, count, el, icon, iconButton, number, speed } from "./dom.js";

const SAVE_MS = 2000, SHOW_MS = 50, NOTICE_MS = 10_000; // while an answer comes: between savings, and views of it; for which a note is shown
const EXAMPLES = ["Write a Python function that merges two sorted lists, with a test.", "Explain speculative decoding in three sentences.", "Draft a polite mail that moves a meeting to Thursday."];
let noticed = 0; // the timer of the line above the composer
const runs = new Map(); // answers that come, by conversation: {conversation, message, abort, view}
let conversation = history.create(history.settings().system ?? "");
let images = []; // data URLs that the next message has
let model = { name: "", several: false, vision: false, context: 0, drafts: true }; // `context`: 0 while it is not loaded

const say = (text) => { $("status").textContent = text; };
const coarse = matchMedia("(pointer: coarse)"); // on a telephone Enter breaks the line, and the keyboard comes when it is asked for
const focusPrompt = () => { if (!coarse.matches) $("prompt").focus(); };

// -- what is sent

/** Messages of the path as the server takes them; empty ones are left out, and messages of one role in a row are one. */
function sent(messages, system) {
  const out = system ? [{ role: "system", content: system }] : [];
  for (const m of messages) {
    if (m.role === "assistant") {
      if (!m.text && !m.reasoning && !m.calls.length) continue;
      const calls = m.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
      out.push({ role: "assistant", ...(m.text || !m.reasoning || calls.length ? { content: m.text } : {}), ...(m.reasoning ? { reasoning_content: m.reasoning } : {}), ...(calls.length ? { tool_calls: calls } : {}) });
    } else if (m.role === "tool") {
      out.push({ role: "tool", tool_call_id: m.call, name: m.name, content: m.text });
    } else {
      const content = m.images?.length ? [...m.images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: m.text }] : m.text;
      const before = out.at(-1);
      if (before?.role === "user" && typeof before.content === "string" && typeof content === "string") before.content += "\n\n" + content;
      else out.push({ role: "user", content });
    }
  }
  return out;
}

/** Lets the model write a message: a new one, or the rest of one. */
async function answer(message) {
  const owner = conversation, abort = new AbortController(), began = performance.now(), run = { conversation: owner, message, abort, view: null };
  const steps = [];
  let thoughtFrom = 0, tokens = 0, first = 0, savedAt = began, due = null;
  Object.assign(message, { finish: "", error: null, figures: null });
  owner.leaf = message.id;
  runs.set(owner.id, run);
  keep(owner);
  draw(true);
  say("The model answers.");
  const show = (state) => { run.view?.update(state); stick(); };
  const later = () => { due ??= setTimeout(() => { due = null; show(); told(); }, SHOW_MS); };
  const told = () => { if (owner === conversation && first && tokens > 1) $("speed").textContent = `${speed((1000 * (tokens - 1)) / (performance.now() - first))} tokens/s`; };
  try {
    const body = { ...(model.several ? { model: model.name } : {}), ...requestFields(), messages: sent(history.path(owner, message.id), owner.system), speculation: true, return_progress: true };
    for await (const event of generation("v1/chat/completions", body, abort.signal)) {
      const choice = event.choices?.[0], delta = choice?.delta ?? {};
      if (event.note) show({ note: event.note });
      if (event.prompt_progress) show({ reading: event.prompt_progress.processed / event.prompt_progress.total });
      if (delta.reasoning_content) {
        thoughtFrom ||= performance.now();
        message.reasoning += delta.reasoning_content;
        message.thought = performance.now() - thoughtFrom;
      }
      if (delta.content) message.text += delta.content;
      for (const call of delta.tool_calls ?? []) message.calls.push({ id: call.id, name: call.function.name, arguments: call.function.arguments });
      if (event.speculation?.tokens) {
        first ||= performance.now();
        tokens += event.speculation.tokens.length;
        steps.push(event.speculation);
      }
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      if (event.timings && event.speculation?.mode !== undefined) message.figures = kept(event, (performance.now() - began) / 1000);
      later();
      if (performance.now() - savedAt > SAVE_MS) {
        savedAt = performance.now();
        keep(owner);
      }
    }
    say(`The answer is there: ${count(tokens, "token")}.`);
  } catch (error) {
    if (error.name === "AbortError") {
      message.finish = "stopped";
      say("Stopped.");
    } else {
      message.error = explain(error);
      if (!error.kind && !error.status) console.error(error);
    }
  } finally {
    clearTimeout(due);
    runs.delete(owner.id);
    keepSteps(message, steps);
    keep(owner);
    if (owner === conversation) { draw(); stick(); } else drawList();
    $("speed").textContent = "";
    if (!model.context && !message.error) describe();
  }
}

function keep(one) {
  if (one.removed) return;
  one.updated = Date.now();
  try {
    const gone = history.save(one);
    if (gone.length) notice(`${count(gone.length, "old conversation")} made room: the browser keeps ${history.MOST} conversations and ${history.MOST_CHARACTERS / 1e6} MB. Export what you want to keep.`);
  } catch (error) {
    notice(error.message);
  }
}

const blank = () => ({ role: "assistant", text: "", reasoning: "", calls: [] });

function send() {
  const text = $("prompt").value.trim();
  if ((!text && !images.length) || runs.has(conversation.id)) return;
  if (images.length && !model.vision) return notice(noImages());
  const parent = conversation.leaf;
  if (!parent) conversation.title = text.split("\n")[0].slice(0, 80) || "Image";
  const said = history.add(conversation, parent, { role: "user", text, ...(images.length ? { images } : {}) });
  $("prompt").value = "";
  images = [];
  drawImages();
  grow();
  answer(history.add(conversation, said.id, blank()));
}

const act = {
  sends: (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && (!coarse.matches || event.ctrlKey || event.metaKey),
  choose: (message) => { if (!runs.has(conversation.id)) { history.choose(conversation, message); keep(conversation); draw(); } },
  edit: (message, text) => {
    if (runs.has(conversation.id)) return;
    const said = history.add(conversation, message.parent, { role: "user", text, ...(message.images ? { images: message.images } : {}) });
    answer(history.add(conversation, said.id, blank()));
  },
  regenerate: (message) => { if (!runs.has(conversation.id)) answer(history.add(conversation, message.parent, blank())); },
  retry: (message) => { if (!runs.has(conversation.id)) answer(Object.assign(message, blank())); },
  proceed: (message) => { if (!runs.has(conversation.id)) answer(message); },
  results: (message, texts) => {
    let parent = message.id;
    message.calls.forEach((call, i) => { parent = history.add(conversation, parent, { role: "tool", call: call.id, name: call.name, text: texts[i] }).id; });
    answer(history.add(conversation, parent, blank()));
  },
  key: (key, message) => { setApiKey(key); describe(); act.retry(message); },
  create: () => {
    globalThis.history.replaceState(null, "", location.pathname);
    open(history.create(history.settings().system ?? ""));
  },
};

// -- what is shown

/** The conversation. `follow`: scrolls to its end. */
function draw(follow = false) {
  const path = history.path(conversation), run = runs.get(conversation.id), box = $("messages"), views = [];
  const results = new Map(path.filter((m) => m.role === "tool").map((m) => [m.call, m]));
  for (const message of path) {
    const all = history.versions(conversation, message), running = run?.message === message;
    if (message.role === "user") views.push(userView(message, all, act));
    if (message.role === "assistant") views.push(assistantView(message, { all, results, last: message === path.at(-1), running, contextTokens: model.context }, act));
    if (running) run.view = views.at(-1);
  }
  box.replaceChildren(...views);
  $("empty").hidden = path.length > 0;
  $("system-line").hidden = !conversation.system || !path.length;
  $("system-line").textContent = `System prompt: ${conversation.system}`;
  $("title").textContent = path.length ? conversation.title : "New conversation";
  if (path.length) globalThis.history.replaceState(null, "", "#" + conversation.id);
  document.title = path.length ? `${conversation.title} - pyspec` : "pyspec";
  $("send").hidden = Boolean(run);
  $("stop").hidden = !run;
  const f = path.findLast((m) => m.figures)?.figures;
  $("context").textContent = f && model.context ? `${number(f.cache_n + f.prompt_n + f.predicted_n, 0)} of ${count(model.context, "token")}` : "";
  drawList();
  if (follow) $("scroll").scrollTop = $("scroll").scrollHeight;
}

const days = (time) => Math.round((new Date().setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / 86_400_000);

function drawList() {
  const list = history.list(), groups = new Map();
  for (const entry of list) {
    const age = days(entry.updated), name = age === 0 ? "Today" : age === 1 ? "Yesterday" : age < 7 ? "This week" : "Earlier";
    groups.set(name, [...(groups.get(name) ?? []), entry]);
  }
  $("conversations").replaceChildren(...[...groups].flatMap(([name, entries]) => [el("h3", {}, name), el("ul", {}, ...entries.map(listed))]));
  const size = list.reduce((sum, entry) => sum + entry.size, 0);
  $("stored").textContent = list.length ? `${list.length} of ${history.MOST} conversations, ${number((100 * size) / history.MOST_CHARACTERS, 0)} % of the space in this browser` : "Conversations stay in this browser";
}

function listed({ id, title }) {
  const current = id === conversation.id, whole = () => (current ? conversation : runs.get(id)?.conversation ?? history.load(id));
  const name = el("button", { type: "button", class: "name", "aria-current": current ? "true" : undefined, click: () => open(whole()) },
    title, runs.has(id) ? el("span", { class: "dot", role: "img", "aria-label": "an answer comes" }) : false);
  const rename = () => {
    const field = el("input", { "aria-label": "Title", class: "name" });
    field.value = title;
    let over = false;
    const done = (take) => {
      if (over) return;
      over = true;
      const one = whole();
      if (take && field.value.trim()) { one.title = field.value.trim().slice(0, 80); history.save(one); }
      draw();
    };
    field.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === "Escape") done(event.key === "Enter"); });
    field.addEventListener("blur", () => done(true));
    name.replaceWith(field);
    field.select();
  };
  const remove = () => {
    const one = history.load(id), run = runs.get(id);
    if (run) {
      run.conversation.removed = true;
      run.abort.abort();
    }
    history.remove(id);
    if (current) act.create();
    else drawList();
    if (one) notice(`"${title}" is deleted.`, "Undo", () => { history.save(one); drawList(); });
  };
  return el("li", { class: current ? "current" : "" }, name, iconButton("edit", `Rename ${title}`, rename), iconButton("delete", `Delete ${title}`, remove));
}

function open(one) {
  if (!one) return drawList();
  conversation = one;
  menu(false);
  draw(true);
  focusPrompt();
}

/** A line above the composer, with one action or none, for a while or until it is closed. */
function notice(text, label, action, stays = false) {
  const close = () => $("notices").replaceChildren();
  clearTimeout(noticed);
  if (!stays) noticed = setTimeout(close, NOTICE_MS);
  $("notices").replaceChildren(el("div", { class: "notice" }, el("span", {}, text),
    label ? el("button", { type: "button", click: () => { close(); action(); } }, label) : false, iconButton("close", "Close this note", close)));
}

function menu(shown) {
  document.body.classList.toggle("menu-open", shown);
  $("menu").setAttribute("aria-expanded", String(shown));
  if (shown) $("new").focus();
}

let sticks = true; // whether the end of an answer that comes stays in view
const stick = () => { if (sticks) $("scroll").scrollTop = $("scroll").scrollHeight; };

// -- the composer

function grow() {
  const box = $("prompt");
  box.rows = Math.min(10, Math.max(1, box.value.split("\n").length));
  while (box.rows < 10 && box.scrollHeight > box.clientHeight + 2) box.rows += 1;
}

const noImages = () => `${model.name || "This model"} sees no images. Send text, or serve a model with vision.`;

async function take(files) {
  if (!files.length) return;
  if (!model.vision) return notice(noImages());
  for (const file of files) {
    try { images.push(await dataUrl(file)); } catch (error) { notice(error.message); }
  }
  drawImages();
}

function drawImages() {
  $("attached").replaceChildren(...images.map((url, i) => el("span", { class: "attached" }, el("img", { src: url, alt: `Image ${i + 1}` }),
    iconButton("close", `Remove image ${i + 1}`, () => { images.splice(i, 1); drawImages(); }))));
}

// -- the server

async function describe() {
  try {
    const { data } = await (await request("v1/models")).json(), names = data.map((entry) => entry.id), chosen = history.settings().model;
    const loaded = (entry) => !entry.status || entry.status.value === "loaded", several = names.length > 1;
    const entry = data.find(({ id }) => id === chosen) ?? data.find(loaded) ?? data[0], name = entry.id;
    $("models").hidden = !several;
    $("model").hidden = several;
    $("models").replaceChildren(...names.map((one) => el("option", { value: one, selected: one === name }, one)));
    $("model").textContent = name;
    if (loaded(entry)) {
      const props = await (await request(several ? `props?model=${encodeURIComponent(name)}` : "props")).json(), given = props.default_generation_settings;
      model = { name, several, vision: props.modalities.vision, context: given.n_ctx, drafts: given.params["speculative.types"] !== "none" };
      const drafter = props.pyspec.drafter ? `, drafter ${props.pyspec.drafter}` : model.drafts ? ", n-gram drafting" : "";
      $("about").textContent = `${name}${drafter}, ${count(model.context, "token")} of context, on ${props.pyspec.device}`;
    } else {
      model = { name, several, vision: true, context: 0, drafts: true }; // the server says whether it sees images once it is loaded
      $("about").textContent = `${name} is loaded with the first message`;
    }
    $("attach").hidden = !model.vision;
    $("notices").replaceChildren();
    if (several && chosen && name !== chosen) {
      history.saveSettings({ ...history.settings(), model: name });
      notice(`${chosen} is not on this server any more: ${name} answers from now on.`);
    }
    $("speculative-row").hidden = !model.drafts;
    draw();
  } catch (error) {
    const { title, text, act: what } = explain(error), enter = () => openSettings(conversation.system, settled, "set-key");
    $("about").textContent = title;
    if (what === "key") enter();
    notice(`${title}. ${text}`, what === "key" ? "Enter the key" : "Try again", what === "key" ? enter : describe, true);
  }
}

function settled(system) {
  conversation.system = system;
  if (conversation.leaf) keep(conversation);
  describe();
  draw();
}

// -- events

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => { if (act.sends(event)) { event.preventDefault(); send(); } });
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("paste", (event) => { const files = filesOf(event.clipboardData); if (files.length) { event.preventDefault(); take(files); } });
for (const kind of ["dragenter", "dragover"]) addEventListener(kind, (event) => { if (event.dataTransfer?.types.includes("Files")) { event.preventDefault(); document.body.classList.add("drops"); } });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("drops"); });
addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("drops"); take(filesOf(event.dataTransfer)); });
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", (event) => { take([...event.target.files]); event.target.value = ""; });
$("stop").addEventListener("click", () => { runs.get(conversation.id)?.abort.abort(); $("prompt").focus(); });
$("new").addEventListener("click", act.create);
$("new-top").addEventListener("click", act.create);
$("menu").addEventListener("click", () => menu(!document.body.classList.contains("menu-open")));
$("shade").addEventListener("click", () => menu(false));
$("open-settings").addEventListener("click", () => openSettings(conversation.system, settled));
$("system-line").addEventListener("click", () => openSettings(conversation.system, settled));
$("settings-cancel").addEventListener("click", () => $("settings").close());
$("models").addEventListener("change", (event) => { history.saveSettings({ ...history.settings(), model: event.target.value }); describe(); });
$("export").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([history.exported()], { type: "application/json" }));
  el("a", { href: url, download: `pyspec-conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
});
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async (event) => {
  try { notice(`${count(history.imported(await event.target.files[0].text()), "conversation")} added.`); } catch (error) { notice(error.message); }
  event.target.value = "";
  drawList();
});
$("scroll").addEventListener("scroll", ({ target }) => {
  sticks = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
  $("to-end").hidden = sticks;
});
$("to-end").addEventListener("click", () => { sticks = true; $("scroll").scrollTo({ top: $("scroll").scrollHeight }); });
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (document.body.classList.contains("menu-open")) { menu(false); $("menu").focus(); } else if (!event.target.closest?.(".edited")) runs.get(conversation.id)?.abort.abort();
});
addEventListener("storage", drawList); // another tab has saved
addEventListener("pagehide", () => { for (const run of runs.values()) { run.message.finish = "stopped"; history.save(run.conversation); } });

$("examples").append(...EXAMPLES.map((text) => el("button", { type: "button", click: () => { $("prompt").value = text; send(); } }, text)));
conversation = history.load(location.hash.slice(1)) ?? conversation;
draw(true);
describe();
focusPrompt();
