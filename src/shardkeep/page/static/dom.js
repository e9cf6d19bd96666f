// Elements. Text is always text, never markup, so log lines and settings cannot add elements or scripts.

// h("td.num", {title: "x"}, "text", node): an element with classes, attributes and children.
export function h(name, ...parts) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  element.classList.add(...classes);
  for (const part of parts.flat(3)) {
    if (part == null || part === false) continue;
    if (part instanceof Node || typeof part !== "object") element.append(part);
    else for (const [key, value] of Object.entries(part)) set(element, key, value);
  }
  return element;
}

function set(element, key, value) {
  if (value == null || value === false) return;
  if (key === "style") Object.entries(value).forEach(([name, one]) => element.style.setProperty(name, one));
  else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else element.setAttribute(key, value === true ? "" : value);
}

const open = new Map();

// A part that is folded away; whether it is open outlives the next drawing.
export function fold(key, summary, ...content) {
  const details = h("details.fold", { "data-key": key }, h("summary", { "data-key": `${key} summary` }, summary), ...content);
  details.open = open.get(key) ?? false;
  details.addEventListener("toggle", () => open.set(key, details.open));
  return details;
}

// A table that scrolls sideways in its own box. Columns: {name, text: row => node, num: bool, note, screen: bool}. A note explains its column below; `screen`: not on paper.
export function table(key, caption, columns, rows, { most = 12, of = "rows" } = {}) {
  const kind = (tag, c) => `${tag}${c.num ? ".num" : ""}${c.screen ? ".screen" : ""}`;
  const draw = (shown, key, caption) =>
    h("div.scroll", { tabindex: 0, role: "region", "aria-label": caption, "data-key": key },
      h("table",
        h("caption.hidden", caption),
        h("thead", h("tr", columns.map((c) => h(kind("th", c), { scope: "col" }, c.name)))),
        h("tbody", shown.map((row) => h("tr", row.mark ? { class: row.mark } : null, columns.map((c, at) => {
          const content = c.text(row);
          return at ? h(kind("td", c), content) : h("th", { scope: "row" }, content);
        }))))));
  const rest = rows.slice(most);
  const whole = [draw(rest.length > 2 ? rows.slice(0, most) : rows, key, caption)];
  const notes = columns.filter((c) => c.note);
  if (notes.length) whole.push(h("p.about.notes", notes.map((c) => h("span", h("b", c.name), `: ${c.note}. `))));
  if (rest.length > 2) whole.push(fold(`${key} rest`, `Show ${rest.length} more ${of}`, draw(rest, `${key} more`, `${caption}, the rest`)));
  return whole;
}

export function bar(share, kind = "") {
  return h("span.meter", { "aria-hidden": "true" }, h(`span${kind ? `.${kind}` : ""}`, { style: { width: `${Math.min(100, Math.max(0, 100 * share))}%` } }));
}

// "4 s ago", kept up to date by `tick` of page.js.
export function ago(at) {
  return at == null ? "–" : h("time", { "data-at": at, title: new Date(1000 * at).toISOString() }, "");
}
