"""All that a graph tells one of its agents about what it may see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.chart import is_inside, names_of
from choreo_agents.graph.audit.guard import Guard
from choreo_agents.graph.audit.influence import Declared
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.langgraph_internals import is_nested
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.outputs import Writer
from choreo_agents.graph.run_context import ChartedRun, RunContext
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.call_id import CallId
from choreo_agents.graph.view.imported_prompt import ImportedPrompt
from choreo_agents.graph.view.view import HistoryLimit, is_own
from choreo_agents.graph.visibility import OUTSIDE, START_SOURCE, Positions, VisibilityRule, hidden_sources
from choreo_agents.graph.words.prompts import Prompt
from choreo_agents.graph.words.thoughts import Thinker

Update = Callable[..., Any]
"""Of what an agent has said (a list, if it says several messages at a time) and, if it likes, of the graph's state with
that in it; of `runtime` and `config`, too, by name. Makes an update of the state, a `Command`, or None."""


@dataclass(frozen=True)
class ReaderRules:
    """How one reader's views are made."""

    sources: Mapping[str, VisibilityRule]
    """By name, in the order in which it sees those of one superstep."""
    undeclared: Collection[str] | None = None
    """Those of them of which nothing is said by name, since it reads everyone (in a stock graph, `EVERYONE` stands for
    them): what they say confidentially is not for it. None: it reads whom it names."""
    shared_system: str | None = None
    """The system prompt that all views start with."""
    positions: Positions = "sequential"
    systems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """System prompts that fresh encodings may attend to, by the name of the private context."""
    confidential: frozenset[str] = frozenset()
    """The nodes whose messages are private contexts."""
    guard: Guard = field(default_factory=Guard)
    around: tuple[Guard, ...] = ()
    """The guards of the graphs around it, one for each; empty: there is none, or none that says what it sees."""
    unnamed: frozenset[str] = frozenset()
    """Of the sources outside of its graph, those that say nothing confidential to it."""
    strict: bool = False
    """Whether what other models have encoded is an error where encodings are shared."""
    by_tenant: bool = False
    """Whether each run is served for the tenant that it is for, and not for whom the engine was loaded."""
    node: str | None = None
    """The reader's name as a node of a graph of ours: what it says is in its state. None: it is none."""


def charted_in(called: RunnableConfig, declared: Declared, on_violation: OnViolation) -> ChartedRun:
    """Return what is charted of a graph that is called with this config: by it, or by the graphs around it.

    Args:
        called: As it runs.
        declared: What it declares, subgraphs included, and its policy's `on_violation`.
    """
    around, known = author_of(called) if is_nested(called) else "", RunContext.of(called).charted
    local = known.local(around) if around and known else None
    if known and local is not None and any(node.name != local for node in known.declared.chart.inside(local)):
        return replace(known, on_violation={**known.on_violation, local: on_violation})  # it is charted there
    return ChartedRun(around, declared, {"": on_violation})


def placed_rules(rules: ReaderRules, config: RunnableConfig, author: str) -> ReaderRules:
    """Return the rules of an agent where it stands: with what the edges of graphs around give to its own.

    Args:
        rules: As its own graph tells it, and `config` that it runs with.
        author: It, behind the nodes around its graph.
    """
    known = RunContext.of(config).charted
    local = None if known is None else known.local(author)
    node = None if known is None or local is None else known.declared.nodes.get(local)
    home = "" if node is None else node.name.rpartition("|")[0]
    if known is None or node is None or node.is_function or not home:
        return rules
    prefix = OUTSIDE + (f"{known.home}|" if known.home else "")
    outside = {source: _within(rule, home) for source, rule in node.rules.items() if not is_inside(source, home)}
    input_rule = outside.pop(START_SOURCE)
    sources = {**{prefix + source: rule for source, rule in outside.items()}, **rules.sources, START_SOURCE: input_rule}
    hidden: dict[str, set[str]] = {}
    for source in hidden_sources(outside):
        hidden.setdefault(source.rpartition("|")[0], set()).add(source)
    guards = (
        Guard(frozenset(hidden.get(at, ())), {}, on_violation, known.declared, home=known.home)
        for at, on_violation in known.on_violation.items()
    )
    unnamed = frozenset(prefix + source for source in node.undeclared if source in outside)
    return replace(rules, sources=sources, around=tuple(guards), unnamed=unnamed)


def _within(rule: VisibilityRule, home: str) -> VisibilityRule:
    """A rule of a chart as an agent's own graph names its private contexts."""
    scope = tuple(name.removeprefix(f"{home}|") for name in rule.contexts)
    return replace(rule, scope=scope) if scope else rule


@dataclass(frozen=True)
class MergeSpec:
    """Whose messages a synthesizer merges, and what becomes of their encodings first."""

    sources: frozenset[str]
    caches: bool = True
    """Whether their encodings are to be read: their words are told of."""
    summary: str | None = None
    """What each of their speakers is asked to say it shorter; None: they are read as they are."""


class Speaker(Writer, Thinker, Protocol):
    """What a turn needs of its agent."""

    persona: str | None
    system: Prompt | None
    imported: ImportedPrompt | None
    """What it is told by a prompt of a schema, in place of a system prompt."""
    prompt: Prompt | None
    adapter: str | None
    """Encodes what is the reader's own."""
    merging: MergeSpec | None
    """Whose messages are merged."""
    confidential: bool
    """Whether what it says is a private context."""
    on_output: Update | None
    history: HistoryLimit | None
    """How much it sees of what it may."""
    tags: Sequence[str]
    metadata: Mapping[str, Any]
    n: int

    def reader_rules(self) -> ReaderRules: ...


@dataclass(frozen=True)
class CallReader:
    """Who reads in one call of one node, and how."""

    place: CallId
    persona: str
    """Whose node it is, behind the subgraphs."""
    rules: ReaderRules
    agent: Speaker
    others: Sequence[Engine]
    """Who else serves the graph: they know from what words were made that another model has said."""

    @property
    def system(self) -> str:
        """The name of the private context that it is told, and asked."""
        return f"{self.persona}.system"

    def gets_words_of(self, entry: HandleEntry) -> bool:
        """Tell whether a message may have attended, in a function, to what is kept from the reader."""
        if not entry.get("answered"):
            return False
        # The function may have invoked a graph: then it is the answer of a node in there.
        names, reader = [*names_of(entry["author"])], self.place.author
        for guard in (self.rules.guard, *self.rules.around):
            known, home = guard.declared, f"{guard.home_of(reader)}|"
            local = [name.removeprefix(home) for name in names]
            pairs = ((name, reader.removeprefix(home)) for name in local)
            if guard.hidden or not known.chart.words_of.isdisjoint(pairs):
                return True
        # What is asked in a route, or for a prompt, is in the name of an agent, and no pair is known of that.
        is_function = any(name in known.nodes and known.nodes[name].is_function for name in local)
        return bool(known.nodes) and "persona" not in entry and not is_function

    def has_said(self, entry: HandleEntry) -> bool:
        """Whether a message is its own."""
        return is_own(entry, self.place.author, self.persona)
