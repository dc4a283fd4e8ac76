// Who spoke when: a lane for each agent and function, a bar from asking to the last token, lighter until the first one.
import { count, el, seconds, svg } from "./dom.js";

const LANE = 26, LEFT = 130, TOP = 24, WIDTH = 1000;

/** A lane for each author, and more of them where its calls ran side by side. */
function placed(run) {
  const lane = new Map();
  const rowOf = new Map();
  let lanes = 0;
  for (const author of run.authors) {
    lane.set(author, lanes);
    const free = [];
    for (const call of run.calls.filter((each) => each.author === author).sort((a, b) => a.submitted_s - b.submitted_s)) {
      let row = free.findIndex((until) => until <= call.submitted_s);
      if (row < 0) row = free.push(0) - 1;
      free[row] = call.finished_s;
      rowOf.set(call.key, lanes + row);
    }
    lanes += Math.max(1, free.length);
  }
  return { lane, lanes, rowOf };
}

export function timeline(record, run, choose) {
  const span = Math.max(run.ended - run.began, 1e-6);
  const x = (s) => LEFT + ((s - run.began) / span) * (WIDTH - LEFT - 10);
  const { lane, lanes, rowOf } = placed(run);
  const height = TOP + lanes * LANE + 8;
  const bars = new Map();
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "timeline", role: "listbox", tabindex: 0, "aria-label": "Calls in time: arrow keys go from one to the next" });
  for (const [author, row] of lane) {
    const y = TOP + row * LANE;
    chart.append(svg("line", { x1: LEFT, x2: WIDTH - 10, y1: y - 1, y2: y - 1, class: "rule" }));
    chart.append(svg("text", { x: LEFT - 8, y: y + 16, "text-anchor": "end", class: "lane" }, author.length > 16 ? `${author.slice(0, 15)}…` : author));
  }
  for (let i = 0; i <= 4; i++) {
    const at = run.began + (span * i) / 4;
    chart.append(svg("text", { x: x(at), y: 14, "text-anchor": i === 4 ? "end" : "start", class: "tick" }, seconds(at - run.began)));
  }
  for (const step of record.steps) if (step.at_s >= run.began && step.at_s <= run.ended) chart.append(svg("line", { x1: x(step.at_s), x2: x(step.at_s), y1: TOP - 4, y2: TOP, class: "step" }));
  for (const node of run.nodes) {
    chart.append(svg("rect", { x: x(node.began_s), y: TOP + lane.get(node.node) * LANE + 8, width: Math.max(2, x(node.ended_s) - x(node.began_s)), height: 8, class: "bar function" }, svg("title", null, `${node.node}: ${node.outcome}`)));
  }
  for (const call of run.calls) {
    const y = TOP + rowOf.get(call.key) * LANE;
    const first = call.first_token_s ?? call.finished_s;
    const bar = svg("g", { class: "bar", role: "option", "aria-selected": "false", id: `bar-${call.key}`, "aria-label": `${call.author}, superstep ${call.superstep}: ${count(call.sampled)} tokens said, ${count(call.tokens_encoded)} encoded, ${count(call.tokens_reused)} reused`, onclick: () => choose(call) },
      svg("rect", { x: x(call.submitted_s), y: y + 3, width: Math.max(1, x(first) - x(call.submitted_s)), height: LANE - 8, class: "waits" }),
      svg("rect", { x: x(first), y: y + 3, width: Math.max(2, x(call.finished_s) - x(first)), height: LANE - 8, class: "speaks" }));
    bars.set(call.key, bar);
    chart.append(bar);
  }
  const inTime = [...run.calls].sort((a, b) => a.submitted_s - b.submitted_s);
  let chosen = null;
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const jump = { Home: 0, End: inTime.length - 1 }[event.key];
    if ((step === undefined && jump === undefined) || !inTime.length) return;
    event.preventDefault();
    const at = jump ?? Math.min(inTime.length - 1, Math.max(0, inTime.indexOf(chosen) + step));
    choose(inTime[at]);
  });
  const mark = (call) => {
    if (chosen) bars.get(chosen.key)?.setAttribute("aria-selected", "false");
    chosen = call && bars.has(call.key) ? call : null;
    if (!chosen) return chart.removeAttribute("aria-activedescendant");
    bars.get(chosen.key).setAttribute("aria-selected", "true");
    chart.setAttribute("aria-activedescendant", `bar-${chosen.key}`);
  };
  const found = (keys) => {
    for (const [key, bar] of bars) bar.classList.toggle("missed", keys !== null && !keys.has(key));
  };
  const legend = el("p", { class: "legend" },
    el("span", { class: "key waits" }), "until the first token ", el("span", { class: "key speaks" }), "speaking ",
    run.nodes.length ? [el("span", { class: "key function" }), "a function "] : null,
    record.steps.length ? "– ticks on top: forward passes" : null);
  return { node: el("div", { class: "scroll" }, legend, chart), mark, found };
}
