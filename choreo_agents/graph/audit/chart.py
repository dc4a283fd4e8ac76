"""A graph as the audit sees it: agents and functions, their private contexts, and the edges by which they read each
other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from choreo_agents.arguments import Options
from choreo_agents.engine import Engine
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit.report import ACROSS, SENT, PrivateContext
from choreo_agents.graph.visibility import (
    REENCODED,
    SHARED,
    START_SOURCE,
    Channel,
    Presence,
    VisibilityMode,
    VisibilityRule,
)

Tokens = tuple[int, ...]
Item = TypeVar("Item")
OwnTexts = Mapping[str, Mapping[str, Set[Tokens]]]
"""Tokens of the texts that a persona is given, by persona, then by private context or module."""


OnViolation = Literal["raise", "reencode", "warn"]


class Policy(Options):
    """The personas that each private context may influence, and the channels through which it must reach nobody else.

    Without a policy a graph promises only what it declares `private`; the audit reports everything else.
    """

    confidential: dict[str, frozenset[str]] = Field(default_factory=dict)
    """For each private context (`alice.system`, a node with confidential messages, a confidential module:
    `travel/plan`), the personas that it may reach. A node without a persona goes by its own name. Owners always have
    their contexts."""
    channels: frozenset[Channel] = frozenset({"encoding"})
    """The channels by which they may reach nobody else. Forbidding `words` forbids encodings, too, since these carry
    the text."""
    on_violation: OnViolation = "raise"
    """`raise`: the graph does not compile, or the call fails. `reencode`: the edge that would break a promise hands on
    text instead of KV. `warn`: a `VisibilityWarning` is issued."""

    @field_validator("channels")
    @classmethod
    def _include_encoding(cls, channels: frozenset[Channel]) -> frozenset[Channel]:
        return channels | {"encoding"} if "words" in channels else channels

    @model_validator(mode="after")
    def _require_possible(self) -> Self:
        if self.on_violation == "reencode" and "words" in self.channels:
            raise ValueError("the policy cannot re-encode for the words channel: use on_violation='raise'")
        return self

    def forbids(self, context: PrivateContext, persona: str, channel: Channel) -> bool:
        """Return whether a context must not reach a persona that does not own it, through this channel."""
        allowed = self.confidential.get(context.name)
        return allowed is not None and channel in self.channels and persona not in allowed

    def within(self, prefix: str, modules: Collection[str] = ()) -> Policy:
        """Return the policy for a graph inside another: all names get the prefix, except those of modules."""
        named = {
            (context if context in modules else prefix + context): frozenset(prefix + persona for persona in allowed)
            for context, allowed in self.confidential.items()
        }
        return self.model_copy(update={"confidential": named})

    def require_names(self, contexts: Iterable[str], personas: Iterable[str]) -> None:
        """Raise `VisibilityError` if the policy names no context or no persona of the graph."""
        known_contexts, known_personas = set(contexts), set(personas)
        for context, allowed in self.confidential.items():
            if context not in known_contexts:
                names = ", ".join(sorted(known_contexts)) or "none"
                raise VisibilityError(f"{context!r} of the policy is not a private context. The graph has: {names}")
            for reader in sorted(allowed - known_personas):
                raise VisibilityError(
                    f"the policy lets {context!r} reach {reader!r}, which is not a persona of the graph: "
                    f"{', '.join(sorted(known_personas))}"
                )


@dataclass(frozen=True)
class ChartNode:
    """A node that may add messages, named by its path: `team|judge`."""

    name: str
    persona: str
    """The persona it speaks for: its own path again, or `team|alice` for all nodes of Alice."""
    model: str = ""
    """Fingerprint of the model it runs on; empty while no engine is known."""
    keeps_kv: bool = True
    """False if its engine encodes all text again instead of sharing KV (methods other than `choreo`)."""
    is_function: bool = False
    """True for a function: it reads the text in the state instead of a view, and its messages are encoded alone."""
    is_silent: bool = False
    """True if it writes no messages."""
    routes: bool = False
    """True if it may send control to any node and write any channel."""
    has_system: bool = False
    has_prompt: bool = False
    """True if it gets a prompt of its own, which no other persona sees."""
    may_be_sent: bool = False
    """True if a `Send` may choose what it sees, and how: a route or a function can send to any node of its graph."""
    confidential: bool = False
    thinks: bool = False
    """True if it may think before it answers: the answer then derives from its thoughts."""
    calls: bool = False
    """True if it may call tools. The results, which functions of the graph write, count as its own messages."""
    recalls: bool = False
    """True if its model's chat template shows it its thoughts of earlier turns."""
    schema: str | None = None
    """Name of the prompt schema whose modules it imports."""
    modules: tuple[str, ...] = ()
    """The confidential modules among these. A module is the same in all graphs: its name has no path in front."""
    rules: Mapping[str, VisibilityRule] = field(default_factory=dict)
    """Visibility rules by the source's path; a source that is a graph stands for all messages in it."""
    undeclared: frozenset[str] = frozenset()
    """Sources it reads without naming them. It does not see their confidential messages."""

    def reads(self, source: str, said_by: ChartNode) -> bool:
        """Return whether it sees anything of a node whose messages it knows as `source`."""
        rule = self.rules.get(source)
        hidden = said_by.is_silent or (source in self.undeclared and said_by.confidential)
        return rule is not None and rule.mode.shows and not hidden

    def speaks_to(self, reader: ChartNode) -> bool:
        """Return whether the reader's model can attend to its KV. Every model encodes for itself what a function
        writes."""
        return self.is_function or "" in (self.model, reader.model) or self.model == reader.model


