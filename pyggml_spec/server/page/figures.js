// Figures of one generation, and what was drafted: for both pages.

import { count, el, number, speed } from "./dom.js";

/** What is kept of a stream's last event. */
export function kept({ timings, speculation }, seconds) {
  const { cache_n, prompt_n, prompt_ms, predicted_n, predicted_per_second, draft_n, draft_n_accepted, tokens_per_step, queued_ms } = timings;
  const { offered_at, accepted_at, reason, drafters } = speculation;
  return {
    cache_n, prompt_n, prompt_ms, predicted_n, predicted_per_second, draft_n, draft_n_accepted, tokens_per_step, queued_ms, offered_at, accepted_at, reason,
    drafters: Object.keys(drafters), seconds,
  };
}

export const accepted = (f) => (f.draft_n ? `${f.draft_n_accepted} of ${f.draft_n} (${number((100 * f.draft_n_accepted) / f.draft_n)} %)` : "none were made");

/** Rows of a table: position, accepted, offered, share. */
export function positions(f) {
  return f.offered_at.map((offered, i) => {
    const share = offered ? f.accepted_at[i] / offered : 0;
    const bar = el("progress", { max: 1, value: share, "aria-hidden": "true" });
    return el("tr", {}, ...[i + 1, f.accepted_at[i], offered].map((n) => el("td", {}, String(n))), el("td", {}, bar, number(100 * share) + " %"));
  });
}

/** The texts of one step: accepted draft tokens, rejected ones, the target's own. */
export function pieces({ tokens, drafts, accepted: taken }) {
  const texts = { accepted: tokens.slice(0, taken), rejected: drafts.slice(taken), own: tokens.slice(taken) };
  return Object.entries(texts).filter(([, list]) => list.join("")).map(([kind, list]) => {
    const text = list.join("");
    return el(kind === "rejected" ? "del" : "span", { class: kind }, kind === "rejected" ? text.replaceAll("\n", "\u23ce") : text);
  });
}

/** The panel below an answer. `steps`: what was drafted, undefined where the page was loaded anew since. */
export function panel(f, steps) {
  const rows = {
    Speed: `${speed(f.predicted_per_second)} tokens per second`,
    "Tokens per step": number(f.tokens_per_step, 2),
    "Drafts accepted": accepted(f) + (f.drafters.length ? `, by ${f.drafters.join(" and ")}` : ""),
    Answer: `${count(f.predicted_n, "token")} in ${number(f.seconds)} s`,
    Prompt: `${count(f.prompt_n, "token")} computed in ${number(f.prompt_ms, 0)} ms, ${number(f.cache_n, 0)} reused`,
    ...(f.queued_ms >= 1 ? { "Waited in the queue": `${number(f.queued_ms, 0)} ms` } : {}),
  };
  const made = el("div", { class: "figures" });
  made.append(el("dl", {}, ...Object.entries(rows).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  if (!f.draft_n) {
    made.append(el("p", { class: "note" }, f.reason + "."));
    return made;
  }
  const head = el("tr", {}, ...["Draft position", "Accepted", "Offered", "Share"].map((name) => el("th", { scope: "col" }, name)));
  made.append(el("p", { class: "note" }, f.reason + "."),
    el("details", {}, el("summary", {}, "Acceptance by position"), el("table", {}, el("thead", {}, head), el("tbody", {}, ...positions(f)))));
  if (steps) {
    const legend = el("p", { class: "note" }, el("span", { class: "accepted" }, "accepted"), " draft, ", el("span", {}, "the target's own token"), ", ", el("del", { class: "rejected" }, "rejected"), " draft");
    const text = el("div", { class: "drafts", tabindex: "0", role: "group", "aria-label": "What was drafted" });
    const details = el("details", { toggle: () => { if (details.open && !text.childNodes.length) text.append(...steps.flatMap(pieces)); } },
      el("summary", {}, "What was drafted"), legend, text);
    made.append(details);
  }
  return made;
}
