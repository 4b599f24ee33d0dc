// Makes elements without markup in strings: any content of a name or an answer stays text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value; // a property, which update() can copy
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const HANDLERS = ["onclick", "onkeydown", "onchange"];

// Gives an element these children, and changes only what differs, so that a pressed button, the focus and the scroll
// position of a list are kept. Children with a data-key are matched by it, others by their position.
export function update(element, ...children) {
  const next = children.flat().filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : document.createTextNode(child)));
  const keyed = new Map([...element.childNodes].filter((child) => child.dataset?.key).map((child) => [child.dataset.key, child]));
  const wanted = new Set(next.map((child) => child.dataset?.key));
  for (const [key, child] of keyed) if (!wanted.has(key)) child.remove();
  let at = element.firstChild;
  for (const child of next) {
    const key = child.dataset?.key;
    const old = key ? keyed.get(key) : at?.dataset?.key ? null : at;
    if (!old) element.insertBefore(child, at);
    else {
      if (old !== at) element.insertBefore(old, at);
      const kept = change(old, child);
      at = kept.nextSibling;
    }
  }
  while (at) {
    const { nextSibling } = at;
    at.remove();
    at = nextSibling;
  }
}

// Makes the old node equal to the next one, or replaces it. Returns the node that is now in the document.
function change(old, next) {
  if (old === next) return old;
  if (old.nodeName !== next.nodeName) {
    old.replaceWith(next);
    return next;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return old;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const name of HANDLERS) old[name] = next[name];
  update(old, ...next.childNodes);
  return old;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(number) {
  let unit = 0;
  while (Math.abs(number) >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit ? number.toFixed(1) : Math.round(number)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? Math.round(value).toLocaleString("en") : String(Math.round(value * 10) / 10);
}

// Describes a tier of KV blocks, such as "12 of 64 blocks, 320 tokens found there".
export function tierText(tier) {
  const size = tier.num_blocks === null ? "" : ` of ${count(tier.num_blocks)}`;
  const hits = tier.num_hit_tokens === null ? "" : `, ${count(tier.num_hit_tokens)} prompt tokens found there`;
  const load = tier.token_s === null ? "" : `, ${seconds(1000 * tier.token_s)} to load 1,000 tokens`;
  return `${count(tier.num_used_blocks)}${size} blocks${hits}${load}`;
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString([], { hourCycle: "h23" });

export function table(headings, rows, caption) {
  return h(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows.map((row) => h("tr", { "data-key": row[0] instanceof Node ? row[0].textContent : null }, row.map((cell) => h("td", {}, cell)))))),
  );
}

// Shows the parts of a text between backticks as code.
export const withCode = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
