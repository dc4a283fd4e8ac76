// The other views: all messages, edges, memory, and two runs side by side.
import uPlot from "uplot";
import { count, el, percent, seconds, table } from "./dom.js";
import { compared, edgesOf, growthOf, named } from "./record.js";

export function messagesView(record, run, choose, keys) {
  const calls = keys === null ? run.calls : run.calls.filter((call) => keys.has(call.key));
  const columns = [{ key: "who", name: "who" }, { key: "superstep", name: "superstep", number: true }, { key: "read", name: "read", number: true }, { key: "encoded", name: "encoded", number: true }, { key: "reused", name: "reused", number: true }, { key: "recomputed", name: "again", number: true }, { key: "first", name: "first token", number: true }, { key: "words", name: "words" }];
  const rows = calls.map((call) => ({
    props: { "data-key": call.key },
    cells: {
      who: el("button", { type: "button", onclick: () => choose(call) }, call.author),
      superstep: call.superstep, read: count(call.view_tokens), encoded: count(call.tokens_encoded), reused: count(call.tokens_reused), recomputed: count(call.tokens_recomputed),
      first: seconds(call.first_token_s === null ? null : call.first_token_s - call.submitted_s),
      words: call.text === null ? el("em", null, "masked") : call.text.length > 120 ? `${call.text.slice(0, 120)}…` : call.text,
    },
  }));
  const functions = run.nodes.map((node) => ({ cells: { node: node.node, step: node.step, took: seconds(node.ended_s - node.began_s), outcome: node.outcome } }));
  return [
    el("p", null, "Input: ", run.input === null ? el("em", null, "masked, or not written") : el("q", null, run.input)),
    table(`${count(calls.length)} calls of agents`, columns, rows),
    functions.length ? table("Functions, tools and models of others", [{ key: "node", name: "node" }, { key: "step", name: "step", number: true }, { key: "took", name: "took", number: true }, { key: "outcome", name: "outcome" }], functions) : null,
  ];
}

export function edgesView(record, run) {
  const edges = edgesOf(record, run);
  const columns = [{ key: "edge", name: "from → to" }, { key: "label", name: "declared" }, { key: "reads", name: "reads", number: true }, { key: "shared", name: "read as encoded", number: true }, { key: "again", name: "encoded again", number: true }, { key: "saved", name: "not encoded again", number: true }];
  const rows = edges.map((edge) => ({ cells: { edge: `${edge.source} → ${edge.reader}`, label: edge.label ?? "", reads: count(edge.reads), shared: count(edge.shared), again: count(edge.again), saved: percent(edge.shared, edge.shared + edge.again) } }));
  return [table("What each edge saves and costs, in tokens", columns, rows),
    el("p", { class: "note" }, "Read as encoded: tokens of the source's own KV, counted at each read; the first read may have encoded them. Encoded again: words of the source that were encoded for this reader, counted once.")];
}

const TIERS = [["device_bytes", "on the device", "#3b7dd8"], ["host_bytes", "on the host", "#e08e0b"], ["disk_bytes", "on disk", "#7a7a7a"]];

const AUTHORS = ["#3b7dd8", "#e08e0b", "#2c9a5b", "#b04fc4", "#c43c3c", "#7a7a7a"];

export function memoryView(record, run) {
  const lines = record.memory;
  const authors = new Map();
  for (const message of record.messages.values()) {
    const held = authors.get(named(message.author)) ?? { messages: 0, tokens: 0 };
    held.messages += 1;
    held.tokens += message.tokens;
    authors.set(named(message.author), held);
  }
  const rows = [...authors].sort((a, b) => b[1].tokens - a[1].tokens).map(([author, held]) => ({ cells: { author, messages: count(held.messages), tokens: count(held.tokens), bytes: count(held.tokens * record.bytesPerToken) } }));
  const holder = el("div", { class: "plot", role: "img", "aria-label": "Bytes of KV by tier, over time; the table says how it ended" });
  const last = lines.at(-1);
  const tiers = last ? table("KV memory by tier, at the end", [{ key: "tier", name: "tier" }, { key: "bytes", name: "bytes", number: true }], TIERS.map(([key, name]) => ({ cells: { tier: name, bytes: count(last[key]) } }))) : el("p", { class: "note" }, "The recording does not say how much memory was held.");
  const growth = growthOf(record);
  const final = growth.tokens.map((sums) => sums.at(-1) ?? 0);
  const grown = el("div", { class: "plot", role: "img", "data-tokens": final.reduce((a, b) => a + b, 0), "aria-label": `Bytes of KV of what was read and said, by author, over time; at the end ${growth.authors.map((author, i) => `${author} ${count(final[i] * record.bytesPerToken)}`).join(", ")}` });
  const plot = (holder, times, series) => {
    if (times.length < 2) return;
    const axis = { stroke: getComputedStyle(document.body).color, grid: { stroke: "#8884", width: 1 } };
    new uPlot({ width: Math.max(320, holder.clientWidth), height: 240, scales: { x: { time: false } }, legend: { live: false }, axes: [{ ...axis, label: "seconds" }, { ...axis, label: "MiB" }], series: [{ label: "s" }, ...series.map(([label, stroke]) => ({ label, stroke, width: 2, paths: uPlot.paths.stepped({ align: 1 }) }))] }, [times, ...series.map(([, , bytes]) => bytes.map((each) => each / 2 ** 20))], holder);
  };
  const draw = () => {
    plot(holder, lines.map((line) => line.at_s), TIERS.map(([key, label, stroke]) => [label, stroke, lines.map((line) => line[key])]));
    plot(grown, growth.times, growth.authors.map((author, i) => [author, AUTHORS[i], growth.tokens[i].map((sum) => sum * record.bytesPerToken)]));
  };
  return { nodes: [holder, tiers, el("h3", null, "By author, over time: what was read and said"), grown, table("What was recorded, by author", [{ key: "author", name: "author" }, { key: "messages", name: "messages", number: true }, { key: "tokens", name: "tokens", number: true }, { key: "bytes", name: "bytes of KV", number: true }], rows)], draw };
}

export function comparedView(record, one, other, choose) {
  const rows = compared(one, other).map((row) => {
    const call = row.one ?? row.other;
    const shown = (each) => (each === null ? el("em", null, "not made") : each.text === null ? el("em", null, "masked") : each.text);
    const cost = (each) => (each === null ? "–" : `${count(each.tokens_encoded)} + ${count(each.tokens_reused)} reused`);
    return { props: { class: row.same ? null : "changed" }, cells: {
      who: row.one ? el("button", { type: "button", onclick: () => choose(row.one) }, call.author) : call.author,
      superstep: call.superstep, one: shown(row.one), other: row.same ? el("em", null, "the same") : shown(row.other), costs: cost(row.one), theirs: cost(row.other) } };
  });
  const changed = rows.filter((row) => row.props.class).length;
  return [
    el("p", null, `${one.title} beside ${other.title}: ${count(changed)} of ${count(rows.length)} calls differ. Encoded: ${count(one.totals.encoded)} and ${count(other.totals.encoded)} tokens.`),
    table("Call by call", [{ key: "who", name: "who" }, { key: "superstep", name: "superstep", number: true }, { key: "one", name: one.title }, { key: "other", name: other.title }, { key: "costs", name: "encoded", number: true }, { key: "theirs", name: "encoded there", number: true }], rows, { class: "beside" }),
  ];
}
