"""Traces every source and private context that reached a message, through lineage and the entries of one graph's state.

An engine serves many graphs, and the same text in the same position is one message to it, whoever wrote it. Who wrote
it depends on the view: to a reader, it is from the sources that the reader sees.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from choreo_agents.engine import Engine
from choreo_agents.engine.inspect import Descent
from choreo_agents.errors import HandleError, VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.chart import Chart, OnViolation, Tokens, names_of
from choreo_agents.graph.audit.report import AuditReport, Finding, Hop
from choreo_agents.graph.state import HandleEntry, handle_for, handles_of, model_of
from choreo_agents.graph.visibility import EVERYONE, REENCODED, START_SOURCE, Channel, source_of_author
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import instructions, question


class Influence(NamedTuple):
    """A node or private context that reached a message, and through which channel; `EVERYONE`: any of them may have."""

    name: str
    channel: Channel


class _Step(NamedTuple):
    """A message on the way back through lineage, and the number of the entry in whose view it is."""

    message: str
    entry: int
    channel: Channel


class InfluenceTracker:
    """Traces influences on the messages of one state.

    Args:
        engines: The engines that have the lineage of the messages.
        chart: The graph's declarations.
        entries: All messages in the state.
        home: Path of the graph, as entries name its nodes: `team`; empty if no graph is around it.
    """

    def __init__(self, engines: Iterable[Engine], chart: Chart, entries: Sequence[HandleEntry], home: str = "") -> None:
        self._by_model = {engine.model.adapter.fingerprint: engine for engine in engines}
        self._descents: dict[str, Descent] = {}
        """Lineage of each loaded message, by id."""
        self._engines: dict[str, Engine] = {}
        """The engine that made each loaded message, by id."""
        self._chart = chart
        self._entries = list(entries)
        self._numbers = {id(entry): number for number, entry in enumerate(self._entries)}
        self._prefix = f"{home}|" if home else ""
        self._texts = {engine: chart.texts(engine) for engine in self._by_model.values()}
        self._expanded: dict[_Step, tuple[frozenset[Influence], Sequence[_Step]]] = {}
        self._traced: dict[_Step, frozenset[Influence]] = {}
        self._by_message: dict[str, list[int]] = {}
        self._thoughts: dict[str, list[int]] = {}
        """Numbers of the entries that a message of thoughts led to, by its id."""
        for number, entry in enumerate(self._entries):
            for message in (*(handle.id for handle in handles_of(entry)), *entry.get("earlier", ())):
                self._by_message.setdefault(message, []).append(number)
            if thought := entry.get("thoughts"):
                self._thoughts.setdefault(thought["id"], []).append(number)

    def trace(self, entry: HandleEntry, model: str | None = None) -> frozenset[Influence] | None:
        """Return all that had reached an entry's message when it was decoded; None: its model is not served here.

        Args:
            entry: One of the entries of the state.
            model: Trace this model's encoding of the message instead.
        """
        handle = (None if model is None else handle_for(entry, model)) or next(handles_of(entry))
        if handle.base_model not in self._by_model:
            return None
        self._load(handle)
        start, own = _Step(handle.id, self._numbers[id(entry)], "encoding"), set[Influence]()
        self._note_thoughts(start.entry, "words", own)
        return self._trace_all(start) | own

    def _load(self, handle: MessageHandle) -> None:
        """Load the lineage of a message and of all that it descends from. KV ends with its model, text is followed from
        one model to the next.

        Raises:
            HandleError: Its engine does not know the message any more.
        """
        tried, queue = set[str](), [handle]
        for source in queue:
            engine = self._by_model.get(source.base_model)
            if engine is None or source.id in tried or source.id in self._descents:
                continue
            tried.add(source.id)
            try:
                descents = engine.inspect.descent([source], self._descents)
            except HandleError:
                if source is handle:
                    raise
                continue  # its engine has dropped it; its author is known from the entries all the same
            self._descents |= descents
            self._engines |= dict.fromkeys(descents, engine)
            queue += (foreign for descent in descents.values() for foreign in descent.foreign)

    def _trace_all(self, start: _Step) -> frozenset[Influence]:
        """Return all that reached a message as an entry has it."""
        reached, seen, steps = set[Influence](), {start}, [start]
        for step in steps:
            if step in self._traced:
                reached |= self._traced[step]
                continue
            if step not in self._expanded:
                self._expanded[step] = self._expand(step)
            own, before = self._expanded[step]
            reached |= own
            steps += set(before) - seen
            seen.update(before)
        # As text it carries the same names: which steps there are does not depend on the channel.
        words = frozenset(Influence(name, "words") for name, _ in reached)
        self._traced |= {start._replace(channel="words"): words, start: frozenset(reached)}
        return self._traced[start]

    def _expand(self, step: _Step) -> tuple[frozenset[Influence], Sequence[_Step]]:
        """Return what reached a message within its entry's own view, and the steps on into the views of other
        entries."""
        reached, parents, visited = set[Influence](), list[_Step](), set[_Step]()
        if self._entries[step.entry].get("answered"):
            reached |= self._assume_all(step.channel)
        queue = list(self._parents(step))
        for ancestor in queue:
            if ancestor in visited:
                continue
            visited.add(ancestor)
            for origin in self._label(ancestor, reached):
                if origin.entry == step.entry:
                    queue += self._parents(origin)
                elif origin not in visited:
                    visited.add(origin)
                    parents.append(origin)
        return frozenset(reached), parents

    def _assume_all(self, channel: Channel) -> set[Influence]:
        """Return what may have reached a chat model's answer: all that its function can read, what was removed since
        included."""
        authors = {START_SOURCE, *self._chart.by_name, *map(self._author, range(len(self._entries)))}
        reached = {Influence(EVERYONE, channel)}
        for name in authors:
            self._note(name, channel, reached)
        for name in self._chart.names - authors:
            self._note(name, "words", reached)
        return reached

    def _parents(self, step: _Step) -> Iterator[_Step]:
        """Yield the messages that a message attended to, and those whose text it repeats."""
        keeps_kv = self._engines[step.message].method == "choreo"
        for parent in self._descents[step.message].parents:
            yield _Step(parent, step.entry, step.channel if keeps_kv else "words")
        for source in self._sources(step.message):
            yield _Step(source, step.entry, "words")

    def _sources(self, message: str) -> Sequence[str]:
        """Return the messages whose text it repeats, those of other models included where they are loaded: those in
        this state if there are any, else all."""
        descent = self._descents[message]
        sources = [*descent.sources, *(source.id for source in descent.foreign if source.id in self._descents)]
        return [source for source in sources if source in self._by_message] or sources

    def _label(self, step: _Step, reached: set[Influence]) -> Iterator[_Step]:
        """Record what a message in an entry's view contributes. Yield the steps from it into the view in which it was
        made."""
        channels, own = self._entries_read(step.message, step.entry), self._own_contexts(step)
        for number, channel in channels.items():
            own += self._authors(number) if channel == "words" else []
            self._note_entry(number, step.channel, "words", reached)
            # Text that is encoded again in the same position is the same message.
            yield step._replace(entry=number, channel="words" if channel == "words" else step.channel)
        # The author of an entry has its own thoughts in its view.
        recalled = [n for n in self._thoughts.get(step.message, ()) if self._persona(n) == self._persona(step.entry)]
        for number in recalled:
            self._note_entry(number, step.channel, step.channel, reached)
            yield step._replace(entry=number)
        descent = self._descents[step.message]
        copied = [number for source in descent.sources for number in self._entries_read(source, step.entry)]
        own += [name for number in copied for name in self._authors(number)]
        thought = {f"{name}.thoughts" for name in own} & {*map(self._local, descent.authors)}
        for name in (*own, *thought):
            self._note(name, step.channel, reached)
        if own:
            yield step
        elif not channels and not recalled:
            yield from self._label_undeclared(step, reached)

    def _label_undeclared(self, step: _Step, reached: set[Influence]) -> Iterator[_Step]:
        """Record a message that no declaration explains: it may come from any node or context with that text."""
        if numbers := self._by_message.get(step.message):
            for number in numbers:
                self._note_entry(number, step.channel, "words", reached)
                yield step._replace(entry=number)
            return
        descent, own_texts = self._descents[step.message], self._texts[self._engines[step.message]]
        named = [name for own in own_texts.values() for name, texts in own.items() if descent.tokens in texts]
        scoped = self._scoped(step.entry)
        for name in [name for name in named if name in scoped] or named or map(self._local, descent.authors):
            self._note(name, step.channel, reached)
        yield step

    def _note_entry(self, number: int, channel: Channel, thoughts: Channel, reached: set[Influence]) -> None:
        for name in self._authors(number):
            self._note(name, channel, reached)
        self._note_thoughts(number, thoughts, reached)

    def _note_thoughts(self, number: int, channel: Channel, reached: set[Influence]) -> None:
        """Record the thoughts behind an entry. No other node attends to thoughts, so nothing is above them."""
        if "thoughts" in self._entries[number]:
            for name in self._authors(number):
                self._note(f"{name}.thoughts", channel, reached)

    def _note(self, name: str, channel: Channel, reached: set[Influence]) -> None:
        if name in self._chart.names or not self._chart.by_name:
            reached.add(Influence(name, channel))

    def _entries_read(self, message: str, reader: int) -> dict[int, Channel]:
        """Return the entries as which an entry's author may have read a message, with the channel of each."""
        channels = {number: self._channel_between(reader, number) for number in self._by_message.get(message, ())}
        return {number: channel for number, channel in channels.items() if channel is not None}

    def _channel_between(self, reader: int, number: int) -> Channel | None:
        """Return how the author of one entry sees another entry: its encoding, its text alone, or (None) nothing."""
        node, source = self._chart.by_name.get(self._author(reader)), self._author(number)
        if reader == number or self._persona(reader) == self._persona(number):
            return "encoding"
        rules = {} if node is None else node.rules
        modes = [rule.mode for name, rule in rules.items() if source == name or source.startswith(f"{name}|")]
        if any(mode.shares_kv for mode in modes):
            return "encoding"
        return "words" if any(mode.shows for mode in modes) or source in self._scoped(reader) else None

    def _scoped(self, reader: int) -> set[str]:
        """Return the private contexts in which text is encoded again for an entry's author."""
        node = self._chart.by_name.get(self._author(reader))
        return set() if node is None else {name for rule in node.rules.values() for name in rule.contexts}

    def _own_contexts(self, step: _Step) -> list[str]:
        """Return the private contexts of an entry's author whose text is exactly this message."""
        persona, tokens = self._persona(step.entry), self._descents[step.message].tokens
        engine = self._engines[step.message]
        names = [name for name, texts in self._texts[engine].get(persona, {}).items() if tokens in texts]
        if tokens in self._questions[engine].get(persona, ()):
            names.append(f"{persona}.system")
        return names

    @cached_property
    def _questions(self) -> Mapping[Engine, Mapping[str, set[Tokens]]]:
        """Tokens of prompts and of instructions for single messages, by engine and persona: an engine encodes them
        again where it has no handle of them."""
        questions: dict[Engine, dict[str, set[Tokens]]] = {engine: {} for engine in self._by_model.values()}
        for engine, by_persona in questions.items():
            for number, entry in enumerate(self._entries):
                prompt = entry.get("prompt_text")
                forms = [question(prompt, engine.chat).text] if prompt else []
                for system in entry.get("system_texts", ()):
                    forms += [instructions(system, engine.chat, later=later).text for later in (True, False)]
                    forms.append(question(system, engine.chat).text)
                turns = {tuple(engine.model.encode(form)) for form in forms}
                by_persona.setdefault(self._persona(number), set()).update(turns)
        return questions

    def _author(self, number: int) -> str:
        return self._local(self._entries[number]["author"])

    def _authors(self, number: int) -> Iterator[str]:
        """Yield an entry's author, the tool's node, and the author that it claims without a signature."""
        yield self._author(number)
        if tool_node := self._entries[number].get("tool_node"):
            yield self._local(tool_node)
        if claimed := self._entries[number].get("unverified_author"):
            yield self._local(str(claimed["author"]))

    def _persona(self, number: int) -> str:
        author = self._author(number)
        node = self._chart.by_name.get(author)
        return node.persona if node is not None else self._local(self._entries[number].get("persona") or author)

    def _local(self, name: str) -> str:
        """Return a name as the graph's own chart has it; outside names get a `|` in front, which no node of the chart
        has."""
        if name.startswith(self._prefix):
            return name.removeprefix(self._prefix)
        return name if name == START_SOURCE or name in self._chart.modules else f"|{name}"


