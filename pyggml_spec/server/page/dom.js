// Small helpers of both pages. Texts enter them as text nodes.

export const $ = (id) => document.getElementById(id);

/** An element. Attributes that are functions listen to the event of that name; false and undefined ones are left out, and so are such children. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== false && child !== undefined));
  return made;
}

export function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  return made;
}

/** A symbol of the page. */
export function icon(name) {
  const made = svg("svg", { class: "icon", "aria-hidden": "true" });
  made.append(svg("use", { href: "#i-" + name }));
  return made;
}

/** A button that shows a symbol only. */
export const iconButton = (name, label, click, more = {}) =>
  el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click, ...more }, icon(name));

export const number = (value, digits = 1) =>
  value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export const speed = (value) => number(value, value < 100 ? 1 : 0);

export const count = (n, noun) => `${number(n, 0)} ${noun}${n === 1 ? "" : "s"}`;

/** Copies text, also where the page came by plain HTTP from another machine and has no clipboard. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = el("textarea", { class: "visually-hidden" });
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

/** A button that copies what `text` returns, and says that it did. */
export function copyButton(text, label, content) {
  const made = el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click: async () => {
    await copy(text());
    made.replaceChildren(icon("check"), ...(content ? ["Copied"] : []));
    setTimeout(() => made.replaceChildren(icon("copy"), ...(content ? [content] : [])), 1500);
  } }, icon("copy"), content ?? false);
  return made;
}
