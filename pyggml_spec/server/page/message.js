// One message of a conversation as elements. `act` has the functions of the page that its buttons call.

import { panel } from "./figures.js";
import { copyButton, count, el, icon, iconButton, number, speed } from "./dom.js";
import { codeBlock, render } from "./markdown.js";

const LONG = 1200; // characters of a message of the user, above which its end is folded
const MOST_STEPS = 40_000; // of all answers, whose drafts are kept while the page is open
const steps = new Map(); // by message

export function keepSteps(message, taken) {
  steps.set(message.id, taken);
  while ([...steps.values()].reduce((sum, one) => sum + one.length, 0) > MOST_STEPS && steps.size > 1) steps.delete(steps.keys().next().value);
}

/** `‹ 2 / 3 ›`, where a message has versions. */
function versionButtons(message, all, act) {
  if (all.length < 2) return false;
  const at = all.indexOf(message);
  const to = (i, name, label) => iconButton(name, label, () => act.choose(all[i]), { disabled: !all[i] });
  return el("span", { class: "versions", role: "group", "aria-label": "Versions" },
    to(at - 1, "left", "Previous version"), el("span", {}, `${at + 1} / ${all.length}`), to(at + 1, "right", "Next version"));
}

export function userView(message, all, act) {
  const images = (message.images ?? []).map((url, i) => el("img", { src: url, alt: `Image ${i + 1} of this message` }));
  const bubble = el("div", { class: "bubble" }, ...(images.length ? [el("div", { class: "images" }, ...images)] : []), el("div", { class: "said" }, message.text));
  const actions = el("div", { class: "actions" },
    versionButtons(message, all, act), iconButton("edit", "Edit message", edit), copyButton(() => message.text, "Copy message"));
  const made = el("article", { class: "message user", "aria-label": "You" }, bubble, actions);
  if (message.text.length > LONG || message.text.split("\n").length > LONG / 100) {
    made.classList.add("long");
    const all = el("button", { type: "button", class: "icon-button", "aria-expanded": "false", click: () => {
      all.textContent = made.classList.toggle("long") ? "Show all" : "Show less";
      all.setAttribute("aria-expanded", String(!made.classList.contains("long")));
    } }, "Show all");
    bubble.append(all);
  }

  function edit() {
    const box = el("textarea", { "aria-label": "Edited message", rows: Math.min(12, message.text.split("\n").length + 1) });
    box.value = message.text;
    const send = () => { if (box.value.trim()) act.edit(message, box.value.trim()); };
    const cancel = () => { form.replaceWith(bubble); actions.hidden = false; actions.querySelector("[aria-label='Edit message']").focus(); };
    const form = el("form", { class: "bubble edited", submit: (event) => { event.preventDefault(); send(); } }, box,
      el("div", { class: "row end" }, el("button", { type: "button", click: cancel }, "Cancel"), el("button", { type: "submit", class: "primary" }, "Send")));
    box.addEventListener("keydown", (event) => {
      if (act.sends(event)) { event.preventDefault(); send(); }
      if (event.key === "Escape") cancel();
    });
    bubble.replaceWith(form);
    actions.hidden = true;
    box.focus();
  }
  return made;
}

/** A sentence of the server's, with what stands in backticks as code. */
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

/** The card of an error, or of what ended an answer early. */
function errorCard(error, message, act) {
  const row = el("div", { class: "row" });
  const card = el("div", { class: "error-card", role: "alert" }, icon("alert"), el("div", {}, el("strong", {}, error.title), el("p", {}, ...withCode(error.text)), row));
  if (error.act === "key") {
    const field = el("input", { type: "password", autocomplete: "off", "aria-label": "API key", placeholder: "API key" });
    row.append(el("form", { class: "row", submit: (event) => { event.preventDefault(); act.key(field.value, message); } }, field, el("button", { type: "submit", class: "primary" }, "Use this key")));
    setTimeout(() => field.focus());
  }
  if (error.act === "new") row.append(el("button", { type: "button", class: "primary", click: act.create }, "New conversation"));
  if (error.act === "retry" || error.act === "new") {
    const retry = el("button", { type: "button", click: () => act.retry(message) }, "Try again");
    const wait = () => {
      const seconds = Math.ceil(((error.until ?? 0) - Date.now()) / 1000);
      retry.disabled = seconds > 0;
      retry.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
      if (seconds > 0) setTimeout(wait, 250);
    };
    wait();
    row.append(retry);
  }
  return card;
}

