// Two views: what speculation did with one prompt, and what every slot does.

import { Failure, apiKey, events, generation, request, setApiKey } from "./api.js";
import { accepted, pieces, positions } from "./figures.js";
import { $, el, number, svg } from "./dom.js";

const BAR = 7, GAP = 2, HEIGHT = 84, MOST_BARS = 2000;
let running = null; // the AbortController of the request under way
let watching = null; // that of the slots' stream
let drafts = true; // whether anything drafts here, of what the server says

const say = (text, wrong = false) => { $("status").textContent = text; $("status").classList.toggle("error", wrong); };

/** What to say of an error; one for the lack of a key shows its field. */
function sentence(error) {
  if (error instanceof Failure && error.status === 401) $("key-row").hidden = false;
  return error.message;
}

// -- one prompt

function asked(speculative) {
  const chat = $("kind").value === "chat", prompt = $("prompt").value;
  const body = {
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number($("tokens").value), temperature: Number($("temperature").value), seed: 1, speculative,
  };
  return [chat ? "v1/chat/completions" : "v1/completions", body];
}

class Steps {
  constructor() { this.count = 0; this.tokens = 0; this.most = 4; this.all = []; $("bars").replaceChildren(); }

  add(tokens, width) {
    this.count += 1;
    this.tokens += tokens;
    if (this.count > MOST_BARS) return;
    this.all.push([tokens, width]);
    const before = this.most;
    this.most = Math.max(this.most, width, tokens);
    if (this.most !== before) { $("bars").replaceChildren(); this.all.forEach(([t, w], i) => this.draw(i, t, w)); } else this.draw(this.all.length - 1, tokens, width);
    $("bars").setAttribute("width", String(this.all.length * (BAR + GAP)));
    $("bars").setAttribute("aria-label", `${this.count} steps gave ${this.tokens} tokens; the last one gave ${tokens} of ${width} rows`);
    $("bars-box").scrollLeft = $("bars-box").scrollWidth;
  }

  draw(i, tokens, width) {
    const unit = HEIGHT / this.most;
    for (const [name, rows] of [["tokens", tokens], ["width", width]]) {
      $("bars").append(svg("rect", { x: i * (BAR + GAP) + 0.5, y: HEIGHT - rows * unit + 2.5, width: BAR - 1, height: rows * unit, class: name }));
    }
  }
}

