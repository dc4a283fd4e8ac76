// One page for the runs of a recording: what is chosen, and what is drawn for it.
import { byId, count, el, percent, seconds } from "./dom.js";
import { detail } from "./detail.js";
import { recordOf } from "./record.js";
import { timeline } from "./timeline.js";
import { comparedView, edgesView, memoryView, messagesView } from "./views.js";

const record = recordOf(JSON.parse(byId("data").textContent));
const callOf = new Map(record.runs.flatMap((run) => run.calls.flatMap((call) => [[call.answer, call], ...(call.thought ? [[call.thought, call]] : [])])));
record.wordsOf = (name) => {
  const call = callOf.get(name) ?? callOf.get(record.messages.get(name)?.sources[0]);
  return call?.text ?? null;
};
record.runs.forEach((run, i) => { run.title = run.title ?? `run ${i + 1}`; });

const VIEWS = [["timeline", "Timeline"], ["messages", "Messages"], ["edges", "Edges"], ["memory", "Memory"], ...(record.runs.length > 1 ? [["beside", "Side by side"]] : [])];
const chosen = { run: record.runs[0] ?? null, other: record.runs[1] ?? null, view: "timeline", call: null, sought: "" };
let drawn = null;

function head() {
  const select = (label, current, set) => el("label", null, label, " ", el("select", { onchange: (event) => set(record.runs[event.target.selectedIndex]) }, record.runs.map((run) => el("option", { selected: run === current }, run.title))));
  const totals = chosen.run?.totals;
  byId("head").replaceChildren(
    el("h1", null, record.title),
    el("p", { id: "totals" }, !chosen.run ? "Nothing was recorded." : [
      el("b", { "data-total": "calls" }, count(totals.calls)), " calls said ", el("b", { "data-total": "said" }, count(totals.said)), " tokens in ", seconds(chosen.run.ended - chosen.run.began), ": ",
      el("b", { "data-total": "encoded" }, count(totals.encoded)), " encoded, ", el("b", { "data-total": "reused" }, count(totals.reused)), ` reused (${percent(totals.reused, totals.reused + totals.encoded + totals.recomputed)}), `,
      el("b", { "data-total": "recomputed" }, count(totals.recomputed)), " computed again. ", totals.modules ? ["Modules of ", el("b", { "data-total": "modules" }, count(totals.modules)), " tokens were read. "] : null, "Ended: ", chosen.run.outcome ?? "cut", "."]),
    el("form", { role: "search", onsubmit: (event) => event.preventDefault() },
      record.runs.length > 1 ? [select("Run", chosen.run, (run) => { chosen.run = run; chosen.call = null; all(); }), " ", select("beside", chosen.other, (run) => { chosen.other = run; all(); })] : null,
      el("label", { for: "search" }, "Search"), el("input", { id: "search", type: "search", placeholder: "an agent, or words", value: chosen.sought, oninput: (event) => { chosen.sought = event.target.value; sought(); } }),
      el("output", { id: "found", for: "search" }),
      el("button", { type: "button", id: "theme", onclick: theme }, "Light or dark")));
}

function theme() {
  const dark = (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  if (chosen.view === "memory") view();
}

function tabs() {
  const buttons = VIEWS.map(([key, name]) => el("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "view", "aria-selected": String(key === chosen.view), tabindex: key === chosen.view ? 0 : -1, onclick: () => { chosen.view = key; tabs(); view(); } }, name));
  const keyed = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = (VIEWS.findIndex(([key]) => key === chosen.view) + step + VIEWS.length) % VIEWS.length;
    chosen.view = VIEWS[at][0];
    tabs();
    view();
    byId(`tab-${chosen.view}`).focus();
  };
  byId("tabs").replaceChildren(...buttons);
  byId("tabs").onkeydown = keyed;
}

function keysFound() {
  const words = chosen.sought.trim().toLowerCase();
  if (!words || !chosen.run) return null;
  return new Set(chosen.run.calls.filter((call) => `${call.author}\n${call.text ?? ""}`.toLowerCase().includes(words)).map((call) => call.key));
}

function view() {
  const { run } = chosen;
  const panel = byId("view");
  panel.setAttribute("aria-labelledby", `tab-${chosen.view}`);
  drawn = null;
  if (!run) return panel.replaceChildren();
  const keys = keysFound();
  if (chosen.view === "timeline") {
    drawn = timeline(record, run, choose);
    panel.replaceChildren(drawn.node);
    drawn.mark(chosen.call);
    drawn.found(keys);
  } else if (chosen.view === "messages") panel.replaceChildren(...messagesView(record, run, choose, keys).filter(Boolean));
  else if (chosen.view === "edges") panel.replaceChildren(...edgesView(record, run));
  else if (chosen.view === "beside") panel.replaceChildren(...comparedView(record, run, chosen.other, choose));
  else {
    const memory = memoryView(record, run);
    panel.replaceChildren(...memory.nodes);
    memory.draw();
  }
}

function sought() {
  const keys = keysFound();
  byId("found").textContent = keys === null ? "" : `${count(keys.size)} found`;
  if (drawn) drawn.found(keys);
  else if (chosen.view === "messages") view();
}

function choose(call) {
  const began = performance.now();
  chosen.call = call;
  drawn?.mark(call);
  byId("detail").replaceChildren(...detail(record, record.runs[call.run], call).flat(Infinity).filter(Boolean));
  byId("detail").dataset.key = call.key;
  byId("detail").dataset.took = (performance.now() - began).toFixed(1);
}

function all() {
  head();
  tabs();
  view();
  byId("detail").replaceChildren(el("p", { class: "note" }, "Choose a message to see what it read, from where, and who has influenced it."));
}

byId("foot").append(el("p", null, `${record.model}; ${Object.entries(record.conditions).map(([name, value]) => `${name} ${value}`).join(", ")}.${record.cut ? ` The recording is not whole: ${record.cut}.` : ""}`));
all();
