"""The same promises kept at call time: each encoding that a reader is about to attend to is looked up first."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.engine import Engine
from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.chart import names_of
from choreo_agents.graph.audit.influence import Declared, InfluenceTracker
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import EVERYONE, REENCODED, Channel, source_of_author


@dataclass(frozen=True)
class Guard:
    """What must not reach one reader. All names are those of its own graph."""

    hidden: frozenset[str] = frozenset()
    """Sources that are declared private to it; in a stock graph, `EVERYONE` among them."""
    forbidden: Mapping[Channel, frozenset[str]] = field(default_factory=dict)
    """Contexts that a policy keeps from it."""
    on_violation: OnViolation = "raise"
    declared: Declared = field(default_factory=Declared)
    """What its graph declares: by that it is known who said what."""
    spared: frozenset[str] = frozenset()
    """If everyone is private to it, who is not: whom it names, and its own persona."""

    home: str | None = None
    """Before which nodes the graph stands whose names these are; None: it is the reader's own."""

    def home_of(self, reader: str) -> str:
        """Return before which nodes the graph stands whose names these are."""
        return reader.rpartition("|")[0] if self.home is None else self.home


class RuntimeGuard:
    """Of one call of one reader.

    Args:
        guard: What must not reach it.
        engine: The reader's.
        reader: The path of its node.
        others: Engines that know from what words were made that are no messages of the reader's.
        entries: All that was said.
    """

    def __init__(
        self, guard: Guard, engine: Engine, reader: str, others: Iterable[Engine], entries: Sequence[HandleEntry]
    ) -> None:
        self._guard, self._reader, self._entries = guard, reader, entries
        self._model = engine.model.adapter.fingerprint
        self._labels = InfluenceTracker((*others, engine), guard.declared, entries, guard.home_of(reader))
        self._hidden = guard.hidden if EVERYONE not in guard.hidden else guard.hidden.union(self._unnamed())

    def allows(self, entry: HandleEntry, *, words_only: bool) -> bool:
        """Whether the reader may attend to an encoding as it is; False: encode its words again.

        Args:
            entry: The message, one of the entries.
            words_only: The reader is to see a fresh encoding of its words.

        Raises:
            VisibilityError: It may not, and the policy says `raise`.
        """
        guard = self._guard
        broken = self._broken(entry, words_only)
        if broken is None:
            return True
        channel, what = broken
        if guard.on_violation == "reencode" and channel == "encoding":
            return False
        said_by = source_of_author(entry["author"], self._reader) or entry["author"]
        node = self._reader.rsplit("|", maxsplit=1)[-1]
        message = f"{what}, but the encoding that {said_by!r} shares with it attended to it: declare {said_by!r} to "
        message += f"{node!r} {REENCODED!r}"
        if channel == "words":
            message = (
                f"{what}, but the words of {said_by!r} may have been made of it: undeclare {said_by!r} to {node!r}"
            )
        if guard.on_violation == "warn":
            warnings.warn(message, VisibilityWarning, stacklevel=2)
            return True
        raise VisibilityError(message)

    def _unnamed(self) -> Iterator[str]:
        """Who has said anything, and is neither named to the reader nor of its own."""
        for entry in self._entries:
            source, persona = (
                source_of_author(name, self._reader)
                for name in (entry["author"], entry.get("persona", entry["author"]))
            )
            if source is not None and not {source, persona} & {*self._guard.spared, self._reader.rpartition("|")[2]}:
                yield source

    def _broken(self, entry: HandleEntry, words_only: bool) -> tuple[Channel, str] | None:
        """The first promise that the view would break."""
        guard, node = self._guard, self._reader.rsplit("|", maxsplit=1)[-1]
        reached = sorted(self._labels.of(entry, self._model) or ())
        for name, channel in () if words_only else reached:
            # What is said in a graph that is a node is that node's.
            source = next((each for each in names_of(name) if each in self._hidden), name)
            if channel == "encoding" and source in self._hidden:
                return "encoding", f"{source!r} is declared private to {node!r}"
            if channel == "encoding" and source == EVERYONE and self._hidden:
                return (
                    "encoding",
                    f"{min(self._hidden)!r} is declared private to {node!r}, and may be in a function's prompt",
                )
        for name, channel in reached:
            through: Channel = "words" if words_only else channel
            if name in guard.forbidden.get(through, frozenset()):
                return through, f"the policy keeps {name!r} from {node!r}"
        return None