# The same promises at call time: every encoding is checked before a reader attends to it


@dataclass(frozen=True)
class Guard:
    """Sources and contexts that must not reach one reader. All names are those of the reader's own graph."""

    hidden: frozenset[str] = frozenset()
    """Sources declared private to the reader; in a stock graph `EVERYONE` may be among them."""
    forbidden: Mapping[Channel, frozenset[str]] = field(default_factory=dict)
    """Contexts that a policy keeps from the reader, by channel."""
    on_violation: OnViolation = "raise"
    chart: Chart = field(default_factory=lambda: Chart(()))
    """The graph's declarations, by which messages are attributed to nodes and contexts."""
    spared: frozenset[str] = frozenset()
    """If everyone is private to the reader, the exceptions: the sources it names, and its own persona."""

    home: str | None = None
    """Path of the graph whose names these are; None: it is the reader's own graph."""

    def home_of(self, reader: str) -> str:
        """Return the path of the graph whose names the guard uses."""
        return reader.rpartition("|")[0] if self.home is None else self.home


class RuntimeGuard:
    """The checks of one call of one reader.

    Args:
        guard: What must not reach the reader.
        engines: The reader's engine, and those of the graph: they know what messages of other models were made of.
        reader: The path of its node.
        entries: All messages in the graph's state.
    """

    def __init__(self, guard: Guard, engines: Sequence[Engine], reader: str, entries: Sequence[HandleEntry]) -> None:
        self._guard, self._reader, self._entries = guard, reader, entries
        self._model = engines[0].model.adapter.fingerprint
        # Reversed: of two engines of one model the reader's counts.
        self._tracker = InfluenceTracker(reversed(engines), guard.chart, entries, guard.home_of(reader))
        self._hidden = guard.hidden if EVERYONE not in guard.hidden else guard.hidden.union(self._undeclared_sources())

    def allows(self, entry: HandleEntry, *, words_only: bool) -> bool:
        """Return whether the reader may attend to an encoding as it is; False: encode its text again.

        Args:
            entry: The message, one of the entries.
            words_only: True if the reader gets a fresh encoding of its text.

        Raises:
            VisibilityError: The reader may not, and the policy says `raise`.
        """
        guard = self._guard
        violation = self._find_violation(entry, words_only)
        if violation is None:
            return True
        channel, reason = violation
        if guard.on_violation == "reencode" and channel == "encoding":
            return False
        who = source_of_author(entry["author"], self._reader) or entry["author"]
        node = self._reader.rsplit("|", maxsplit=1)[-1]
        edge = f"visibility of {who!r} to {node!r}"
        message = f"{reason}, but the encoding that {who!r} shares attended to it: set the {edge} to {REENCODED!r}"
        if channel == "words":
            message = f"{reason}, but the text of {who!r} may be derived from it: remove the {edge}"
        if guard.on_violation == "warn":
            warnings.warn(message, VisibilityWarning, stacklevel=2)
            return True
        raise VisibilityError(message)

    def _undeclared_sources(self) -> Iterator[str]:
        """Yield every source of a message that the reader neither names nor shares a persona with."""
        for entry in self._entries:
            names = entry["author"], entry.get("persona", entry["author"])
            source, persona = (source_of_author(name, self._reader) for name in names)
            if source is not None and not {source, persona} & {*self._guard.spared, self._reader.rpartition("|")[2]}:
                yield source

    def _find_violation(self, entry: HandleEntry, words_only: bool) -> tuple[Channel, str] | None:
        """Return the channel and the first promise that the view would break; None if it breaks none."""
        guard, node = self._guard, self._reader.rsplit("|", maxsplit=1)[-1]
        reached = sorted(self._tracker.trace(entry, self._model) or ())
        for name, channel in () if words_only else reached:
            # A message from inside a subgraph counts as that of the subgraph's node.
            source = next((alias for alias in names_of(name) if alias in self._hidden), name)
            if channel == "encoding" and source in self._hidden:
                return "encoding", f"{source!r} is declared private to {node!r}"
            if channel == "encoding" and source == EVERYONE and self._hidden:
                reason = f"{min(self._hidden)!r} is declared private to {node!r}, and may be in a function's prompt"
                return "encoding", reason
        for name, channel in reached:
            through: Channel = "words" if words_only else channel
            if name in guard.forbidden.get(through, frozenset()):
                return through, f"the policy keeps {name!r} from {node!r}"
        return None


