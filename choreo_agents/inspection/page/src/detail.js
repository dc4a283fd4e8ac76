// The chosen message: what it says, what it cost, its view to scale, and who has influenced it.
import { count, el, percent, seconds, svg, table } from "./dom.js";
import { influences, named, viewOf, waitedFor } from "./record.js";

const WIDTH = 520, ROW = 26;

export function detail(record, run, call) {
  const message = record.messages.get(call.answer);
  return [
    el("h2", null, call.author, el("small", null, ` superstep ${call.superstep}${call.branch ? `, branch ${call.branch + 1}` : ""}${call.call ? `, call ${call.call + 1}` : ""}`)),
    el("blockquote", { class: call.text === null ? "masked" : null }, call.text ?? "masked: the recording keeps no words of it"),
    call.thought ? el("p", { class: "note" }, "It was thought out first; thoughts are not shown.") : null,
    facts(run, call, message),
    el("h3", null, "Its view, to scale"),
    drawnView(record, call),
    el("h3", null, "Who has influenced it"),
    influence(record, call),
  ];
}

function facts(run, call, message) {
  const waited = waitedFor(run, call);
  const first = call.first_token_s === null ? null : call.first_token_s - call.submitted_s;
  const rows = [
    ["encoded for it", count(call.tokens_encoded)],
    ["reused", `${count(call.tokens_reused)} (${percent(call.tokens_reused, call.tokens_encoded + call.tokens_reused + call.tokens_recomputed)})`],
    ["computed again", count(call.tokens_recomputed)],
    ["said", `${count(call.sampled)} tokens${call.finish_reason ? `, then ${call.finish_reason}` : ""}`],
    ["first token after", seconds(first)],
    ["in all", seconds(call.finished_s - call.submitted_s)],
    ["waited for", waited.last ? `${waited.last.who}, the last of the superstep before` : "nobody"],
    ["served beside", waited.beside.length ? waited.beside.join(", ") : "nobody"],
    message?.confidential ? ["marked", "confidential"] : null,
  ].filter(Boolean);
  return el("dl", null, rows.map(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
}

function drawnView(record, call) {
  const view = viewOf(record, call);
  if (!view.length) return el("p", { class: "note" }, "It reads nothing but its own header.");
  const whole = Math.max(call.position + call.header_tokens + call.sampled, ...view.map((each) => Math.max(each.at, each.stood) + each.tokens), 1);
  const x = (position) => 4 + (position / whole) * (WIDTH - 8);
  const box = (each, at, y) => svg("rect", { x: x(at), y, width: Math.max(1.5, x(at + each.tokens) - x(at) - 0.5), height: ROW - 8, class: `way ${each.way.replace(/\W/g, "-")}` }, svg("title", null, `${each.author}: ${count(each.tokens)} tokens, ${each.way}`));
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${4 * ROW + 12}`, class: "scale", role: "img", "aria-label": "Where messages stand in its view, above, and where they stood when they were encoded, below; the table says the same" },
    svg("text", { x: 4, y: 12, class: "tick" }, `where they stand, 0 to ${count(whole)}`),
    view.map((each) => box(each, each.at, ROW - 8)),
    svg("rect", { x: x(call.position), y: ROW - 8, width: Math.max(2, x(call.position + call.header_tokens + call.sampled) - x(call.position)), height: ROW - 8, class: "way said" }, svg("title", null, "what it says")),
    view.map((each) => svg("line", { x1: x(each.at + each.tokens / 2), x2: x(each.stood + each.tokens / 2), y1: 2 * ROW - 14, y2: 3 * ROW - 8, class: "moved" })),
    view.map((each) => box(each, each.stood, 3 * ROW - 8)),
    svg("text", { x: 4, y: 4 * ROW + 8, class: "tick" }, "where they stood when they were encoded"));
  const rows = view.map((each) => ({ props: { "data-way": each.way }, cells: { ...each, at: count(each.at), stood: count(each.stood), tokens: count(each.tokens), words: wordsOf(record, each.name) } }));
  const columns = [{ key: "author", name: "whose" }, { key: "way", name: "how" }, { key: "tokens", name: "tokens", number: true }, { key: "at", name: "at", number: true }, { key: "stood", name: "stood", number: true }, { key: "words", name: "words" }];
  return [drawing, table("What it reads, in order", columns, rows, { class: "small" })];
}

const SHOWN = 60;
function wordsOf(record, name) {
  const words = record.wordsOf(name);
  if (words === null) return "–";
  return words.length > SHOWN ? `${words.slice(0, SHOWN)}…` : words;
}

function influence(record, call) {
  const found = influences(record, call.answer);
  if (!found.length) return el("p", { class: "note" }, "Nobody but itself.");
  const rows = found.map((each) => ({ cells: {
    author: named(each.author),
    channel: each.channel === "encoding" ? "encodings" : "words alone",
    path: [...each.path.map((hop) => named(hop.source)), call.author].join(" → "),
    cut: each.cut ? `${named(each.cut.source)} → ${each.cut.reader}` : "no single edge",
  } }));
  const columns = [{ key: "author", name: "who" }, { key: "channel", name: "through" }, { key: "path", name: "shortest way" }, { key: "cut", name: "cut by" }];
  return table("Authors behind it, by either channel", columns, rows, { class: "small" });
}
