// The dialog of settings: of this conversation (its system prompt), of all requests, and the API key of this tab.

import { apiKey, setApiKey } from "./api.js";
import { saveSettings, settings } from "./history.js";
import { $ } from "./dom.js";

const NUMBERS = { temperature: "set-temperature", top_p: "set-top-p", max_tokens: "set-max-tokens" };
const TEXTS = { tools: "set-tools", more: "set-more" };

/** Whether a field's JSON is right; it says what is wrong. */
function right(field, is, sentence) {
  let value = null;
  try { value = JSON.parse(field.value || "null"); } catch { value = undefined; }
  if (value === undefined || (value !== null && !is(value))) field.closest("details").open = true;
  field.setCustomValidity(value === null || (value !== undefined && is(value)) ? "" : sentence);
  return field.reportValidity();
}

/** Opens it at a field. `saved(system)` is called when it was saved. */
export function openSettings(system, saved, field = "set-system") {
  const values = settings(), dialog = $("settings");
  $("set-system").value = system;
  for (const [name, id] of Object.entries({ ...NUMBERS, ...TEXTS })) $(id).value = values[name] ?? "";
  $("set-thinking").value = values.thinking ?? "";
  $("set-speculative").checked = values.speculative !== false;
  $("set-key").value = apiKey();
  $("set-tools").closest("details").open = Boolean(values.tools || values.more);
  $("settings-form").onsubmit = (event) => {
    event.preventDefault();
    const plain = (value) => typeof value === "object" && !Array.isArray(value);
    if (!right($("set-tools"), Array.isArray, "Give a JSON list of tools, as [{\"type\": \"function\", \"function\": {\"name\": ...}}].")) return;
    if (!right($("set-more"), plain, "Give a JSON object of fields, as {\"top_k\": 20}.")) return;
    const number = (id) => ($(id).value === "" ? [] : [Number($(id).value)]);
    const made = Object.fromEntries(Object.entries(NUMBERS).flatMap(([name, id]) => number(id).map((value) => [name, value])));
    for (const [name, id] of Object.entries(TEXTS)) made[name] = $(id).value.trim();
    saveSettings({ ...values, ...made, ...Object.fromEntries(Object.keys(NUMBERS).filter((n) => !(n in made)).map((n) => [n, undefined])),
      system: $("set-system").value.trim(), thinking: $("set-thinking").value, speculative: $("set-speculative").checked });
    setApiKey($("set-key").value);
    dialog.close();
    saved($("set-system").value.trim());
  };
  dialog.showModal();
  $(field).focus();
}

/** The fields of a request that settings give. */
export function requestFields() {
  const { temperature, top_p, max_tokens, thinking, speculative, tools, more } = settings();
  return {
    ...(temperature !== undefined ? { temperature } : {}), ...(top_p !== undefined ? { top_p } : {}), ...(max_tokens !== undefined ? { max_tokens } : {}),
    ...(thinking ? { reasoning_effort: thinking } : {}), ...(speculative === false ? { speculative: false } : {}),
    ...(tools ? { tools: JSON.parse(tools) } : {}), ...(more ? JSON.parse(more) : {}),
  };
}