@dataclass(frozen=True)
class Edge:
    """A path by which messages of one node can reach another."""

    source: str
    reader: str
    mode: VisibilityMode | None
    """The reader's visibility of the source; None: the reader is a function, which reads the text in the graph's state,
    or lets a chat model read it."""
    declared: tuple[str, str] | None
    """The declaration behind the edge: a source, which may be a whole graph, and a reader. None if it needs none."""
    label: str
    may_be_sent: bool = False
    """True if a `Send` may hand the reader less than the rule allows: text where the rule shares encodings."""
    is_alone: bool = False
    """True if the source's messages are encoded alone for the reader, so that nothing they attended to comes along."""

    @property
    def shares_kv(self) -> bool:
        return self.mode is not None and self.mode.shares_kv

    def opens(self, presence: Presence) -> Iterator[tuple[Channel, str]]:
        """Yield the channels by which the reader gets what the source has, each with a label for reports."""
        # A function may have a chat model read all text of the state, whose answer then attended to it.
        mode = self.mode or REENCODED
        in_words = mode.shows and self.is_alone and presence != "text"
        usual: Sequence[Channel] = ("words",) if in_words else mode.opens(presence)
        for channel in usual:
            yield channel, self.label
        if self.shares_kv and self.may_be_sent:
            for channel in REENCODED.opens(presence):
                if channel not in usual:
                    yield channel, f"{SENT} {REENCODED.name}"


