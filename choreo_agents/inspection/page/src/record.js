// What a recording says, with what can be worked out of it. Nothing here draws.

/** A recording as the page has it; see `choreo_agents/inspection/run_data.py` for the fields. */
export function recordOf(raw) {
  const messages = new Map(raw.messages.map((message) => [message.name, message]));
  const runs = raw.runs.map((run, index) => runOf(run, index, messages));
  return { ...raw, messages, runs };
}

function runOf(run, index, messages) {
  const calls = run.calls.map((call, number) => ({
    ...call,
    key: `${index}:${number}`,
    index: number,
    run: index,
    place: [call.author, call.superstep, call.branch, call.call].join("|"),
  }));
  const byMade = new Map();
  for (const call of calls) {
    byMade.set(call.answer, call);
    if (call.thought) byMade.set(call.thought, call);
  }
  const times = [...calls.flatMap((call) => [call.submitted_s, call.finished_s]), ...run.nodes.flatMap((n) => [n.began_s, n.ended_s])];
  const began = Math.min(run.began_s, ...extent(times, Math.min));
  const ended = Math.max(run.ended_s ?? run.began_s, ...extent(times, Math.max));
  const authors = [...new Set([...calls.map((call) => call.author), ...run.nodes.map((node) => node.node)])];
  const totals = { calls: calls.length, encoded: 0, reused: 0, recomputed: 0, said: 0 };
  for (const call of calls) {
    totals.encoded += call.tokens_encoded;
    totals.reused += call.tokens_reused;
    totals.recomputed += call.tokens_recomputed;
    totals.said += call.sampled;
  }
  const read = new Set(calls.flatMap((call) => call.view));
  totals.modules = [...read].map((name) => messages.get(name)).filter((message) => message?.role === "module").reduce((sum, message) => sum + message.tokens, 0);
  return { ...run, index, calls, byMade, began, ended, authors, totals, nodes: run.nodes, messages };
}

const extent = (values, of) => (values.length ? [values.reduce((a, b) => of(a, b))] : []);

/** Whose words a message holds: a tool's result belongs to whoever has called the tool. */
const whose = (message) => (message.role === "tool" ? `a tool of ${named(message.author)}` : named(message.author));

/** How a call's reader has a message: whose words it holds, and by which way. */
export function reading(record, call, name) {
  const message = record.messages.get(name);
  if (!message) return { way: "unknown", author: "?" };
  if (message.sources.length) return { way: "re-encoded", author: whose(record.messages.get(message.sources[0]) ?? message) };
  const author = whose(message);
  if (message.origin === "mapped") return { way: "merged", author };
  if (message.role === "module") return { way: "module", author };
  if (message.origin === "prefilled") return { way: "given", author };
  return { way: message.author === call.author ? "its own" : "shared", author };
}

const NAMES = { __start__: "input", "public root": "all are told" };
/** A message's author as people say it. */
export const named = (author) => (author ? NAMES[author] ?? author : "nobody named");

/** A call's view: each message, where it stands and where it stood when it was encoded. */
export function viewOf(record, call) {
  return call.view.map((name, i) => {
    const message = record.messages.get(name);
    return { name, message, tokens: message?.tokens ?? 0, at: call.offsets[i] ?? 0, stood: message?.position ?? 0, ...reading(record, call, name) };
  });
}

/** What a call waited for: who ended last before its superstep could begin, and who was served meanwhile. */
export function waitedFor(run, call) {
  let last = null;
  for (const each of run.calls) if (each.step < call.step && (!last || each.finished_s > last.end)) last = { who: each.author, end: each.finished_s };
  for (const each of run.nodes) if (each.step < call.step && (!last || each.ended_s > last.end)) last = { who: each.node, end: each.ended_s };
  const until = call.first_token_s ?? call.finished_s;
  const beside = run.calls.filter((each) => each !== call && each.submitted_s < until && each.finished_s > call.submitted_s);
  return { last, beside: [...new Set(beside.map((each) => each.author))] };
}

/** What each message is made of: `[name, channel]`, by encoding (it has attended to it) or by words. */
export function linksOf(record) {
  const links = new Map();
  for (const message of record.messages.values()) {
    links.set(message.name, [
      ...message.parents.map((name) => [name, "encoding"]),
      ...message.sources.map((name) => [name, "words"]),
    ]);
  }
  return links;
}

/** Who has said a message in words of their own; null: it holds somebody's words encoded again, or what was given. */
function speakerOf(record, name) {
  const message = record.messages.get(name);
  return message && !message.sources.length ? message.author : null;
}

