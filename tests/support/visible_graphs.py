"""Random graphs of agents with private contexts, functions and Sends, and runs of them that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import MessagesState, StateGraph

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    MessageHandle,
    Policy,
    Sampling,
    Send,
    VisibilityMode,
    VisibilityRule,
    send,
)
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE, Positions, mode_of
from choreo_agents.pml import Prompt, Schema

NAMES = ("ann", "bob", "cleo", "dan")
ECHO = "echo"
"""A function that reads the words in the state and says something."""
HOUSE = """
<schema name="house">
  Look around.
  <module name="hall">Here is a lamp.</module>
  <module name="cellar" confidential="true">
    There are {cellar} bags. <module name="box">One has {box} coins.</module>
  </module>
</schema>
"""
CELLAR, BOX = "house/cellar", "house/cellar/box"
IMPORTS = {"hall": "<hall/>", "cellar": "<hall/><cellar/>", "box": "<cellar><box/></cellar> Be quick, {name}."}
SPEAKING = Sampling(temperature=1.0, max_tokens=3, stop_tokens=(), logprobs=8)


class State(ChoreoState, total=False):
    """Rounds that are over."""

    rounds: int


@dataclass(frozen=True)
class Speaker:
    """An agent of a random graph."""

    name: str
    persona: str
    has_system: bool
    has_prompt: bool
    confidential: bool
    imports: str = ""
    """Which modules it is told by, instead of words: one of `IMPORTS`."""


@dataclass(frozen=True)
class Sending:
    """How a route starts a node: a `Send` for each branch."""

    kinds: tuple[str, ...]
    """Of each: `chosen`, by `send`, among what the node may see; `state`: all of it; `words`: messages without handles.
    """
    seed: int
    """Of the choice, which depends on who said something when, and on no words."""

    def branches(self, spec: Spec, reader: str, state: Mapping[str, Any]) -> list[Send]:
        return [self._branch(spec, reader, state, place, kind) for place, kind in enumerate(self.kinds)]

    def _branch(self, spec: Spec, reader: str, state: Mapping[str, Any], place: int, kind: str) -> Send:
        # Branches that see the same would be told apart by who comes first, in no two runs alike.
        own = HumanMessage("Check it." + " Again." * place)
        if kind == "state":
            return Send(reader, {**state, "messages": [*state["messages"], own]})
        if kind == "words":
            return Send(reader, {"messages": [*state["messages"], own]})
        chosen: dict[str, list[HandleEntry]] = {"shared": [], "reencoded": []}
        present = {message.id for message in state["messages"]}
        for entry in state["handles"]:
            if entry["message_id"] not in present:
                continue  # what another branch was sent of its own
            rng = Random(f"{self.seed} {place} {[entry[key] for key in ('author', 'superstep', 'branch', 'call')]}")
            modes = spec.sendable(reader, entry, state["handles"])
            if modes and rng.random() < 0.7:
                chosen[rng.choice(modes)].append(entry)
        return send(reader, state, shared=chosen["shared"], reencoded=chosen["reencoded"], messages=[own])


@dataclass(frozen=True)
class Spec:
    """A graph as plain data."""

    speakers: tuple[Speaker, ...]
    rules: Mapping[tuple[str, str], VisibilityRule]
    """By source and reader."""
    layers: tuple[tuple[str, ...], ...]
    rounds: int
    positions: Positions = "sequential"
    numbers: Mapping[str, int] = field(default_factory=dict)
    """What stands in the system prompt of each persona, and in each confidential module."""
    sent: Mapping[str, Sending] = field(default_factory=dict)
    """The nodes of later layers that a route sends to; the others are started by an edge."""
    passed: frozenset[tuple[str, str]] = frozenset()
    """Pairs that are declared by way of a function that says nothing, as far as such a function passes them on."""

    @property
    def sends(self) -> int:
        """In a run."""
        return self.rounds * sum(len(sending.kinds) for sending in self.sent.values())

    def graph(
        self,
        policy: Policy | None = None,
        *,
        echoing: bool = True,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        behind: Mapping[int, tuple[str, Any]] | None = None,
    ) -> ChoreoGraph:
        """The graph: layers one after the other, as many rounds of them.

        Args:
            policy: Its own.
            echoing: What the function says depends on all words in the state; else it is always the same.
            options: Of agents, by name, besides.
            behind: A node, with its name, between a layer of this number and what follows it.
        """
        graph = ChoreoGraph(State, system="Root.", policy=policy, positions=self.positions)
        options, behind = options or {}, behind or {}
        echoes = any(ECHO in layer for layer in self.layers)
        rules = {pair: rule for pair, rule in self.rules.items() if pair[0] != ECHO or echoes}
        secret = {START_SOURCE, *(speaker.name for speaker in self.speakers if speaker.confidential)}
        passed = {p: rule for p, rule in rules.items() if p in self.passed and rule.mode.shows and p[0] not in secret}
        for speaker in self.speakers:
            number = self.numbers.get(speaker.persona, 3)
            system = f"{speaker.persona} has {number} red kites." if speaker.has_system else None
            agent = Agent(
                speaker.name,
                system=None if speaker.imports else system,
                prompt=self._told(speaker, system),
                persona=speaker.persona,
                confidential=speaker.confidential,
                reads={s: rule for (s, r), rule in rules.items() if r == speaker.name and (s, r) not in passed},
                **({"sampling": SPEAKING} | dict(options.get(speaker.name, {}))),
            )
            graph.add_node(speaker.name, agent)
        if echoes:
            graph.add_node(ECHO, echo if echoing else mutter)
        for name in self.layers[0]:
            graph.add_edge(START, name, visibility={})
        for number, ((source, reader), rule) in enumerate(passed.items()):
            hall = f"hall {number}"
            graph.add_node(hall, lambda _: None, writes=()).add_edge(START, hall, visibility={})
            # Whether one narrows the other or the other the one is the same.
            into, out = (rule, "shared") if number % 2 and not rule.contexts else ("shared", rule)
            graph.set_visibility(source, hall, into).set_visibility(hall, reader, out)
        ends = [*self.layers]
        for number, (name, node) in behind.items():
            graph.add_node(name, node).add_edge(list(self.layers[number]), name, visibility={})
            ends[number] = (name,)
        for number, (before, after) in enumerate(zip(ends, self.layers[1:], strict=False)):
            started = [name for name in after if name not in self.sent]
            for name in started:
                graph.add_edge(list(before), name, visibility={})
            if started != list(after):
                graph.add_node(f"gate {number}", lambda _: None)
                graph.add_edge(list(before), f"gate {number}", visibility={})
                route = self._route([name for name in after if name in self.sent])
                graph.add_conditional_edges(f"gate {number}", route, [*after], visibility={})
        rounds, first = self.rounds, list(self.layers[0])

        def count(state: State) -> dict[str, int]:
            return {"rounds": state.get("rounds", 0) + 1}

        def again(state: State) -> list[str]:
            return first if state.get("rounds", 0) < rounds else [END]

        # What is sent to starts one superstep after the others of its layer: the clock waits for all.
        graph.add_node("clock", count)
        graph.add_edge(list(ends[-1]), "clock", visibility={})
        graph.add_conditional_edges("clock", again, [*first, END], visibility={})
        return graph

    def _route(self, names: Sequence[str]) -> Any:
        def route(state: State) -> list[Send]:
            return [one for name in names for one in self.sent[name].branches(self, name, state)]

        return route

    def sendable(self, reader: str, entry: HandleEntry, entries: Sequence[HandleEntry]) -> list[str]:
        """The modes in which a `send` may hand an entry on to a reader."""
        personas = {speaker.name: speaker.persona for speaker in self.speakers}
        author = entry["author"]
        own = personas.get(author) == personas[reader]
        rule = VisibilityRule() if own else self.rules.get((author, reader))
        if rule is None or not rule.mode.shows:
            return []
        later = {e["superstep"] for e in entries if e["author"] == author and e["superstep"] > entry["superstep"]}
        kept = {"all": None, "last": 1}.get(str(rule.history), rule.history)
        if isinstance(kept, int) and len(later) >= kept:
            return []
        return ["shared", "reencoded"] if rule.mode.shares_kv else ["reencoded"]

    def _told(self, speaker: Speaker, system: str | None) -> str | Prompt | None:
        if speaker.imports:
            text = HOUSE.format(cellar=self.numbers.get(CELLAR, 3), box=self.numbers.get(BOX, 3))
            own = f"<system>{system}</system>" if system else ""
            return Schema.from_text(text).prompt(IMPORTS[speaker.imports].format(name=speaker.persona) + own)
        return f"Tell, {speaker.name}." if speaker.has_prompt else None


def echo(state: State) -> dict[str, Any]:
    """A function whose words depend on every word in the state, are always as many, and never twice the same in a run:
    they would be encoded once then, by chance in one run and not in another."""
    digest = hashlib.sha256(" ".join(str(message.text) for message in state["messages"]).encode()).digest()
    return {"messages": [AIMessage(f"I heard {digest[0] % 10} and {digest[1] % 10} by {state.get('rounds', 0)}.")]}


def mutter(_: State) -> dict[str, Any]:
    """The same, whatever the state says."""
    return {"messages": [AIMessage("I heard 4 and 2.")]}


def tell(name: str, state: State) -> dict[str, Any]:
    """The same, other words each time that a function of this name is called."""
    return {"messages": [AIMessage(f"{name} heard {len(state['messages'])}.")]}


class Forced(Mapping[tuple[str, int, int, int], Any]):
    """Tokens for every call, drawn by its name; those of some authors are drawn anew, and some speak freely."""

    def __init__(
        self,
        seed: int,
        changed: frozenset[str] = frozenset(),
        length: int = 3,
        free: frozenset[str] = frozenset(),
    ) -> None:
        self.seed, self.changed, self.length, self.free = seed, changed, length, free

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        return iter(())

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[str, int, int, int]) -> tuple[int, ...] | None:
        if key[0] in self.free:
            return None
        other = key[0] in self.changed
        digest = hashlib.sha256(f"{self.seed} {key} {other}".encode()).digest()
        rng = Random(digest)
        return tuple(rng.choice(LETTERS) for _ in range(self.length if other else 3))


LETTERS = range(38, 64)
"""A to Z of the embedded tokenizer. Others of as many tokens are as many tokens again when their text is encoded again,
or in capitals."""
Key = tuple[str, int, int]
"""A message of a run: its author, its superstep and which branch said it."""


def key_of(entry: HandleEntry) -> Key:
    return entry["author"], entry["superstep"], entry["branch"]


def heard(engine: Engine, state: Mapping[str, Any]) -> dict[Key, list[Any]]:
    """The model's distribution for every token of every message of an agent."""
    found = {}
    for entry in state["handles"]:
        if entry["author"] not in (START_SOURCE, ECHO):
            handle = MessageHandle.model_validate(entry["handle"])
            found[key_of(entry)] = [(chosen.logprob, chosen.top) for chosen in engine.logprobs(handle)]
    return found


