"""The rules by which one agent reads: its sources, private contexts, guards and options, as its graph declares them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.chart import Chart, OnViolation, is_inside, names_of
from choreo_agents.graph.audit.influence import Guard
from choreo_agents.graph.langgraph_internals import is_nested
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.run_context import ChartedRun, RunContext
from choreo_agents.graph.state import HandleEntry, is_own
from choreo_agents.graph.view.call_id import CallId
from choreo_agents.graph.view.imported_prompt import imported_by
from choreo_agents.graph.visibility import (
    EVERYONE,
    OUTSIDE,
    START_SOURCE,
    Positions,
    VisibilityRule,
    private_in,
    with_input,
)

if TYPE_CHECKING:
    from choreo_agents.graph.agent import Agent


@dataclass(frozen=True)
class ReaderRules:
    """Rules for one reader's views."""

    sources: Mapping[str, VisibilityRule]
    """Rules by source, in the order in which messages of one superstep are shown."""
    undeclared: Collection[str] | None = None
    """The sources that it reads only because it reads everyone (in a stock graph, `EVERYONE` stands for them), without
    their confidential messages. None: it reads only the sources it names."""
    shared_system: str | None = None
    """The system prompt that every view starts with."""
    positions: Positions = "sequential"
    systems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """System prompts that fresh encodings may attend to, by the name of the private context."""
    confidential: frozenset[str] = frozenset()
    """The nodes whose messages are private contexts."""
    guard: Guard = field(default_factory=Guard)
    around: tuple[Guard, ...] = ()
    """The guards of the graphs around its own, one each; empty: there is none, or none that declares what it sees."""
    unnamed: frozenset[str] = frozenset()
    """Sources outside of its graph whose confidential messages it does not see."""
    strict: bool = False
    """True if messages that only other models have encoded are an error where encodings are shared."""
    by_tenant: bool = False
    """True if each run is served for its own tenant, instead of the one for which the engine was loaded."""
    node: str | None = None
    """The reader's name as a node of a `ChoreoGraph`, whose state has its messages; None: it is no such node."""


def stock_rules(agent: Agent) -> ReaderRules:
    """Return the rules of an agent in a stock `StateGraph`, which declares itself what it reads.

    Raises:
        PMLError, ContextLengthError: Its prompt does not fit its engine's model.
    """
    imported_by(agent, agent.engine)
    rules = with_input(agent.rules)
    guard = Guard(private_in(agent.rules), spared=frozenset([*rules, *filter(None, [agent.persona])]))
    undeclared = {EVERYONE} if EVERYONE in agent.rules else None
    return ReaderRules(rules, undeclared, agent.shared_system, agent.positions or "sequential", guard=guard)


def charted_in(called: RunnableConfig, chart: Chart, on_violation: OnViolation) -> ChartedRun:
    """Return the chart for a run of a graph called with this config: its own, or that of the graphs around it.

    Args:
        called: The config of the run.
        chart: The graph's declarations, those of subgraphs included.
        on_violation: Its policy's `on_violation`.
    """
    around, charted = author_of(called) if is_nested(called) else "", RunContext.of(called).charted
    local = charted.local(around) if around and charted else None
    if charted and local is not None and any(node.name != local for node in charted.chart.inside(local)):
        return replace(charted, on_violation={**charted.on_violation, local: on_violation})  # the outer graph charts it
    return ChartedRun(around, chart, {"": on_violation})


def placed_rules(rules: ReaderRules, config: RunnableConfig, author: str) -> ReaderRules:
    """Return an agent's rules with those that edges of the graphs around its own give it.

    Args:
        rules: The rules from its own graph.
        config: The config that it runs with.
        author: The agent's node, behind the nodes around its graph.
    """
    charted = RunContext.of(config).charted
    local = None if charted is None else charted.local(author)
    node = None if charted is None or local is None else charted.chart.by_name.get(local)
    home = "" if node is None else node.name.rpartition("|")[0]
    if charted is None or node is None or node.is_function or not home:
        return rules
    prefix = OUTSIDE + (f"{charted.home}|" if charted.home else "")
    outside = {source: _strip_home(rule, home) for source, rule in node.rules.items() if not is_inside(source, home)}
    input_rule = outside.pop(START_SOURCE)
    sources = {**{prefix + source: rule for source, rule in outside.items()}, **rules.sources, START_SOURCE: input_rule}
    hidden: dict[str, set[str]] = {}
    for source in private_in(outside):
        hidden.setdefault(source.rpartition("|")[0], set()).add(source)
    guards = (
        Guard(frozenset(hidden.get(at, ())), {}, on_violation, charted.chart, home=charted.home)
        for at, on_violation in charted.on_violation.items()
    )
    unnamed = frozenset(prefix + source for source in node.undeclared if source in outside)
    return replace(rules, sources=sources, around=tuple(guards), unnamed=unnamed)


def _strip_home(rule: VisibilityRule, home: str) -> VisibilityRule:
    """Return a chart's rule with private contexts as an agent's own graph names them."""
    scope = tuple(name.removeprefix(f"{home}|") for name in rule.contexts)
    return replace(rule, scope=scope) if scope else rule


@dataclass(frozen=True)
class MergeSpec:
    """The sources that a synthesizer merges, and how."""

    sources: frozenset[str]
    caches: bool = True
    """True to merge their encodings; it is logged where only their text can be read."""
    summary: str | None = None
    """Prompt by which each source's speaker makes its message shorter; None: messages are read as they are."""


@dataclass(frozen=True)
class CallReader:
    """The reader of one call of one node."""

    place: CallId
    persona: str
    """The persona of its node, behind the subgraphs."""
    rules: ReaderRules
    agent: Agent
    engines: Sequence[Engine]
    """Its engine, and those of the graph: they know what messages of other models were made of."""

    @property
    def system(self) -> str:
        """Name of the private context of its system prompt and prompts."""
        return f"{self.persona}.system"

    def path_of(self, context: str) -> str:
        """Return a private context's name behind the subgraphs of its reader."""
        home = self.place.author.rpartition("|")[0]
        return f"{home}|{context}" if home else context

    def gets_words_of(self, entry: HandleEntry) -> bool:
        """Return whether it may read only the text of a function's answer, which may have attended to what is kept from
        it."""
        if not entry.get("answered"):
            return False
        # The function may have invoked a graph: then a node of that graph is the author.
        names, reader = [*names_of(entry["author"])], self.place.author
        for guard in (self.rules.guard, *self.rules.around):
            chart, home = guard.chart, f"{guard.home_of(reader)}|"
            local = [name.removeprefix(home) for name in names]
            pairs = ((name, reader.removeprefix(home)) for name in local)
            if guard.hidden or not chart.words_of.isdisjoint(pairs):
                return True
        # An answer that a route or prompt function asked for has an agent as its author: no pair is known for it.
        is_function = any(name in chart.by_name and chart.by_name[name].is_function for name in local)
        return bool(chart.nodes) and "persona" not in entry and not is_function

    def has_said(self, entry: HandleEntry) -> bool:
        """Return whether a message is the reader's own."""
        return is_own(entry, self.place.author, self.persona)
