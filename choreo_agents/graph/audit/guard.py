"""The same promises kept at call time: each encoding that a reader is about to attend to is looked up first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.labels import Declared, Labels
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import REENCODED, Channel, source_of_author


@dataclass(frozen=True)
class Guard:
    """What must not reach one reader. All names are those of its own graph."""

    hidden: frozenset[str] = frozenset()
    """Sources that are declared private to it."""
    forbidden: Mapping[Channel, frozenset[str]] = field(default_factory=dict)
    """Contexts that a policy keeps from it."""
    on_violation: OnViolation = "raise"
    declared: Declared = field(default_factory=Declared)
    """What its graph declares: by that it is known who said what."""

    def admits(
        self, labels: Callable[[], Labels], entry: HandleEntry, reader: str, *, words_only: bool = False
    ) -> bool:
        """Whether the reader may attend to an encoding as it is; False: encode its words again.

        Args:
            labels: Of the state, if they are asked for.
            entry: The message.
            reader: Who is to read it: the path of a node.
            words_only: The reader is to see a fresh encoding of its words.

        Raises:
            VisibilityError: It may not, and the policy says `raise`.
        """
        if not self.hidden and not any(self.forbidden.values()):
            return True
        broken = self._broken(labels(), entry, reader, words_only)
        if broken is None:
            return True
        channel, what = broken
        if self.on_violation == "reencode" and channel == "encoding":
            return False
        said_by, node = source_of_author(entry["author"], reader), reader.rsplit("|", maxsplit=1)[-1]
        message = f"{what}, but the encoding that {said_by!r} shares with it attended to it: declare {said_by!r} to "
        message += f"{node!r} {REENCODED!r}"
        if channel == "words":
            message = (
                f"{what}, but the words of {said_by!r} may have been made of it: undeclare {said_by!r} to {node!r}"
            )
        if self.on_violation == "warn":
            warnings.warn(message, VisibilityWarning, stacklevel=2)
            return True
        raise VisibilityError(message)

    def _broken(self, labels: Labels, entry: HandleEntry, reader: str, words_only: bool) -> tuple[Channel, str] | None:
        """The first promise that the view would break."""
        node = reader.rsplit("|", maxsplit=1)[-1]
        reached = sorted(labels.of(entry))
        for name, channel in reached:
            # A source may be a whole graph.
            source = name.partition("|")[0] or name
            if channel == "encoding" and not words_only and source in self.hidden:
                return "encoding", f"{source!r} is declared private to {node!r}"
        for name, channel in reached:
            through: Channel = "words" if words_only else channel
            if name in self.forbidden.get(through, frozenset()):
                return through, f"the policy keeps {name!r} from {node!r}"
        return None
