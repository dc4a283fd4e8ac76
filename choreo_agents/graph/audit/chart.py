"""A graph as the audit sees it: who speaks, with what private contexts, and who reads whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from choreo_agents.graph.audit.policy import Policy
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


@dataclass(frozen=True)
class ChartNode:
    """A node that may add messages, named by its path: `team|judge`."""

    name: str
    persona: str
    """Whose node it is: the path again, or `team|alice` for all nodes of Alice's."""
    model: str = ""
    """The fingerprint of the model that it runs on; empty: nobody has said."""
    keeps_kv: bool = True
    """Whether its engine hands on encodings: not under a method that encodes text again."""
    is_function: bool = False
    """It reads the words in the state instead of a view, and its messages are encoded alone."""
    is_silent: bool = False
    """It adds no messages after all."""
    routes: bool = False
    """It may send control anywhere, and write any channel."""
    has_system: bool = False
    has_prompt: bool = False
    """It is asked something that nobody else sees."""
    may_be_sent: bool = False
    """A `Send` may choose what it sees, and how: a route, or a function, can send to any node of its graph."""
    confidential: bool = False
    thinks: bool = False
    """It may think before it speaks: what it says is made of that."""
    calls: bool = False
    """It may call tools: what functions of the graph return is its own, and read by whoever reads it."""
    recalls: bool = False
    """Its model's template shows it what it has thought in earlier turns."""
    schema: str | None = None
    """Whose modules it imports."""
    modules: tuple[str, ...] = ()
    """The confidential ones of these. A module is one for all graphs: its name has no path before it."""
    rules: Mapping[str, VisibilityRule] = field(default_factory=dict)
    """Its sources by path; one that is a graph stands for all that is said in it."""
    undeclared: frozenset[str] = frozenset()
    """Those of which nothing is said by name: what they say confidentially is not for it."""

    def reads(self, source: str, said_by: ChartNode) -> bool:
        """Whether it has anything of what a node says that it knows under this name."""
        rule = self.rules.get(source)
        hidden = said_by.is_silent or (source in self.undeclared and said_by.confidential)
        return rule is not None and rule.mode.shows and not hidden

    def speaks_to(self, reader: ChartNode) -> bool:
        """Whether a reader's model can read its encodings; what a function writes, each model encodes for itself."""
        return self.is_function or "" in (self.model, reader.model) or self.model == reader.model


@dataclass(frozen=True)
class Edge:
    """Who can read whom, and how."""

    source: str
    reader: str
    mode: VisibilityMode | None
    """What the reader has of the source; None: it is a function, which reads the words in the graph's state, or has a
    chat model read them."""
    declared: tuple[str, str] | None
    """Where it was declared: a source, which may be a whole graph, and a reader. None if nobody had to."""
    label: str
    may_be_sent: bool = False
    """A `Send` may hand the reader less than the rule allows: words, where that shares encodings."""
    is_alone: bool = False
    """What the source says is encoded alone for the reader: nothing that it attended to comes along."""

    @property
    def shares_kv(self) -> bool:
        return self.mode is not None and self.mode.shares_kv

    def opens(self, presence: Presence) -> Iterator[tuple[Channel, str]]:
        """The channels through which the reader comes to have what the source has, and by what."""
        # A function may have a chat model read all words of the state: what that answers attended to them.
        mode = self.mode or REENCODED
        usual: Sequence[Channel] = (
            ("words",) if mode.shows and self.is_alone and presence != "text" else mode.opens(presence)
        )
        for channel in usual:
            yield channel, self.label
        if self.shares_kv and self.may_be_sent:
            for channel in REENCODED.opens(presence):
                if channel not in usual:
                    yield channel, f"{SENT} {REENCODED.name}"


