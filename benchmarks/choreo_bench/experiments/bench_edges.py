"""Cost and savings of each shared edge: the same run with one edge at a time re-encoded."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph import START, Agent, ChoreoGraph, Policy, RunOptions
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle
from choreo_bench.harness import Report, Table

Place = tuple[str, int, int, int]
"""Author, superstep, branch and call of a message."""
Advice = Literal["share", "re-encode", "fine-tune"]
HARMLESS_KL, HARMLESS_AGREEMENT = 0.02, 0.98
"""Nats and share of tokens: below and above, readers do not notice."""
LEAK = 0.1
"""So much more often a probe is right: the edge tells what it should not."""
WORTH_IT = 0.05
"""Share of the tokens that sharing saves: below, re-encoding costs next to nothing."""
FOLDS = 5
"""Parts of the examples; a probe learns on all but one of them, and is judged on that one."""
RIDGE = 1.0
"""Weight of a probe's penalty, relative to the mean square of the features."""


@dataclass(frozen=True)
class EdgeInput:
    """An input of the graph."""

    state: Mapping[str, Any]
    """What the graph is run on: `messages`, and channels of its own."""
    systems: Mapping[str, str] = field(default_factory=dict)
    """System prompts of this input, by node, in place of the graph's."""
    label: str | None = None
    """The private label that a probe is to read, if it is to."""


@dataclass(frozen=True)
class EdgeRun:
    """Measurements of one input with one edge re-encoded."""

    source: str
    reader: str
    index: int
    """Of the input."""
    tokens_saved: int
    """That sharing the edge did not encode."""
    tokens: int
    """That were encoded with the edge shared."""
    ttft_saved_s: float
    """Mean seconds by which the reader's first tokens came earlier."""
    kl: tuple[float, ...]
    """Of every token of the reader's: from the shared edge's distribution to the re-encoded one's, in nats."""
    agreement: tuple[bool, ...]
    """For each of these tokens: True if both distributions have the same likeliest one."""
    shared_logits: tuple[float, ...] = ()
    reencoded_logits: tuple[float, ...] = ()
    """Means over the reader's tokens, if there is a label."""
    experiment: str = ""
    """Of which graph, model and input."""


@dataclass(frozen=True)
class EdgeFigures:
    """Summary of one edge."""

    source: str
    reader: str
    tokens_saved: float
    """Mean per input."""
    share_saved: float
    """Of all that would be encoded with the edge re-encoded."""
    ttft_saved_s: float
    kl: float
    kl_interval: tuple[float, float]
    agreement: float
    agreement_interval: tuple[float, float]
    probe_shared: float | None
    """How often a linear probe reads the label from the reader's logits, held-out inputs only."""
    probe_reencoded: float | None
    advice: Advice


def measure_edges(
    app: Any,
    inputs: Sequence[EdgeInput],
    *,
    model: Any = None,
    out: Path | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> list[EdgeFigures]:
    """Run a graph on inputs, once as it is and once for each shared edge with that edge re-encoded, all with the words
    of the first run.

    Every run has an engine of its own, whose cache is cold.

    Args:
        app: A ChoreoGraph, or one compiled with an engine.
        inputs: What to run it on.
        model: Serves it; by default the model of the graph's engine.
        out: A JSONL file for every run's figures: what is in it already is not run again.
        on_progress: Told of every run that is over.

    Raises:
        InvalidRequestError: There is no input, no shared edge, or no model; or the file is another graph's.
    """
    graph: ChoreoGraph = app if isinstance(app, ChoreoGraph) else app.builder.origin
    # A policy that re-encodes would measure an edge against itself.
    graph = graph.with_policy(Policy(on_violation="warn"))
    serving = model if model is not None else _model_of(app)
    edges = shared_edges(graph)
    if not inputs:
        raise InvalidRequestError("there is nothing to measure on: pass at least one input")
    if not edges:
        raise InvalidRequestError("no edge between two agents of the graph is shared: there is nothing to measure")
    names = [_fingerprint(graph, serving, given) for given in inputs]
    before = list(_read(out, edges, names))
    done = {(run.source, run.reader, run.index): run for run in before if run.index < len(inputs)}
    if out is not None:
        # Without what a run that was ended has left of its last line.
        fresh = out.with_name(f"{out.name}.new")
        fresh.write_text("".join(json.dumps(asdict(run)) + "\n" for run in before))
        fresh.replace(out)
    for index, given in enumerate(inputs):
        missing = [edge for edge in edges if (*edge, index) not in done]
        if not missing:
            continue
        mine = _with_systems(graph, given.systems)
        answers = _run(mine, serving, given, None).answers
        base = _run(mine, serving, given, answers)
        on_progress()
        for source, reader in missing:
            rule = mine.table.reads(reader, mine.nodes)[source]
            other = _run(mine.with_rule(source, reader, rule.without("encoding")), serving, given, answers)
            measured = _compared(source, reader, index, base, other, labelled=given.label is not None)
            measured = replace(measured, experiment=names[index])
            done[source, reader, index] = measured
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(measured)) + "\n")
            on_progress()
    labels = [given.label for given in inputs]
    return [_figures([done[*edge, index] for index in range(len(inputs))], labels) for edge in edges]


