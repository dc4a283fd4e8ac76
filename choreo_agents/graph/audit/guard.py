"""Enforces declarations and policies at call time: every encoding is checked before a reader attends to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.engine import Engine
from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.chart import Chart, names_of
from choreo_agents.graph.audit.influence import InfluenceTracker
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import EVERYONE, REENCODED, Channel, source_of_author


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
        engine: The reader's engine.
        reader: The path of its node.
        engines: Other engines of the graph: they know what messages of other models were made of.
        entries: All messages in the graph's state.
    """

    def __init__(
        self, guard: Guard, engine: Engine, reader: str, engines: Iterable[Engine], entries: Sequence[HandleEntry]
    ) -> None:
        self._guard, self._reader, self._entries = guard, reader, entries
        self._model = engine.model.adapter.fingerprint
        self._tracker = InfluenceTracker((*engines, engine), guard.chart, entries, guard.home_of(reader))
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
