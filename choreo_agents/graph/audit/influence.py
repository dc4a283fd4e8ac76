"""Who said what of all that reached a message: by the entries of one graph's state, and by the texts of its own nodes.

An engine serves many graphs, and equal words in an equal place are one message to it, whoever said them. Who they are
from is a question of where one comes from: to a reader they are from the sources that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from choreo_agents.engine import Engine
from choreo_agents.engine.inspect import Descent
from choreo_agents.errors import HandleError
from choreo_agents.graph.audit.chart import Chart, ChartNode
from choreo_agents.graph.state import HandleEntry, handle_for, handles_of
from choreo_agents.graph.visibility import EVERYONE, START_SOURCE, Channel
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import instructions, question

Tokens = tuple[int, ...]
OwnTexts = Mapping[str, Mapping[str, frozenset[Tokens]]]
"""What personas are told, as it is encoded: by persona, and then by the name of the private context or module."""


class Reached(NamedTuple):
    """A source that reached a message: a node, by its path, or a private context; `EVERYONE`: anybody may have."""

    name: str
    channel: Channel


@dataclass(frozen=True)
class Declared:
    """What a graph's own declarations say of who is told what, and who reads whom."""

    chart: Chart = field(default_factory=lambda: Chart(()))
    texts: Callable[[Engine], OwnTexts] = lambda _: {}
    """What its personas are told, as an engine encodes it."""

    @cached_property
    def nodes(self) -> Mapping[str, ChartNode]:
        return {node.name: node for node in self.chart.nodes}

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all nodes and private contexts."""
        return frozenset([START_SOURCE, *self.nodes, *(context.name for context in self.chart.contexts)])

    @cached_property
    def guarded(self) -> frozenset[str]:
        """The private contexts that policies name."""
        return frozenset(name for _, policy in self.chart.policies for name in policy.confidential)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The confidential ones of `names`: a module is called the same in all graphs."""
        return frozenset(context.name for context in self.chart.contexts if context.kind == "module")


class Origins:
    """What lineage says, across models: words are followed from one to the next, encodings end with their model.

    Args:
        engines: Which serve the graph, or did.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.by_model = {engine.model.adapter.fingerprint: engine for engine in engines}
        self.made: dict[str, Descent] = {}
        """Messages that were found, and all that they descend from."""
        self.makers: dict[str, Engine] = {}
        """The engines that made them."""

    def find(self, handle: MessageHandle) -> None:
        """Find out about a message, and all that it descends from.

        Raises:
            HandleError: Its engine does not know it any more.
        """
        told = set[str]()
        queue = self._load(handle)
        for message in queue:
            for said in self.made[message].foreign:
                if said.id not in told and said.id not in self.made and said.base_model in self.by_model:
                    told.add(said.id)
                    try:
                        queue += self._load(said)
                    except HandleError:
                        continue  # its engine has forgotten it: whose words they are is known all the same

    def sources(self, message: str) -> Sequence[str]:
        """Whose words it has, other models' included: those that are found."""
        made = self.made[message]
        return (*made.sources, *(said.id for said in made.foreign if said.id in self.made))

    def _load(self, handle: MessageHandle) -> list[str]:
        """What is new: messages by their ids."""
        engine = self.by_model[handle.base_model]
        found = engine.inspect.descent([handle], self.made)
        self.made |= found
        self.makers |= dict.fromkeys(found, engine)
        return list(found)


class _Step(NamedTuple):
    """A message on the way back, and of whose entry's view it was part."""

    message: str
    entry: int
    channel: Channel