OWN = (VisibilityMode("loud", "words", transform=str.upper), VisibilityMode("plainly", "encoding"))
"""Modes that no graph knows by name."""
MODES = ("shared", "shared", "reencoded", "reencoded", "private", None, None, None)


@st.composite
def specs(draw: st.DrawFn, *, personas: bool = True, modes: Sequence[Any] = MODES) -> Spec:
    """Two to four agents, two or three layers, any rules of these modes; None: nothing is declared."""
    names = NAMES[: draw(st.integers(2, 4))]
    speakers = []
    for index, name in enumerate(names):
        shares = personas and index > 0 and draw(st.integers(0, 3)) == 0
        persona = speakers[0].persona if shares else name
        flags = [draw(st.booleans()) for _ in range(3)]
        imports = draw(st.sampled_from(["", "", "", *IMPORTS]))
        speakers.append(Speaker(name, persona, flags[0] or index == 0, flags[1], flags[2], imports))
    owners = {speaker.persona for speaker in speakers if speaker.has_system or speaker.has_prompt}
    systems = {speaker.persona for speaker in speakers if speaker.has_system and not speaker.imports}
    contexts = [f"{persona}.system" for persona in sorted(owners & systems)]
    contexts += [speaker.name for speaker in speakers if speaker.confidential]
    rules: dict[tuple[str, str], VisibilityRule] = {}
    for reader in names:
        for source in (*names, ECHO):
            mode = draw(st.sampled_from(modes))
            if source == reader or mode is None:
                continue
            history = draw(st.sampled_from(["all", "all", "last", 2]))
            scope: Any = "reader"
            if mode_of(mode).encodes_again:
                plain = st.sampled_from(["reader", "reader", "public"])
                named = st.lists(st.sampled_from(contexts or ["none"]), min_size=1, max_size=2, unique=True).map(tuple)
                scope = draw(plain | named if contexts else plain)
            rules[source, reader] = VisibilityRule(mode, history, scope)
        start = draw(st.sampled_from(["shared", "shared", "reencoded"]))
        rules[START_SOURCE, reader] = VisibilityRule(start)
    cut = draw(st.integers(1, len(names) - 1))
    order = draw(st.permutations(names))
    first, second = [*order[:cut]], [*order[cut:]]
    speaks = draw(st.sampled_from(["", "", "first", "second"]))
    (first if speaks == "first" else second if speaks == "second" else []).append(ECHO)
    kinds = st.lists(st.sampled_from(["chosen", "chosen", "chosen", "state", "words"]), min_size=1, max_size=2)
    sent = {
        name: Sending(tuple(draw(kinds)), draw(st.integers(0, 9)))
        for name in second
        if name != ECHO and draw(st.booleans())
    }
    layers = (tuple(first), tuple(second))
    positions: Positions = draw(st.sampled_from(["sequential", "parallel"]))
    passed = draw(st.frozensets(st.sampled_from(sorted(rules)), max_size=3))
    return Spec(tuple(speakers), rules, layers, draw(st.integers(1, 2)), positions, sent=sent, passed=passed)