@dataclass(frozen=True)
class Chart:
    """All nodes of a graph and its subgraphs, their policies, and what the audit cannot prove anything about."""

    nodes: tuple[ChartNode, ...]
    outside: tuple[str, ...] = ()
    policies: tuple[tuple[str, Policy], ...] = ()
    """The graph's own policy and those of its subgraphs, each with the path prefix of the subgraph's nodes."""
    words_of: frozenset[tuple[str, str]] = frozenset()
    """Pairs (function, reader): the reader gets a chat model's answers in that function as text only, since their KV
    could carry what the reader must not see."""
    texts: Callable[[Engine], OwnTexts] = field(default=lambda _: {}, compare=False)
    """Returns the texts that personas are given, as tokens of an engine's model."""

    def inside(self, source: str) -> Sequence[ChartNode]:
        """Return the nodes whose messages a reader knows under this name."""
        return self._by_source.get(source, ())

    @cached_property
    def by_name(self) -> Mapping[str, ChartNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all nodes and private contexts, and of the input."""
        return frozenset([START_SOURCE, *self.by_name, *(context.name for context in self.contexts)])

    @cached_property
    def modules(self) -> frozenset[str]:
        """The confidential modules among `names`: a module has the same name in all graphs."""
        return frozenset(context.name for context in self.contexts if context.kind == "module")

    @cached_property
    def _by_source(self) -> Mapping[str, Sequence[ChartNode]]:
        return _grouped((source, node) for node in self.nodes for source in names_of(node.name))

    @cached_property
    def by_persona(self) -> Mapping[str, Sequence[ChartNode]]:
        return _grouped((node.persona, node) for node in self.nodes)

    @cached_property
    def contexts(self) -> tuple[PrivateContext, ...]:
        """All private contexts: system prompts and prompts by persona, confidential messages and thoughts by node, and
        confidential modules."""
        contexts: list[PrivateContext] = []
        owners = {persona: tuple(node.name for node in nodes) for persona, nodes in self.by_persona.items()}
        instructed: set[str] = set()
        importers: dict[str, set[str]] = {}
        for node in self.nodes:
            kin = owners[node.persona]
            if (node.has_system or node.has_prompt) and node.persona not in instructed:
                instructed.add(node.persona)
                contexts.append(PrivateContext(name=f"{node.persona}.system", kind="system", owners=kin))
            if node.confidential:
                contexts.append(PrivateContext(name=node.name, kind="message", owners=kin))
            if node.thinks:
                contexts.append(PrivateContext(name=f"{node.name}.thoughts", kind="thoughts", owners=kin))
            for module in node.modules:
                importers.setdefault(module, set()).add(node.persona)
        for module, personas in importers.items():
            kin = tuple(node.name for node in self.nodes if node.persona in personas)
            contexts.append(PrivateContext(name=module, kind="module", owners=kin))
        return tuple(contexts)

    @cached_property
    def guarded(self) -> tuple[PrivateContext, ...]:
        """The private contexts that policies name."""
        named = {name for _, policy in self.policies for name in policy.confidential}
        return tuple(context for context in self.contexts if context.name in named)

    def forbids(self, context: PrivateContext, persona: str, channel: Channel) -> bool:
        """Return whether a policy keeps a context from a persona that does not own it, in this channel."""
        return any(
            policy.forbids(context, persona, channel)
            for prefix, policy in self.policies
            # Inside a subgraph its own policy was enforced when the subgraph was compiled.
            if not (prefix and persona.startswith(prefix))
        )

    def violation_of(self, context: PrivateContext, persona: str, channel: Channel) -> str:
        """Return which promise is broken if a context reaches a persona through a channel; empty: none."""
        return f"the policy keeps {context.name!r} from {persona!r}" if self.forbids(context, persona, channel) else ""

    @cached_property
    def outgoing(self) -> Mapping[str, Sequence[Edge]]:
        """Every edge by which a message can reach a reader, grouped by source."""
        return _grouped((edge.source, edge) for edge in self.edges())

    def edges(self) -> Iterator[Edge]:
        """Yield every edge by which a message can reach a reader, reader by reader."""
        callers = [node for node in self.nodes if node.calls]
        functions = [node for node in self.nodes if node.is_function and not node.is_silent]
        for reader in self.nodes:
            yield from self._tool_edges(reader, [] if reader.is_function else callers, functions)
            for source, rule in reader.rules.items():
                for node in self.inside(source):
                    if node.persona != reader.persona and reader.reads(source, node):
                        yield self._edge(node, reader, rule.mode, rule.words(), (source, reader.name))
            if reader.is_function:
                speakers = (node for node in self.nodes if node is not reader and not node.is_silent)
                yield from (Edge(node.name, reader.name, None, None, "state") for node in speakers)
                continue
            for node in self.by_persona[reader.persona]:
                # A node's own messages come back to it other than as KV only through a Send.
                if node is not reader or reader.may_be_sent:
                    yield self._edge(node, reader, SHARED, "own", None)

    def _edge(
        self, source: ChartNode, reader: ChartNode, mode: VisibilityMode, label: str, declared: tuple[str, str] | None
    ) -> Edge:
        if mode.shares_kv and not source.speaks_to(reader):
            mode, label = REENCODED, f"{label} {ACROSS}"  # across models text is encoded again
        is_alone = (source.name, reader.name) in self.words_of
        return Edge(source.name, reader.name, mode, declared, label, reader.may_be_sent, is_alone)

    def _tool_edges(self, reader: ChartNode, callers: list[ChartNode], functions: list[ChartNode]) -> Iterator[Edge]:
        """Yield the edges of tool results to a reader: it sees them as it sees the agents that called the tools."""
        if not callers:
            return
        hidden = [source for source, rule in reader.rules.items() if not rule.mode.shows]
        shown = [node for node in functions if not any(is_inside(node.name, source) for source in hidden)]
        for caller in callers:
            if caller.persona == reader.persona:
                yield from (Edge(node.name, reader.name, SHARED, None, "called", is_alone=True) for node in shown)
                continue
            for source in names_of(caller.name):
                rule = reader.rules.get(source)
                if rule is not None and rule.mode.shows:
                    rest = (source, reader.name), rule.words(), reader.may_be_sent
                    yield from (Edge(node.name, reader.name, rule.mode, *rest, is_alone=True) for node in shown)

    @cached_property
    def scopes(self) -> Mapping[str, Sequence[tuple[str, str]]]:
        """Pairs (source, reader) whose re-encoded messages attend to a context, by the context's name."""
        pairs = ((source, rule, reader.name) for reader in self.nodes for source, rule in reader.rules.items())
        return _grouped((name, (s, reader)) for s, rule, reader in pairs for name in dict.fromkeys(rule.contexts))

    def private_pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every pair (source, reader) that is declared private."""
        for reader in self.nodes:
            yield from ((source, reader.name) for source, rule in reader.rules.items() if rule.mode.keeps_out)

    def with_rule(self, source: str, reader: str, rule: VisibilityRule) -> Chart:
        """Return a copy with another rule for one pair."""
        nodes = (replace(n, rules={**n.rules, source: rule}) if n.name == reader else n for n in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def as_served(self) -> Chart:
        """Return a copy in which nodes whose engines encode all text again read text instead of KV."""

        def rules(node: ChartNode) -> dict[str, VisibilityRule]:
            return {s: r.without("encoding") if r.mode.shares_kv else r for s, r in node.rules.items()}

        nodes = (node if node.keeps_kv else replace(node, rules=rules(node)) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))


def _grouped(pairs: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Return values by key, in their order."""
    groups: dict[str, list[Item]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def is_inside(name: str, source: str) -> bool:
    """Return whether a node is the source of this name, or inside the graph of this name."""
    return name == source or name.startswith(f"{source}|")


def names_of(name: str) -> Iterator[str]:
    """Return the names under which readers know a node: those of the graphs around it, and its own."""
    parts = name.split("|")
    return ("|".join(parts[:count]) for count in range(1, len(parts) + 1))