def shared_edges(graph: ChoreoGraph) -> list[tuple[str, str]]:
    """Every (source, reader) of two agents, or of input and an agent, that is shared."""
    agents = [name for name, spec in graph.nodes.items() if isinstance(spec.runnable, Agent)]
    return [
        (source, reader)
        for reader in agents
        for source, rule in graph.table.reads(reader, graph.nodes).items()
        if rule.mode.shares_kv and (source in agents or source == START_SOURCE)
    ]


def read_inputs(path: Path) -> list[EdgeInput]:
    """Inputs from JSONL: `messages` (texts, or LangChain's form), and `systems`, `label` and other channels at will.

    Raises:
        InvalidRequestError: A line is none; says which.
    """
    inputs: list[EdgeInput] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            given = dict(json.loads(line.decode()))
            systems, label = given.pop("systems", {}), given.pop("label", None)
            messages = given.get("messages", [])
            given["messages"] = [("user", messages)] if isinstance(messages, str) else messages
            inputs.append(EdgeInput(given, dict(systems), None if label is None else str(label)))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{path}:{number} is not a valid input: {error}") from error
    return inputs


@dataclass
class _Run:
    answers: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    logits: dict[Place, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: int = 0


def _run(graph: ChoreoGraph, model: Any, given: EdgeInput, replay: Mapping[Place, tuple[int, ...]] | None) -> _Run:
    """Run once on a cold engine."""
    run = _Run()

    def watch(*place: Any) -> Callable[[Tensor], None]:
        return lambda logits: run.logits[place].append(logits.float().cpu().clone())

    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 28)) as engine:
        app = graph.compile(engine=engine)
        options = RunOptions(seed=0, replay=replay, logits_callback=watch if replay is not None else None)
        config: Any = {"configurable": {"choreo": options}}
        streamed: Iterator[Any] = app.stream(dict(given.state), config, stream_mode=["values", "custom"])
        for mode, item in streamed:
            if mode == "values":
                _remember(engine, item, run.answers)
            elif item.get("type") == "choreo.decode":
                run.waits[item["agent"]].append(item["ttft_s"])
        run.tokens = engine.stats().tokens_encoded
    return run


def _remember(engine: Engine, state: Mapping[str, Any], answers: dict[Place, tuple[int, ...]]) -> None:
    """Note the tokens of what was decoded since, before anybody edits it."""
    for entry in state.get("handles") or []:
        place = (entry["author"], entry["superstep"], entry["branch"], entry.get("call", 0))
        [*_, made] = engine.inspect.records([MessageHandle.model_validate(entry["handle"])])
        if made.sampled is None:
            continue
        chosen = made.tokens[slice(*made.sampled)]
        if answers.setdefault(place, chosen) != chosen:
            raise InvalidRequestError(
                f"two messages of {place[0]!r} in superstep {place[1]} cannot be distinguished: send branches with "
                "choreo_agents.send, which numbers them"
            )