UNSEEN = VisibilityMode("unseen", "nothing")


@dataclass(frozen=True)
class Nest:
    """A graph of agents, one after the other, with another such graph among them; names come again at each level."""

    kind: str
    """`ours` or `stock`: in LangGraph's own graph nothing is declared of what a graph that is a node sees."""
    keeps: bool | None
    """Whether it keeps a thread of its own."""
    order: tuple[str, ...]
    rules: Mapping[tuple[str, str], str | VisibilityRule]
    """Modes by source, START among them, and reader, as far as they are declared."""
    inner: tuple[str, Nest] | None = None
    """Which of its nodes is a graph, and that."""
    takes: type = ChoreoState
    gives: type = ChoreoState
    """What comes into it, and out of it: with a channel for encodings, or words alone."""
    tells: str = ""
    """Which of its nodes is a function, if it is no graph."""

    def speakers(self, home: str = "") -> Iterator[tuple[str, bool]]:
        """Yield the paths of all nodes that speak, in the order in which they run, and whether each is an agent."""
        for node in self.order:
            if self.inner is not None and node == self.inner[0]:
                yield from self.inner[1].speakers(f"{home}{node}|")
            else:
                yield f"{home}{node}", node != self.tells

    def graph(self, engine: Engine, home: str = "") -> Any:
        """Return it, not compiled; `home` is before what it stands, as in `team|`."""
        schemas: Any = {"input_schema": self.takes, "output_schema": self.gives}
        made: Any = StateGraph(ChoreoState, **schemas)
        if self.kind == "ours":
            made = ChoreoGraph(policy=Policy(on_violation="warn"), **schemas)
        name, inner = self.inner or ("", None)
        before = START
        for node in self.order:
            reads = {source: mode for (source, reader), mode in self.rules.items() if reader == node}
            if inner is not None and node == name:
                options = {"engine": engine} if inner.kind == "ours" else {}
                made.add_node(node, inner.graph(engine, f"{home}{node}|").compile(inner.keeps, **options))
                for source, mode in reads.items() if self.kind == "ours" else ():
                    made.set_visibility(source, node, mode)
            elif node == self.tells:
                made.add_node(node, partial(tell, f"{home}{node}"))
            else:
                # A stock graph has no policy: a promise that others break there is an error.
                kept: Any = {
                    s: UNSEEN if mode == "private" and self.kind == "stock" else mode for s, mode in reads.items()
                }
                agent = Agent(node, engine=engine, reads=kept, system=f"{home}{node} has 3 kites.", sampling=SPEAKING)
                made.add_node(node, agent)
            made.add_edge(before, node, **({"visibility": {}} if self.kind == "ours" else {}))
            before = node
        return made

    def shows(self, author: Sequence[str], reader: Sequence[str], *, is_input: bool = False) -> bool:
        """Tell whether the node of one path sees what that of another says, or what comes as input.

        Args:
            author: Its path; empty for input. `reader`: the other's.
            is_input: Whether it comes into this graph from outside of it.
        """
        if author == reader and not is_input:
            return True
        node, name = reader[0], "" if self.inner is None else self.inner[0]
        if author and not is_input and author[0] == node:
            return self.inner is not None and self.inner[1].shows(author[1:], reader[1:])
        source = author[0] if author and not is_input else START
        says = None if self.kind == "stock" and node == name else self.rules.get((source, node))
        mode = mode_of(
            says.mode if isinstance(says, VisibilityRule) else says or ("shared" if source == START else "private")
        )
        inside = node != name or self.inner is None or self.inner[1].shows(author, reader[1:], is_input=True)
        return mode.shows and inside