# The audit of a finished run


def audit_entries(engines: Iterable[Engine], chart: Chart, entries: Sequence[HandleEntry]) -> AuditReport:
    """Report which private contexts reached the authors of these messages, and through which channel.

    Messages of models that none of the engines runs cannot be traced: the report lists them as `outside`.
    """
    contexts = {context.name: context for context in chart.contexts}
    tracker = InfluenceTracker(engines, chart, entries)
    unserved: Counter[str] = Counter()
    findings: dict[tuple[str, str, Channel], Finding] = {}
    for entry in entries:
        reader = entry["author"]
        if reader not in chart.by_name or chart.by_name[reader].is_function:
            continue
        persona = chart.by_name[reader].persona
        reached = tracker.trace(entry)
        if reached is None:
            unserved[model_of(entry["handle"])] += 1
        for name, channel in sorted(reached or ()):
            context, key = contexts.get(name), (name, persona, channel)
            if context is None or reader in context.owners or key in findings:
                continue
            hop = Hop(source=name, reader=reader, by=f"superstep {entry['superstep']}")
            violation = chart.violation_of(context, persona, channel)
            findings[key] = Finding(*key, violation, find_path=partial(tuple, [hop]))
    unknown = (
        f"what reached {n} messages of model {model!r}, which no engine here runs" for model, n in unserved.items()
    )
    return AuditReport(chart.contexts, findings.values, outside=(*chart.outside, *unknown))