/** The shortest way from a message back to each speaker behind it. `cut`: a source and a reader to do without. */
function waysFrom(record, links, start, cut, channels) {
  const before = new Map([[start, null]]);
  const reader = new Map([[start, speakerOf(record, start)]]); // whose message each is read in
  const found = new Map();
  const queue = [start];
  for (let i = 0; i < queue.length; i++) {
    const at = queue[i];
    for (const [name, channel] of links.get(at) ?? []) {
      if (before.has(name) || (channels && channel !== channels)) continue;
      const source = speakerOf(record, name);
      if (cut && source === cut.source && reader.get(at) === cut.reader) continue;
      before.set(name, { at, channel });
      reader.set(name, source ?? reader.get(at));
      if (source !== null && !found.has(source)) found.set(source, name);
      queue.push(name);
    }
  }
  return { before, reader, found };
}

function pathOf({ before, reader, found }, author) {
  const hops = [];
  for (let at = found.get(author); before.get(at); at = before.get(at).at) {
    const [source, to] = [reader.get(at), reader.get(before.get(at).at)];
    if (source !== to) hops.push({ source, reader: to });
  }
  return hops;
}

/** Who has influenced a message, by which channel, the shortest way, and an edge without which there were none. */
export function influences(record, name) {
  const links = linksOf(record);
  const own = speakerOf(record, name);
  const all = waysFrom(record, links, name);
  const direct = waysFrom(record, links, name, null, "encoding");
  return [...all.found.keys()]
    .filter((author) => author !== own && author !== "public root")
    .map((author) => {
      const path = pathOf(all, author);
      const cut = path.find((hop) => !waysFrom(record, links, name, hop).found.has(author));
      return { author, channel: direct.found.has(author) ? "encoding" : "words", path, cut: cut ?? null };
    });
}

/** By edge (source to reader): tokens that were read as they had been encoded, and tokens encoded again for it. */
export function edgesOf(record, run) {
  const edges = new Map();
  const counted = new Set();
  for (const call of run.calls) {
    for (const each of viewOf(record, call)) {
      if (each.author === call.author && each.way !== "re-encoded") continue;
      const key = `${each.author}\u0000${call.author}`;
      const edge = edges.get(key) ?? { source: each.author, reader: call.author, reads: 0, shared: 0, again: 0 };
      edge.reads += 1;
      if (each.way === "re-encoded") {
        if (!counted.has(`${each.name}\u0000${call.author}`)) edge.again += each.tokens;
        counted.add(`${each.name}\u0000${call.author}`);
      } else edge.shared += each.tokens;
      edges.set(key, edge);
    }
  }
  for (const [said, reader, label] of run.edges) {
    const source = named(said);
    const edge = edges.get(`${source}\u0000${reader}`);
    if (edge) edge.label = label;
    else edges.set(`${source}\u0000${reader}`, { source, reader, label, reads: 0, shared: 0, again: 0 });
  }
  return [...edges.values()].sort((a, b) => b.shared + b.again - a.shared - a.again);
}

/**
 * Tokens of what the first recording's calls have read and said, by author, over time: `{ times, authors, tokens }`, a list
 * for each author. A message counts from when it was said, or first read; authors of little are told together.
 */
export function growthOf(record, most = 6) {
  const since = new Map();
  const seen = (name, at) => { if (!(since.get(name) <= at)) since.set(name, at); };
  for (const call of record.runs.flatMap((run) => run.calls)) {
    if (!call.answer.startsWith("0:")) continue;
    for (const name of [call.answer, call.thought]) if (name) seen(name, call.finished_s);
    for (const name of call.view) seen(name, call.submitted_s);
  }
  const events = [...since].map(([name, at]) => ({ at, message: record.messages.get(name) })).filter((each) => each.message).sort((a, b) => a.at - b.at);
  const totals = new Map();
  for (const { message } of events) totals.set(whose(message), (totals.get(whose(message)) ?? 0) + message.tokens);
  const ranked = [...totals].sort((a, b) => b[1] - a[1]).map(([author]) => author);
  const authors = ranked.length > most ? [...ranked.slice(0, most - 1), "others"] : ranked;
  const place = new Map(ranked.map((author, i) => [author, Math.min(i, authors.length - 1)]));
  const tokens = authors.map(() => []);
  const now = authors.map(() => 0);
  for (const { message } of events) {
    now[place.get(whose(message))] += message.tokens;
    now.forEach((sum, i) => tokens[i].push(sum));
  }
  return { times: events.map((each) => each.at), authors, tokens };
}

/** Two runs call by call: by author, superstep, branch and call. */
export function compared(one, other) {
  const theirs = new Map(other.calls.map((call) => [call.place, call]));
  const rows = one.calls.map((call) => {
    const with_ = theirs.get(call.place) ?? null;
    theirs.delete(call.place);
    return { one: call, other: with_, same: with_ !== null && sameWords(call, with_) };
  });
  return [...rows, ...[...theirs.values()].map((call) => ({ one: null, other: call, same: false }))];
}

// Digests are made under a recording's own key: those of two recordings differ even if the words do not.
const sameWords = (a, b) => (a.text !== null && b.text !== null ? a.text === b.text : a.digest === b.digest);