class InfluenceTracker:
    """Of the messages of one state.

    Args:
        engines: Know from what each was made.
        declared: The graph's declarations.
        entries: All that was said in it.
        home: Before which nodes the graph stands, as entries name them: `team`; empty if it stands in no other.
    """

    def __init__(
        self, engines: Iterable[Engine], declared: Declared, entries: Sequence[HandleEntry], home: str = ""
    ) -> None:
        self._origins = Origins(engines)
        self._declared = declared
        self._entries = list(entries)
        self._numbers = {id(entry): number for number, entry in enumerate(self._entries)}
        self._prefix = f"{home}|" if home else ""
        self._texts = {engine: declared.texts(engine) for engine in self._origins.by_model.values()}
        self._views: dict[_Step, tuple[frozenset[Reached], Sequence[_Step]]] = {}
        self._whole: dict[_Step, frozenset[Reached]] = {}
        self._by_message: dict[str, list[int]] = {}
        self._thoughts: dict[str, list[int]] = {}
        """What entries were thought out as, by message."""
        self._asked: dict[str, set[str]] = {}
        """By persona, the messages that it was asked."""
        for number, entry in enumerate(self._entries):
            for message in (*(handle.id for handle in handles_of(entry)), *entry.get("earlier", ())):
                self._by_message.setdefault(message, []).append(number)
            if thought := entry.get("thoughts"):
                self._thoughts.setdefault(thought["id"], []).append(number)
            if prompt := entry.get("prompt"):
                self._asked.setdefault(self._persona(number), set()).add(prompt["id"])

    def of(self, entry: HandleEntry, model: str | None = None) -> frozenset[Reached] | None:
        """All that reached the message of an entry, which is among those of the state, when it was said; None: the
        model that said it is not served, and nobody else can tell.

        Args:
            entry: The message.
            model: Reached what this model has made of it instead.
        """
        handle = (None if model is None else handle_for(entry, model)) or next(handles_of(entry))
        if handle.base_model not in self._origins.by_model:
            return None
        self._origins.find(handle)
        asked, own = _Step(handle.id, self._numbers[id(entry)], "encoding"), set[Reached]()
        self._note_thoughts(asked.entry, "words", own)
        return self._all(asked) | own

    def _all(self, asked: _Step) -> frozenset[Reached]:
        """All that reached a message as an entry has it."""
        # Lineage is as deep as a conversation is long: too deep to recurse.
        if asked in self._whole:
            return self._whole[asked]
        stack, begun, ended, circles = [asked], set[_Step](), list[_Step](), False
        while stack:
            step = stack[-1]
            found, before = self._reached(step)
            missing = [each for each in before if each not in self._whole and each not in begun]
            if missing and step not in self._whole:
                begun.add(step)
                stack += missing
                continue
            stack.pop()
            circles = circles or any(each not in self._whole for each in before if each != step)
            self._whole[step] = found.union(*(self._whole.get(each, ()) for each in before))
            ended.append(step)
        if circles:
            # Words went around: what was found of those on the way is not all that reached them.
            for step in ended:
                self._whole.pop(step, None)
            self._whole[asked] = self._all_around(asked)
        return self._whole[asked]

    def _all_around(self, asked: _Step) -> frozenset[Reached]:
        """The same of one message alone, wherever words went."""
        found, queue, seen = set[Reached](), [asked], {asked}
        for step in queue:
            here, before = self._reached(step)
            found |= here
            after = [each for each in before if each not in seen]
            seen.update(after)
            queue += after
        return frozenset(found)

    def _reached(self, step: _Step) -> tuple[frozenset[Reached], Sequence[_Step]]:
        """What reached the message of an entry as part of its own view; and the messages of others that this holds."""
        if step not in self._views:
            found, others, seen = set[Reached](), list[_Step](), set[_Step]()
            if self._entries[step.entry].get("answered"):
                found |= self._all_there_is(step.channel)
            queue = list(self._above(step))
            for each in queue:
                if each in seen:
                    continue
                seen.add(each)
                for after in self._through(each, found):
                    if after.entry == step.entry:
                        queue += self._above(after)
                    elif after not in seen:
                        seen.add(after)
                        others.append(after)
            self._views[step] = frozenset(found), others
        return self._views[step]

    def _all_there_is(self, channel: Channel) -> set[Reached]:
        """What may have reached a chat model's answer: whatever its function can read, also what was removed since."""
        said = {START_SOURCE, *self._declared.nodes, *map(self._author, range(len(self._entries)))}
        found = {Reached(EVERYONE, channel)}
        for name in said:
            self._note(name, channel, found)
        for name in self._declared.names - said:
            self._note(name, "words", found)
        return found

    def _above(self, step: _Step) -> Iterator[_Step]:
        """What a message attended to, and whose words it was made of."""
        keeps_kv = self._origins.makers[step.message].method == "choreo"
        for parent in self._origins.made[step.message].parents:
            yield _Step(parent, step.entry, step.channel if keeps_kv else "words")
        for source in self._sources(step.message):
            yield _Step(source, step.entry, "words")

    def _sources(self, message: str) -> Sequence[str]:
        """Whose words a message has, as far as it was made of them in this state: in others, of others'."""
        sources = self._origins.sources(message)
        return [source for source in sources if source in self._by_message] or sources

    def _through(self, step: _Step, found: set[Reached]) -> Iterator[_Step]:
        """Label a message of an entry's view. Yields how to go on from it: in whose view it was made."""
        said, own = self._read(step.message, step.entry), self._told(step)
        for number, channel in said.items():
            own += self._authors(number) if channel == "words" else []
            self._note_all(number, step.channel, found)
            self._note_thoughts(number, "words", found)
            # Words that were encoded again in an equal place are the message itself.
            yield step._replace(entry=number, channel="words" if channel == "words" else step.channel)
        # The author of an entry has its own thoughts in its view.
        recalled = [n for n in self._thoughts.get(step.message, ()) if self._persona(n) == self._persona(step.entry)]
        for number in recalled:
            self._note_all(number, step.channel, found)
            self._note_thoughts(number, step.channel, found)
            yield step._replace(entry=number)
        made = self._origins.made[step.message]
        copied = [number for source in made.sources for number in self._read(source, step.entry)]
        own += [name for number in copied for name in self._authors(number)]
        thought = {f"{name}.thoughts" for name in own} & {*map(self._local, made.authors)}
        for name in (*own, *thought):
            self._note(name, step.channel, found)
        if own:
            yield step
        elif not said and not recalled:
            yield from self._unexplained(step, found)

    def _unexplained(self, step: _Step, found: set[Reached]) -> Iterator[_Step]:
        """Of what no declaration led into a view: it may be of all whose it can be."""
        if said := self._by_message.get(step.message):
            for number in said:
                self._note_all(number, step.channel, found)
                self._note_thoughts(number, "words", found)
                yield step._replace(entry=number)
            return
        made, own_texts = self._origins.made[step.message], self._texts[self._origins.makers[step.message]]
        named = [name for own in own_texts.values() for name, texts in own.items() if made.tokens in texts]
        scoped = self._scoped(step.entry)
        for name in [name for name in named if name in scoped] or named or map(self._local, made.authors):
            self._note(name, step.channel, found)
        yield step

    def _note_all(self, number: int, channel: Channel, found: set[Reached]) -> None:
        for name in self._authors(number):
            self._note(name, channel, found)

    def _note_thoughts(self, number: int, channel: Channel, found: set[Reached]) -> None:
        """What was thought out is made of thoughts, which nobody else attends to: they are above nothing else."""
        if "thoughts" in self._entries[number]:
            for name in self._authors(number):
                self._note(f"{name}.thoughts", channel, found)

    def _note(self, name: str, channel: Channel, found: set[Reached]) -> None:
        if name in self._declared.names or not self._declared.nodes:
            found.add(Reached(name, channel))

    def _read(self, message: str, reader: int) -> dict[int, Channel]:
        """The entries as which the author of an entry may have read a message, and what it then had of them."""
        found = {number: self._has(reader, number) for number in self._by_message.get(message, ())}
        return {number: channel for number, channel in found.items() if channel is not None}

    def _has(self, reader: int, number: int) -> Channel | None:
        """What the author of one entry has of that of another: its encodings, its words alone, or nothing."""
        node, source = self._declared.nodes.get(self._author(reader)), self._author(number)
        if reader == number or self._persona(reader) == self._persona(number):
            return "encoding"
        rules = {} if node is None else node.rules
        modes = [rule.mode for name, rule in rules.items() if source == name or source.startswith(f"{name}|")]
        if any(mode.shares_kv for mode in modes):
            return "encoding"
        return "words" if any(mode.shows for mode in modes) or source in self._scoped(reader) else None

    def _scoped(self, reader: int) -> set[str]:
        """The private contexts that words are encoded in for the author of an entry."""
        node = self._declared.nodes.get(self._author(reader))
        return set() if node is None else {name for rule in node.rules.values() for name in rule.contexts}

    def _told(self, step: _Step) -> list[str]:
        """The names of what the author of an entry is told, and was asked, that say just this."""
        persona, tokens = self._persona(step.entry), self._origins.made[step.message].tokens
        engine = self._origins.makers[step.message]
        found = [name for name, texts in self._texts[engine].get(persona, {}).items() if tokens in texts]
        if step.message in self._asked.get(persona, ()) or tokens in self._questions[engine].get(persona, ()):
            found.append(f"{persona}.system")
        return found

    @cached_property
    def _questions(self) -> Mapping[Engine, Mapping[str, set[Tokens]]]:
        """By persona, what it was asked, as engines encode it: again, where its handle is no good to them; and what it
        was told for one message."""
        found: dict[Engine, dict[str, set[Tokens]]] = {engine: {} for engine in self._origins.by_model.values()}
        for engine, by_persona in found.items():
            for number, entry in enumerate(self._entries):
                asked = entry.get("prompt_text")
                forms = [question(asked, engine.chat).text] if asked else []
                for told in entry.get("system_texts", ()):
                    forms += [instructions(told, engine.chat, later=later).text for later in (True, False)]
                    forms.append(question(told, engine.chat).text)
                turns = {tuple(engine.model.encode(form)) for form in forms}
                by_persona.setdefault(self._persona(number), set()).update(turns)
        return found

    def _author(self, number: int) -> str:
        return self._local(self._entries[number]["author"])

    def _authors(self, number: int) -> Iterator[str]:
        """Whose the message of an entry is, and whose it says that it is, if no signature proves that."""
        yield self._author(number)
        if via := self._entries[number].get("tool_node"):
            yield self._local(via)
        if claimed := self._entries[number].get("unverified_author"):
            yield self._local(str(claimed["author"]))

    def _persona(self, number: int) -> str:
        author = self._author(number)
        node = self._declared.nodes.get(author)
        return node.persona if node is not None else self._local(self._entries[number].get("persona") or author)

    def _local(self, name: str) -> str:
        """A name as the graph's own chart has it; of what stands outside of it, one that nothing there can have."""
        if name.startswith(self._prefix):
            return name.removeprefix(self._prefix)
        return name if name == START_SOURCE or name in self._declared.modules else f"|{name}"
