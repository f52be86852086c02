// A model's text as elements: marked reads the Markdown, DOMPurify keeps what is harmless, highlight.js colours code. A model may write anything.

import { Marked } from "./vendor/marked.js";
import { copyButton, el } from "./dom.js";

const ALIASES = {
  "c++": "cpp", cs: "csharp", "c#": "csharp", golang: "go", html: "xml", js: "javascript", jsx: "javascript", kt: "kotlin", make: "makefile", mjs: "javascript", py: "python",
  rb: "ruby", rs: "rust", sh: "bash", shell: "bash", svg: "xml", toml: "ini", ts: "typescript", tsx: "typescript", yml: "yaml", zsh: "bash",
};
const LANGUAGES = new Set([
  "bash", "c", "cpp", "csharp", "css", "diff", "go", "ini", "java", "javascript", "json", "kotlin", "lua", "makefile", "php", "python", "ruby", "rust", "sql", "swift",
  "typescript", "xml", "yaml",
]);
const MOST_COLOURED = 100_000; // characters of one block
const PLAIN_TAGS = /^<\/?(?:br|sub|sup|kbd|b|i|em|strong|u|s)\s*\/?>$/i; // of HTML that models write in prose; other HTML is shown as text
const RULES = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "kbd", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup",
    "table", "tbody", "td", "th", "thead", "tr", "u", "ul",
  ],
  ALLOWED_ATTR: ["alt", "align", "class", "href", "src", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (PLAIN_TAGS.test(text.trim()) ? text : escaped(text)),
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
    image: ({ href, text }) => // one from elsewhere would tell that site who reads this
      (/^data:image\//i.test(href) ? `<img src="${escaped(href)}" alt="${escaped(text)}">` : `<a href="${escaped(href)}">${escaped(text || href)} (image, not loaded)</a>`),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

const harmless = (html) => DOMPurify.sanitize(html, RULES);

// -- colours

let core = null; // highlight.js, once it is needed
const known = new Map(); // languages that are loaded, or load

function loaded(name) {
  if (!known.has(name)) {
    core ??= import("./vendor/highlight.js").then((module) => module.default);
    known.set(name, Promise.all([core, import(`./vendor/languages/${name}.js`)]).then(([highlighter, language]) => {
      highlighter.registerLanguage(name, language.default);
      known.set(name, highlighter);
      return highlighter;
    }));
  }
  return known.get(name);
}

/** Colours an element's code; where its language still loads, later. */
function colour(code, language) {
  const name = ALIASES[language] ?? language;
  if (!LANGUAGES.has(name) || code.textContent.length > MOST_COLOURED) return;
  const paint = (highlighter) => code.replaceChildren(harmless(highlighter.highlight(code.textContent, { language: name, ignoreIllegals: true }).value));
  const highlighter = loaded(name);
  if (highlighter instanceof Promise) highlighter.then(paint, () => known.delete(name));
  else paint(highlighter);
}

/** A block of code, with its language and a button that copies it. Its `show` replaces the text. */
export function codeBlock(text, language) {
  const code = el("code"), name = language.toLowerCase();
  const head = el("div", { class: "code-head" }, el("span", {}, name || "text"), copyButton(() => code.textContent, "Copy code", "Copy"));
  const made = el("div", { class: "code" }, head, el("pre", { tabindex: "0", role: "group", "aria-label": `${name || "text"} code` }, code));
  made.show = (shown) => {
    code.textContent = shown;
    colour(code, name);
  };
  made.show(text);
  return made;
}

function block(token) {
  if (token.type === "code") return codeBlock(token.text, (token.lang ?? "").match(/^[\w+#-]*/)[0]);
  const made = el("div", { class: "block" }, harmless(marked.parser([token])));
  for (const pre of made.querySelectorAll("pre")) { // inside of lists and quotes
    const code = pre.firstElementChild ?? pre;
    pre.replaceWith(codeBlock(code.textContent.replace(/\n$/, ""), (code.className.match(/language-([\w+#-]+)/) ?? ["", ""])[1]));
  }
  for (const table of made.querySelectorAll("table")) {
    const box = el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "table" });
    table.replaceWith(box);
    box.append(table);
  }
  return made;
}

/** Shows Markdown in an element. Blocks that are as they were stay: text that is selected, and code that is scrolled, too. */
export function render(into, text) {
  const tokens = marked.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
  tokens.forEach((token, i) => {
    const there = into.children[i];
    if (there?.source === token.raw) return;
    const grows = token.type === "code" && there?.show && there.language === token.lang, made = grows ? there : block(token);
    Object.assign(made, { source: token.raw, language: token.lang });
    if (grows) made.show(token.text);
    else if (there) there.replaceWith(made);
    else into.append(made);
  });
  while (into.children.length > tokens.length) into.lastChild.remove();
}