def _fingerprint(graph: ChoreoGraph, model: Any, given: EdgeInput) -> str:
    """Names what a run measures: another graph, model or input has another name."""
    agents = {
        name: {key: _named(value) for key, value in vars(spec.runnable).items() if key != "engine"}
        for name, spec in graph.nodes.items()
        if isinstance(spec.runnable, Agent)
    }
    flow = (sorted(graph.edges), sorted(graph.waiting_edges), {s: sorted(ends) for s, ends in graph.branches.items()})
    fingerprint = getattr(getattr(model, "adapter", None), "fingerprint", str(model))
    what = (fingerprint, graph.system, graph.positions, agents, flow, graph.visibility_table(), given)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _named(value: Any) -> str:
    """A value as text that is the same in every process."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def _compared(source: str, reader: str, index: int, base: _Run, other: _Run, *, labelled: bool) -> EdgeRun:
    pairs = [
        (one, two)
        for place in base.logits
        if place[0] == reader
        for one, two in zip(base.logits[place], other.logits[place], strict=True)
    ]
    kl = tuple(divergence(one, two) for one, two in pairs)
    agreement = tuple(bool(one.argmax() == two.argmax()) for one, two in pairs)
    waits = [mean(run.waits[reader]) if run.waits[reader] else 0.0 for run in (base, other)]
    features = [_features(logits) for logits in zip(*pairs, strict=True)] if labelled and pairs else [(), ()]
    saved = other.tokens - base.tokens
    return EdgeRun(source, reader, index, saved, base.tokens, waits[1] - waits[0], kl, agreement, *features)


def _features(logits: Sequence[Tensor]) -> tuple[float, ...]:
    return tuple(torch.stack(list(logits)).mean(dim=0).tolist())


def _figures(runs: Sequence[EdgeRun], labels: Sequence[str | None]) -> EdgeFigures:
    kl = [value for run in runs for value in run.kl]
    agreement = [float(value) for run in runs for value in run.agreement]
    saved = mean(run.tokens_saved for run in runs)
    share = saved / max(1.0, mean(run.tokens + run.tokens_saved for run in runs))
    probes: list[float | None] = [None, None]
    pairs = [(run, label) for run, label in zip(runs, labels, strict=True) if label is not None and run.shared_logits]
    if len({label for _, label in pairs}) > 1:
        names = [label for _, label in pairs]
        probes = [
            readable([run.shared_logits for run, _ in pairs], names),
            readable([run.reencoded_logits for run, _ in pairs], names),
        ]
    return EdgeFigures(
        runs[0].source,
        runs[0].reader,
        saved,
        share,
        mean(run.ttft_saved_s for run in runs),
        mean(kl) if kl else 0.0,
        _bootstrap([run.kl for run in runs if run.kl]),
        mean(agreement) if agreement else 1.0,
        _bootstrap([[float(same) for same in run.agreement] for run in runs if run.agreement]),
        probes[0],
        probes[1],
        _advice(mean(kl) if kl else 0.0, mean(agreement) if agreement else 1.0, share, probes[0], probes[1]),
    )


def _advice(kl: float, agreement: float, share: float, shared: float | None, reencoded: float | None) -> Advice:
    """Re-encode what tells a secret, or saves nothing; share what is not noticed; else teach the reader."""
    if shared is not None and reencoded is not None and shared - reencoded > LEAK:
        return "re-encode"
    if kl <= HARMLESS_KL and agreement >= HARMLESS_AGREEMENT:
        return "share"
    return "fine-tune" if share > WORTH_IT else "re-encode"


def _bootstrap(values: Sequence[Sequence[float]], draws: int = 1000) -> tuple[float, float]:
    """The 95 % percentile interval of a mean over the tokens of all inputs, inputs being drawn anew."""
    if not values:
        return math.nan, math.nan
    rng = random.Random(0)
    sums = [(sum(run), len(run)) for run in values]
    drawn = (rng.choices(sums, k=len(sums)) for _ in range(draws))
    means = sorted(sum(total for total, _ in sample) / sum(count for _, count in sample) for sample in drawn)
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def _with_systems(graph: ChoreoGraph, systems: Mapping[str, str]) -> ChoreoGraph:
    """The graph with other system prompts."""
    for node, text in systems.items():
        graph = graph.with_system(node, text)
    return graph


def _model_of(app: Any) -> Any:
    engines = [] if isinstance(app, ChoreoGraph) else [a.engine for a in app.agents() if a.engine is not None]
    if not engines:
        raise InvalidRequestError("the graph has no model: pass measure_edges(model=...)")
    return engines[0].model


def _read(out: Path | None, edges: Iterable[tuple[str, str]], names: Sequence[str]) -> Iterator[EdgeRun]:
    """Yield the runs that were measured before."""
    known = set(edges)
    text = out.read_text() if out is not None and out.exists() else ""
    lines, whole = text.splitlines(), text.endswith("\n")
    for number, line in enumerate(lines, start=1):
        try:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(line).items()
            }
            run = EdgeRun(**values)
        except (ValueError, TypeError, AttributeError) as error:
            if number == len(lines) and not whole:
                return  # cut short when the run before was ended
            raise InvalidRequestError(f"{out}:{number} is not a measurement: {error}") from error
        of_this = (run.source, run.reader) in known and names[run.index : run.index + 1] in ([run.experiment], [])
        if not of_this:
            raise InvalidRequestError(
                f"{out}:{number} is of another graph, model or input: it measures {run.source!r} to {run.reader!r} on "
                f"input {run.index + 1}. Pass another file"
            )
        yield run


def readable(features: Sequence[Sequence[float]], labels: Sequence[str], *, seed: int = 0) -> float:
    """The share of held-out examples whose label a ridge-regularised linear map gets right, over five folds.

    Args:
        features: [examples, numbers].
        labels: One for each.
        seed: Of the folds.
    """
    names = sorted(set(labels))
    inputs = torch.tensor(features, dtype=torch.float64)
    wanted = torch.tensor([names.index(label) for label in labels])
    order = list(range(len(labels)))
    random.Random(seed).shuffle(order)
    right = 0
    for fold in range(min(FOLDS, len(order))):
        held = order[fold::FOLDS]
        kept = [index for index in order if index not in held]
        if kept:
            right += int((_fitted(inputs[kept], wanted[kept], len(names), inputs[held]) == wanted[held]).sum())
    return right / len(labels)


def _fitted(inputs: Tensor, wanted: Tensor, classes: int, held_out: Tensor) -> Tensor:
    """Classes that a map fitted on some examples gives to others; in its dual form, for more numbers than examples."""
    middle, spread = inputs.mean(dim=0), inputs.std(dim=0, unbiased=False).clamp_min(1e-9)
    inputs, held_out = (inputs - middle) / spread, (held_out - middle) / spread
    targets = torch.nn.functional.one_hot(wanted, classes).double()
    shift = targets.mean(dim=0)
    kernel = inputs @ inputs.T
    penalty = RIDGE * kernel.diagonal().mean().clamp_min(1e-9)
    weights = torch.linalg.solve(kernel + penalty * torch.eye(len(inputs), dtype=torch.float64), targets - shift)
    scores: Tensor = held_out @ inputs.T @ weights + shift
    return scores.argmax(dim=-1)


def divergence(one: Tensor, other: Tensor) -> float:
    """Kullback and Leibler's, from what some logits say to what others do, in nats.

    Args:
        one: [vocabulary].
        other: [vocabulary].
    """
    a, b = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((a.exp() * (a - b)).sum().clamp_min(0.0))


def edges_report(figures: Sequence[EdgeFigures], inputs: int) -> Report:
    """Report a row for each edge.

    Args:
        found: Of each edge.
        inputs: So many were run.
    """
    probed = any(edge.probe_shared is not None for edge in figures)
    columns = ["edge", "advice", "tokens saved", "first token", "KL, nats a token", "same choice", "probe"]
    rows = [_cells(edge) for edge in figures]
    if not probed:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    title = f"what each shared edge saves and changes, on {inputs} inputs: the same words with that edge re-encoded"
    lines = ["in brackets: 95 % intervals over inputs"]
    lines += ["probe: how often a linear map reads the label, shared and re-encoded"] if probed else []
    return Report([Table(columns, rows, title, words=2)], {"edges": [asdict(edge) for edge in figures]}, lines=lines)


def _cells(edge: EdgeFigures) -> list[str]:
    source = "input" if edge.source == START else edge.source
    return [
        f"{source} -> {edge.reader}",
        edge.advice,
        f"{edge.tokens_saved:.0f} ({edge.share_saved:.0%})",
        f"{1000 * edge.ttft_saved_s:+.1f} ms",
        f"{edge.kl:.3f} ({edge.kl_interval[0]:.3f} to {edge.kl_interval[1]:.3f})",
        f"{edge.agreement:.0%} ({edge.agreement_interval[0]:.0%} to {edge.agreement_interval[1]:.0%})",
        "" if edge.probe_shared is None else f"{edge.probe_shared:.2f}, {edge.probe_reencoded:.2f}",
    ]
