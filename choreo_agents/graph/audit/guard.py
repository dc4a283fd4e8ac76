"""The same promises kept at call time: each encoding that a reader is about to attend to is looked up first."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.engine import Engine
from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.observed import names_of
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import REENCODED, Channel, source_of_author
from choreo_agents.kv.handle import MessageHandle


@dataclass(frozen=True)
class Guard:
    """What must not reach one reader. All names are those of its own graph."""

    hidden: frozenset[str] = frozenset()
    """Sources that are declared private to it."""
    forbidden: Mapping[Channel, frozenset[str]] = field(default_factory=dict)
    """Contexts that a policy keeps from it."""
    known: frozenset[str] = frozenset()
    """All nodes and contexts. What somebody who is not forbidden has said, too, word for word, is no secret."""
    on_violation: OnViolation = "raise"
    modules: frozenset[str] = frozenset()
    """Those of `known` that are confidential modules: they are called the same in all graphs."""

    def admits(
        self,
        engine: Engine,
        handle: MessageHandle,
        source: str,
        reader: str,
        entries: Sequence[HandleEntry],
        *,
        words_only: bool = False,
    ) -> bool:
        """Whether the reader may attend to an encoding as it is; False: encode its words again.

        Args:
            engine: Knows the lineage.
            handle: The encoding.
            source: Who shares it, and `reader` with whom: paths of nodes.
            entries: The state: who said what in this very run.
            words_only: The reader is to see a fresh encoding of its words.

        Raises:
            VisibilityError: It may not, and the policy says `raise`.
        """
        if not self.hidden and not any(self.forbidden.values()):
            return True
        broken = self._broken(engine, handle, reader, entries, words_only)
        if broken is None:
            return True
        channel, what = broken
        if self.on_violation == "reencode" and channel == "encoding":
            return False
        said_by, node = source_of_author(source, reader), reader.rsplit("|", maxsplit=1)[-1]
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

    def _broken(
        self, engine: Engine, handle: MessageHandle, reader: str, entries: Sequence[HandleEntry], words_only: bool
    ) -> tuple[Channel, str] | None:
        """The first promise that the view would break."""
        home, _, node = reader.rpartition("|")
        [lineage] = engine.inspect.audit([handle]).messages
        for ancestor in lineage.ancestors:
            names = names_of(ancestor, entries)
            if "encoding" in ancestor.channels and not words_only:
                sources = {source for name in names if (source := source_of_author(name, reader)) is not None}
                if sources and sources <= self.hidden:
                    return "encoding", f"{min(sources)!r} is declared private to {node!r}"
            local = {name.removeprefix(f"{home}|") for name in names if name.startswith(f"{home}|") or not home}
            local |= self.modules.intersection(names)
            channels: set[Channel] = {"words"} if words_only else set(ancestor.channels)
            for channel in channels:
                secret = (local & self.known) or {""}
                if secret <= self.forbidden.get(channel, frozenset()):
                    return channel, f"the policy keeps {min(secret)!r} from {node!r}"
        return None