@st.composite
def nests(draw: st.DrawFn, levels: int = 3, around: str = "ours") -> Nest:
    """Two or three graphs in each other, the outermost one of ours."""
    name = draw(st.sampled_from(NAMES[:3]))
    is_last = levels == 1 or (levels == 2 and draw(st.booleans()))
    kind = "ours" if levels == 3 else draw(st.sampled_from(["ours", "stock"]))
    inner = None if is_last else (name, draw(nests(levels - 1, kind)))
    keeps = None if levels == 3 else draw(st.sampled_from([None, True]))
    # In a graph of LangGraph's own what functions say is everybody's.
    tells = draw(st.sampled_from(["", *NAMES[:3]])) if levels > 1 and kind == "ours" else ""
    agents = {*NAMES[:3]} - {tells, "" if inner is None else name}
    modes, histories = (
        st.sampled_from(["shared", "shared", "reencoded", "private", None]),
        st.sampled_from(["all", "last"]),
    )
    rules: dict[tuple[str, str], str | VisibilityRule] = {}
    for source, reader in ((s, r) for r in NAMES[:3] for s in (START, *NAMES[:3]) if s != r):
        if (mode := draw(modes)) is None or mode == "private" or (source not in agents and source != START):
            rules |= {} if mode is None else {(source, reader): mode}
            continue
        is_placed = (
            mode == "reencoded" and source == START and kind == "ours" and reader in agents and draw(st.booleans())
        )
        scope: Any = (f"{draw(st.sampled_from(sorted(agents)))}.system",) if is_placed else "reader"
        rules[source, reader] = VisibilityRule(mode, draw(histories), scope)
    schemas = st.sampled_from([ChoreoState, MessagesState])
    takes = draw(schemas) if levels < 3 else ChoreoState
    # What agents say in a graph leaves it in words alone only through one of ours.
    gives = draw(schemas) if levels < 3 and around == "ours" else ChoreoState
    return Nest(kind, keeps, tuple(draw(st.permutations(NAMES[:3]))), rules, inner, takes, gives, tells)