function show(step, steps) {
  const box = $("answer"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  box.append(...pieces(step));
  if (steps.first) steps.add(step.tokens.length, step.drafts.length + 1); // the first token comes with the prompt
  steps.first = true;
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function figures({ timings: t, speculation: s }, steps) {
  $("f-tokens").textContent = String(t.predicted_n);
  $("f-steps").textContent = String(steps.count);
  $("f-per-step").textContent = number(t.tokens_per_step, 2);
  $("f-accepted").textContent = accepted(t);
  $("f-speed").textContent = `${number(t.predicted_per_second)} tokens per second`;
  $("f-prompt").textContent = `${t.prompt_n} tokens computed, ${t.cache_n} reused, ${number(t.prompt_ms)} ms`;
  $("f-reason").textContent = s.reason;
  $("positions").tBodies[0].replaceChildren(...positions(s));
}

async function generate() {
  const began = performance.now(), steps = new Steps(), speculative = drafts && $("speculative").checked;
  running = new AbortController();
  $("go").disabled = true;
  $("stop").disabled = false;
  $("answer").replaceChildren();
  $("answer").setAttribute("aria-busy", "true");
  for (const id of ["f-tokens", "f-steps", "f-per-step", "f-accepted", "f-speed", "f-plain", "f-gain", "f-prompt", "f-reason"]) $(id).textContent = "-";
  say("waiting for the first token");
  try {
    const [path, body] = asked(speculative);
    let end = null;
    for await (const event of generation(path, { ...body, speculation: true }, running.signal)) {
      if (event.speculation?.tokens) {
        show(event.speculation, steps);
        say(`${steps.tokens + 1} tokens in ${steps.count} steps`);
      }
      if (event.timings) end = event;
    }
    figures(end, steps);
    const took = number((performance.now() - began) / 1000);
    say(`${end.timings.predicted_n} tokens in ${steps.count} steps, ${took} s`);
    $("answer").setAttribute("aria-busy", "false");
    if (!end.timings.draft_n) $("f-plain").textContent = "this run was plain: nothing was drafted";
    else if ($("compare").checked) await compare(end);
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else say(sentence(error), true);
  } finally {
    running = null;
    $("answer").setAttribute("aria-busy", "false");
    $("go").disabled = false;
    $("stop").disabled = true;
  }
}

async function compare(end) {
  const said = $("status").textContent;
  say(said + "; now plainly");
  const [path, body] = asked(false), response = await request(path, { body, signal: running.signal });
  const plain = (await response.json()).timings, speed = end.timings.predicted_per_second;
  $("f-plain").textContent = `${number(plain.predicted_per_second)} tokens per second`;
  $("f-gain").textContent = plain.predicted_per_second ? `${number(speed / plain.predicted_per_second, 2)} times` : "-";
  say(said);
}

// -- all slots

async function watch() {
  watching = new AbortController();
  $("s-speed").classList.remove("error");
  try {
    const response = await request("pyspec/live", { signal: watching.signal });
    for await (const state of events(response)) {
      $("s-speed").textContent = number(state.tokens_per_second);
      $("s-waiting").textContent = String(state.waiting);
      $("s-wait").textContent = number(state.longest_wait_ms) + " ms";
      $("s-prefix").textContent = number(state.prefix_bytes / 1048576) + " MiB";
      $("slots").tBodies[0].replaceChildren(...state.slots.map((slot) => {
        const row = el("tr"), idle = slot.phase === "idle";
        const cells = [slot.id, slot.phase, idle ? "" : `${slot.prompt_read} of ${slot.prompt_tokens}`, idle ? "" : slot.reused, idle ? "" : slot.emitted,
          idle ? "" : number(slot.tokens_per_step, 2), idle ? "" : number(slot.tokens_per_second)];
        cells.forEach((text, i) => {
          const cell = row.insertCell();
          cell.textContent = String(text);
          cell.dataset.name = $("slots").tHead.rows[0].cells[i].textContent;
        });
        return row;
      }));
    }
    $("s-speed").textContent = "the server ends";
  } catch (error) {
    if (error.name === "AbortError") return;
    $("s-speed").textContent = sentence(error);
    $("s-speed").classList.add("error");
  }
}

// -- views

const TABS = ["generate", "slots"];

function view(name, focus) {
  for (const tab of TABS) {
    const on = tab === name;
    $("tab-" + tab).setAttribute("aria-selected", String(on));
    $("tab-" + tab).tabIndex = on ? 0 : -1;
    $("view-" + tab).hidden = !on;
    if (on && focus) $("tab-" + tab).focus();
  }
  if (watching) watching.abort();
  watching = null;
  if (name === "slots") watch();
}

async function describe() {
  try {
    const props = await (await request("props")).json();
    if (!props.pyspec) {
      $("model").textContent = "no model is loaded: a message in the chat loads one";
      return;
    }
    const p = props.pyspec;
    const methods = props.default_generation_settings.params["speculative.types"].split(",");
    const ngram = methods.filter((name) => /^(suffix|ngram)/.test(name)).map((name) => `n-gram drafting (${name})`);
    const drafter = [...(p.drafter ? [`drafter ${p.drafter}`] : []), ...ngram].join(" and ") || "nothing drafts: plain decoding";
    drafts = methods[0] !== "none";
    for (const id of ["speculative", "compare"]) $(id).closest("label").hidden = !drafts;
    $("legend").hidden = $("positions-box").hidden = !drafts;
    $("model").classList.remove("error");
    $("model").textContent = `${props.model_alias}, ${drafter}, ${p.device}, ${props.total_slots} slot${props.total_slots > 1 ? "s" : ""} of ${props.default_generation_settings.n_ctx} tokens`;
  } catch (error) {
    $("model").textContent = sentence(error);
    $("model").classList.add("error");
  }
}

for (const [i, tab] of TABS.entries()) {
  $("tab-" + tab).addEventListener("click", () => view(tab, false));
  $("tab-" + tab).addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move) view(TABS[(i + move + TABS.length) % TABS.length], true);
  });
}
$("ask").addEventListener("submit", (event) => { event.preventDefault(); if (!running) generate(); });
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit(); });
$("stop").addEventListener("click", () => { if (running) running.abort(); });
$("show-rejected").addEventListener("change", (event) => $("answer").classList.toggle("no-rejected", !event.target.checked));
$("key").value = apiKey();
$("key").addEventListener("change", () => { setApiKey($("key").value); describe(); });
describe();