function callCard(call, result) {
  let given = call.arguments;
  try { given = JSON.stringify(JSON.parse(given), null, 2); } catch { /* shown as it came */ }
  return el("section", { class: "call", "aria-label": `Call of the tool ${call.name}` },
    el("div", { class: "call-head" }, icon("tool"), "Calls ", el("code", {}, call.name)), codeBlock(given, "json"),
    result ? el("div", { class: "result" }, el("span", { class: "note" }, "Result"), el("pre", { tabindex: "0" }, result.text)) : false);
}

/** Fields for the results of the calls that a message ends with. */
function resultForm(message, act) {
  const fields = message.calls.map((call) => el("textarea", { rows: "2", required: true, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returned` }));
  const submit = (event) => { event.preventDefault(); act.results(message, fields.map((field) => field.value)); };
  return el("form", { class: "results", submit }, ...fields, el("div", { class: "row end" }, el("button", { type: "submit", class: "primary" }, "Send result")));
}

/** `results`: of its tool calls, by call; `last`: whether the conversation ends with it. Its `update` shows what has changed while it comes. */
export function assistantView(message, { all, results, last, running, contextTokens }, act) {
  const thought = el("div", { class: "markdown" }), summary = el("span", {});
  const thinking = el("details", { class: "thinking" }, el("summary", {}, icon("thought"), summary), thought);
  const text = el("div", { class: "markdown" }), calls = el("div", {}), end = el("div", {}), waiting = el("p", { class: "waiting" });
  const made = el("article", { class: "message assistant", "aria-label": "Assistant" }, thinking, calls, text, waiting, end);
  let shown = 0;
  thinking.addEventListener("toggle", () => update());

  function update(state = {}) {
    const { reading, note } = state;
    made.setAttribute("aria-busy", String(running));
    made.classList.toggle("busy", running);
    thinking.hidden = !message.reasoning;
    summary.textContent = running && !message.text && !message.calls.length ? "Thinking" : message.thought >= 100 ? `Thought for ${number(message.thought / 1000)} s` : "Thought";
    if (thinking.open) render(thought, message.reasoning);
    render(text, message.text);
    waiting.hidden = !running || Boolean(message.text || message.reasoning || message.calls.length);
    waiting.textContent = note ?? (reading ? `Reading the prompt, ${Math.round(100 * reading)} %` : "Waiting for the first token");
    for (const call of message.calls.slice(shown)) calls.append(callCard(call, results?.get(call.id)));
    shown = message.calls.length;
  }

  function finish() {
    if (message.error) end.append(errorCard(message.error, message, act));
    if (last && message.finish === "tool_calls") end.append(resultForm(message, act));
    const limit = message.finish === "length", whole = message.figures ? message.figures.cache_n + message.figures.prompt_n + message.figures.predicted_n : 0;
    const full = limit && contextTokens && whole >= contextTokens - 1;
    const note = full ? `The context of ${count(contextTokens, "token")} is full. Start a new conversation, or start the server with a larger one (-c).`
      : limit ? "This answer stopped at the limit of tokens." : message.finish === "stopped" ? "Stopped." : "";
    if (note && last) {
      const go = message.text || message.reasoning;
      end.append(el("div", { class: "note row" }, note,
        full ? el("button", { type: "button", click: act.create }, "New conversation") : go ? el("button", { type: "button", click: () => act.proceed(message) }, "Continue") : false));
    }
    const f = message.figures, figures = el("button", { type: "button", class: "icon-button figures-button", "aria-expanded": "false", click: toggle }, icon("figures"));
    let open = null;
    if (f) figures.append(`${speed(f.predicted_per_second)} tokens/s`, f.draft_n ? `, ${number(f.tokens_per_step, 2)} per step` : "");
    function toggle() {
      if (open) open.remove();
      open = open ? null : panel(f, steps.get(message.id));
      if (open) made.append(open);
      open?.scrollIntoView({ block: "nearest" });
      figures.setAttribute("aria-expanded", String(Boolean(open)));
    }
    made.append(el("div", { class: "actions" }, versionButtons(message, all, act),
      message.text ? copyButton(() => message.text, "Copy answer") : false,
      iconButton("again", "Regenerate", () => act.regenerate(message)), f ? figures : false));
  }

  update();
  if (!running) finish();
  made.update = update;
  return made;
}