@dataclass(frozen=True)
class Chart:
    """All nodes, those of subgraphs included, and what stands outside of any proof."""

    nodes: tuple[ChartNode, ...]
    outside: tuple[str, ...] = ()
    policies: tuple[tuple[str, Policy], ...] = ()
    """The graph's own, and those of its subgraphs, behind what the subgraph's nodes begin with."""
    words_of: frozenset[tuple[str, str]] = frozenset()
    """Functions and readers that get the words alone of what chat models answer in these: else it could carry there
    what is kept from somebody."""

    def node(self, name: str) -> ChartNode:
        return self._by_name[name]

    def inside(self, source: str) -> Sequence[ChartNode]:
        """The nodes whose messages a reader knows under this name."""
        return self._by_source.get(source, ())

    def of_persona(self, persona: str) -> Sequence[ChartNode]:
        """All nodes of a persona."""
        return self._by_persona.get(persona, ())

    @cached_property
    def _by_name(self) -> Mapping[str, ChartNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _by_source(self) -> Mapping[str, Sequence[ChartNode]]:
        found: dict[str, list[ChartNode]] = {}
        for node in self.nodes:
            for source in names_of(node.name):
                found.setdefault(source, []).append(node)
        return found

    @cached_property
    def _by_persona(self) -> Mapping[str, Sequence[ChartNode]]:
        found: dict[str, list[ChartNode]] = {}
        for node in self.nodes:
            found.setdefault(node.persona, []).append(node)
        return found

    @cached_property
    def contexts(self) -> tuple[PrivateContext, ...]:
        """All private contexts: what only a persona is told, confidential messages and thoughts by node, and
        confidential modules."""
        found: list[PrivateContext] = []
        owners = {persona: tuple(node.name for node in nodes) for persona, nodes in self._by_persona.items()}
        told: set[str] = set()
        importers: dict[str, set[str]] = {}
        for node in self.nodes:
            kin = owners[node.persona]
            if (node.has_system or node.has_prompt) and node.persona not in told:
                told.add(node.persona)
                found.append(PrivateContext(name=f"{node.persona}.system", kind="system", owners=kin))
            if node.confidential:
                found.append(PrivateContext(name=node.name, kind="message", owners=kin))
            if node.thinks:
                found.append(PrivateContext(name=f"{node.name}.thoughts", kind="thoughts", owners=kin))
            for module in node.modules:
                importers.setdefault(module, set()).add(node.persona)
        for module, personas in importers.items():
            kin = tuple(node.name for node in self.nodes if node.persona in personas)
            found.append(PrivateContext(name=module, kind="module", owners=kin))
        return tuple(found)

    @cached_property
    def guarded(self) -> tuple[PrivateContext, ...]:
        """The private contexts that policies name."""
        named = {name for _, policy in self.policies for name in policy.confidential}
        return tuple(context for context in self.contexts if context.name in named)

    def forbids(self, context: PrivateContext, persona: str, channel: Channel) -> bool:
        """Whether any policy keeps a context from a persona, to which it does not belong, through a channel."""
        return any(
            policy.forbids(context, persona, channel)
            for prefix, policy in self.policies
            # Inside a subgraph its policy was kept when it was compiled.
            if not (prefix and persona.startswith(prefix))
        )

    def broken(self, context: PrivateContext, persona: str, channel: Channel) -> str:
        """Which promise is broken where a context gets to a persona through a channel; empty: none."""
        return f"the policy keeps {context.name!r} from {persona!r}" if self.forbids(context, persona, channel) else ""

    @cached_property
    def outgoing(self) -> Mapping[str, Sequence[Edge]]:
        """Every way on which something that was said can reach a reader, by who said it."""
        found: dict[str, list[Edge]] = {}
        for edge in self.edges():
            found.setdefault(edge.source, []).append(edge)
        return found

    def edges(self) -> Iterator[Edge]:
        """The same, reader by reader."""
        for reader in self.nodes:
            yield from self._results(reader)
            for source, rule in reader.rules.items():
                if source == START_SOURCE:
                    continue
                for node in self.inside(source):
                    if node.persona != reader.persona and reader.reads(source, node):
                        mode, label = _between(node, reader, rule.mode, rule.words())
                        where, alone = (source, reader.name), (node.name, reader.name) in self.words_of
                        yield Edge(node.name, reader.name, mode, where, label, reader.may_be_sent, alone)
            if reader.is_function:
                others = (node for node in self.nodes if node is not reader and not node.is_silent)
                yield from (Edge(node.name, reader.name, None, None, "state") for node in others)
                continue
            for node in self.of_persona(reader.persona):
                # What it said itself reaches a node again as other than KV only by a Send.
                if node is not reader or reader.may_be_sent:
                    mode, label = _between(node, reader, SHARED, "own")
                    alone = (node.name, reader.name) in self.words_of
                    yield Edge(node.name, reader.name, mode, None, label, reader.may_be_sent, alone)

    def _results(self, reader: ChartNode) -> Iterator[Edge]:
        """How what tools return reaches a reader: as what their callers say does."""
        callers = () if reader.is_function else self._callers
        if not callers:
            return
        kept = [source for source, rule in reader.rules.items() if not rule.mode.shows]
        shown = [node for node in self._functions if not any(is_inside(node.name, source) for source in kept)]
        for caller in callers:
            if caller.persona == reader.persona:
                yield from (Edge(node.name, reader.name, SHARED, None, "called", is_alone=True) for node in shown)
                continue
            for source in names_of(caller.name):
                rule = reader.rules.get(source)
                if rule is not None and rule.mode.shows:
                    where = (source, reader.name)
                    yield from (
                        Edge(node.name, reader.name, rule.mode, where, rule.words(), reader.may_be_sent, is_alone=True)
                        for node in shown
                    )

    @cached_property
    def _callers(self) -> Sequence[ChartNode]:
        return [node for node in self.nodes if node.calls]

    @cached_property
    def _functions(self) -> Sequence[ChartNode]:
        return [node for node in self.nodes if node.is_function and not node.is_silent]

    @cached_property
    def scopes(self) -> Mapping[str, Sequence[tuple[str, str]]]:
        """By the name of a context, every (source, reader) whose fresh encodings attend to it."""
        found: dict[str, list[tuple[str, str]]] = {}
        for reader in self.nodes:
            for source, rule in reader.rules.items():
                for name in dict.fromkeys(rule.contexts):
                    found.setdefault(name, []).append((source, reader.name))
        return found

    def private_pairs(self) -> Iterator[tuple[str, str]]:
        """Every (source, reader) that is declared private."""
        for reader in self.nodes:
            for source, rule in reader.rules.items():
                if rule.mode.keeps_out:
                    yield source, reader.name

    def with_rule(self, source: str, reader: str, rule: VisibilityRule) -> Chart:
        """The same with another rule for one pair."""
        nodes = tuple(
            replace(node, rules={**node.rules, source: rule}) if node.name == reader else node for node in self.nodes
        )
        return replace(self, nodes=nodes)

    def as_served(self) -> Chart:
        """The same where engines that encode text again serve nodes: no encoding is handed on to these."""
        nodes = []
        for node in self.nodes:
            if node.keeps_kv:
                nodes.append(node)
                continue
            rules = {s: r.without("encoding") if r.mode.shares_kv else r for s, r in node.rules.items()}
            nodes.append(replace(node, rules=rules))
        return replace(self, nodes=tuple(nodes))


def _between(source: ChartNode, reader: ChartNode, mode: VisibilityMode, label: str) -> tuple[VisibilityMode, str]:
    """What a reader has of a source, and what that is called: of another model's, words alone."""
    if not mode.shares_kv or source.speaks_to(reader):
        return mode, label
    return REENCODED, f"{label} {ACROSS}"


def is_inside(name: str, source: str) -> bool:
    """Whether a node is what a reader knows under a name."""
    return name == source or name.startswith(f"{source}|")


def names_of(name: str) -> Iterator[str]:
    """The names under which readers know a node: those of the graphs that it stands in, and its own."""
    parts = name.split("|")
    return ("|".join(parts[:count]) for count in range(1, len(parts) + 1))
