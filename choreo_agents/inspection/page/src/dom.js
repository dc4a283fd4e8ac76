// Elements, made without any markup: what is text stays text.
const SVG = "http://www.w3.org/2000/svg";

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return node;
}

export const el = (tag, props, ...children) => filled(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => filled(document.createElementNS(SVG, tag), props, children);
export const byId = (id) => document.getElementById(id);

export function table(caption, columns, rows, props = {}) {
  const head = columns.map(({ name, number }) => el("th", { scope: "col", class: number && "number" }, name));
  const body = rows.map((row) =>
    el("tr", row.props, columns.map(({ key, number }, i) =>
      el(i ? "td" : "th", { scope: i ? null : "row", class: number && "number" }, row.cells[key] ?? ""))));
  return el("table", props, el("caption", null, caption), el("thead", null, el("tr", null, head)), el("tbody", null, body));
}

const grouped = new Intl.NumberFormat("en");
export const count = (number) => grouped.format(number);
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
export const seconds = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${(s * 1000).toFixed(0)} ms` : `${s.toFixed(2)} s`);
