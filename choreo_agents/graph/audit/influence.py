"""Traces every source and private context that reached a message, through lineage and the entries of one graph's state.

An engine serves many graphs, and the same text in the same position is one message to it, whoever wrote it. Who wrote
it depends on the view: to a reader, it is from the sources that the reader sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from choreo_agents.engine import Engine
from choreo_agents.engine.inspect import Descent
from choreo_agents.errors import HandleError
from choreo_agents.graph.audit.chart import Chart, Tokens
from choreo_agents.graph.audit.closure import components
from choreo_agents.graph.audit.report import AuditReport, Finding, Hop
from choreo_agents.graph.state import HandleEntry, handle_for, handles_of, model_of
from choreo_agents.graph.visibility import EVERYONE, START_SOURCE, Channel
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import instructions, question


class Influence(NamedTuple):
    """A node or private context that reached a message, and through which channel; `EVERYONE`: any of them may have."""

    name: str
    channel: Channel


class Origins:
    """Lineage across models: KV ends with its model, text is followed from one model to the next.

    Args:
        engines: The engines that serve the graph, or did.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.by_model = {engine.model.adapter.fingerprint: engine for engine in engines}
        self.descents: dict[str, Descent] = {}
        """Lineage of each loaded message, by id."""
        self.engines: dict[str, Engine] = {}
        """The engine that made each loaded message, by id."""

    def load(self, handle: MessageHandle) -> None:
        """Load the lineage of a message and of all that it descends from.

        Raises:
            HandleError: Its engine does not know the message any more.
        """
        visited = set[str]()
        queue = self._load_new(handle)
        for message in queue:
            for source in self.descents[message].foreign:
                if source.id not in visited and source.id not in self.descents and source.base_model in self.by_model:
                    visited.add(source.id)
                    try:
                        queue += self._load_new(source)
                    except HandleError:
                        continue  # its engine has dropped it; its author is known from the entries all the same

    def sources(self, message: str) -> Sequence[str]:
        """Return the messages whose text it repeats, those of other models included where they are loaded."""
        descent = self.descents[message]
        return (*descent.sources, *(source.id for source in descent.foreign if source.id in self.descents))

    def _load_new(self, handle: MessageHandle) -> list[str]:
        """Load the messages that are not known yet, and return their ids."""
        engine = self.by_model[handle.base_model]
        descents = engine.inspect.descent([handle], self.descents)
        self.descents |= descents
        self.engines |= dict.fromkeys(descents, engine)
        return list(descents)


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
        self._origins = Origins(engines)
        self._chart = chart
        self._entries = list(entries)
        self._numbers = {id(entry): number for number, entry in enumerate(self._entries)}
        self._prefix = f"{home}|" if home else ""
        self._texts = {engine: chart.texts(engine) for engine in self._origins.by_model.values()}
        self._expanded: dict[_Step, tuple[frozenset[Influence], Sequence[_Step]]] = {}
        self._traced: dict[_Step, frozenset[Influence]] = {}
        self._by_message: dict[str, list[int]] = {}
        self._thoughts: dict[str, list[int]] = {}
        """Numbers of the entries that a message of thoughts led to, by its id."""
        self._prompts: dict[str, set[str]] = {}
        """Ids of the prompts that each persona was given."""
        for number, entry in enumerate(self._entries):
            for message in (*(handle.id for handle in handles_of(entry)), *entry.get("earlier", ())):
                self._by_message.setdefault(message, []).append(number)
            if thought := entry.get("thoughts"):
                self._thoughts.setdefault(thought["id"], []).append(number)
            if prompt := entry.get("prompt"):
                self._prompts.setdefault(self._persona(number), set()).add(prompt["id"])

    def trace(self, entry: HandleEntry, model: str | None = None) -> frozenset[Influence] | None:
        """Return all that had reached an entry's message when it was decoded; None: its model is not served here.

        Args:
            entry: One of the entries of the state.
            model: Trace this model's encoding of the message instead.
        """
        handle = (None if model is None else handle_for(entry, model)) or next(handles_of(entry))
        if handle.base_model not in self._origins.by_model:
            return None
        self._origins.load(handle)
        start, own = _Step(handle.id, self._numbers[id(entry)], "encoding"), set[Influence]()
        self._note_thoughts(start.entry, "words", own)
        return self._trace_all(start) | own

    def _trace_all(self, start: _Step) -> frozenset[Influence]:
        """Return all that reached a message as an entry has it."""
        steps = [] if start in self._traced else [start]
        numbers = {start: 0}
        following: list[list[int]] = []
        for step in steps:
            parents = [parent for parent in self._expand(step)[1] if parent not in self._traced]
            for parent in parents:
                if parent not in numbers:
                    numbers[parent] = len(steps)
                    steps.append(parent)
            following.append([numbers[parent] for parent in parents])
        # Text that was encoded again can go around in a cycle: all steps of one have the same influences.
        for component in components(following):
            cycle, reached = [steps[number] for number in component], set[Influence]()
            for step in cycle:
                own, before = self._expand(step)
                reached.update(own, *(self._traced.get(parent, ()) for parent in before))
            self._traced |= dict.fromkeys(cycle, frozenset(reached))
        return self._traced[start]

    def _expand(self, step: _Step) -> tuple[frozenset[Influence], Sequence[_Step]]:
        """Return what reached a message within its entry's own view, and the steps on into the views of other
        entries."""
        if step not in self._expanded:
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
            self._expanded[step] = frozenset(reached), parents
        return self._expanded[step]

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
        keeps_kv = self._origins.engines[step.message].method == "choreo"
        for parent in self._origins.descents[step.message].parents:
            yield _Step(parent, step.entry, step.channel if keeps_kv else "words")
        for source in self._sources(step.message):
            yield _Step(source, step.entry, "words")

    def _sources(self, message: str) -> Sequence[str]:
        """Return the messages whose text it repeats: those in this state if there are any, else all."""
        sources = self._origins.sources(message)
        return [source for source in sources if source in self._by_message] or sources

    def _label(self, step: _Step, reached: set[Influence]) -> Iterator[_Step]:
        """Record what a message in an entry's view contributes. Yield the steps from it into the view in which it was
        made."""
        channels, own = self._entries_read(step.message, step.entry), self._own_contexts(step)
        for number, channel in channels.items():
            own += self._authors(number) if channel == "words" else []
            self._note_all(number, step.channel, reached)
            self._note_thoughts(number, "words", reached)
            # Text that is encoded again in the same position is the same message.
            yield step._replace(entry=number, channel="words" if channel == "words" else step.channel)
        # The author of an entry has its own thoughts in its view.
        recalled = [n for n in self._thoughts.get(step.message, ()) if self._persona(n) == self._persona(step.entry)]
        for number in recalled:
            self._note_all(number, step.channel, reached)
            self._note_thoughts(number, step.channel, reached)
            yield step._replace(entry=number)
        descent = self._origins.descents[step.message]
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
                self._note_all(number, step.channel, reached)
                self._note_thoughts(number, "words", reached)
                yield step._replace(entry=number)
            return
        descent, own_texts = self._origins.descents[step.message], self._texts[self._origins.engines[step.message]]
        named = [name for own in own_texts.values() for name, texts in own.items() if descent.tokens in texts]
        scoped = self._scoped(step.entry)
        for name in [name for name in named if name in scoped] or named or map(self._local, descent.authors):
            self._note(name, step.channel, reached)
        yield step

    def _note_all(self, number: int, channel: Channel, reached: set[Influence]) -> None:
        for name in self._authors(number):
            self._note(name, channel, reached)

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
        persona, tokens = self._persona(step.entry), self._origins.descents[step.message].tokens
        engine = self._origins.engines[step.message]
        names = [name for name, texts in self._texts[engine].get(persona, {}).items() if tokens in texts]
        if step.message in self._prompts.get(persona, ()) or tokens in self._questions[engine].get(persona, ()):
            names.append(f"{persona}.system")
        return names

    @cached_property
    def _questions(self) -> Mapping[Engine, Mapping[str, set[Tokens]]]:
        """Tokens of prompts and of instructions for single messages, by engine and persona: an engine encodes them
        again where it has no handle of them."""
        questions: dict[Engine, dict[str, set[Tokens]]] = {engine: {} for engine in self._origins.by_model.values()}
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
            findings[key] = Finding(
                context=name,
                reader=persona,
                channel=channel,
                find_path=partial(tuple, [Hop(source=name, reader=reader, by=f"superstep {entry['superstep']}")]),
                violation=chart.violation_of(context, persona, channel),
            )
    outside = [*chart.outside]
    for model, count in unserved.items():
        outside.append(f"what reached {count} messages of model {model!r}, which no engine here runs")
    return AuditReport(tuple(contexts.values()), findings.values, outside=tuple(outside))
