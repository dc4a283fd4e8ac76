"""Rows, notes and answers under a tenant's seal: what comes back from a store is what the tenant has written there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from choreo_agents.engine.lineage.rows import Answered, DamagedRowError, LineageRow, Note
from choreo_agents.engine.messages.seals import Seals

_SEAL = "seal"


class SealedRows:
    """Of one tenant.

    Args:
        seals: The tenant's.
    """

    def __init__(self, seals: Seals) -> None:
        self._seals = seals

    def thread(self, thread: str) -> str:
        """What a thread is called in a store: it does not tell the id, which may name a person."""
        return self._seals.drawn("lineage", thread)

    def row(self, row: LineageRow) -> dict[str, Any]:
        """As it is written."""
        return self._sealed("row", row.plain())

    def note(self, thread: str, note: Note) -> dict[str, Any]:
        """As it is written for a thread, by the name that it has in the store."""
        return self._sealed(f"note {thread}", note.plain())

    def answer(self, thread: str, answered: Answered) -> dict[str, Any]:
        """The same of what a call of the thread was answered."""
        return self._sealed(f"answer {thread}", answered.plain())

    def call(self, thread: str, memo: str) -> str:
        """What a call of a thread is called in a store: it does not tell the names of agents and functions."""
        return self._seals.drawn("call", thread, memo)

    def read_row(self, value: Mapping[str, Any]) -> LineageRow:
        """A row that was written.

        Raises:
            DamagedRowError: It was not, or was changed since.
        """
        return LineageRow.read(self._opened("row", value))

    def read_note(self, thread: str, value: Mapping[str, Any]) -> Note:
        """The same of a note of this very thread."""
        return Note.read(self._opened(f"note {thread}", value))

    def read_answer(self, thread: str, value: Mapping[str, Any]) -> Answered:
        """The same of what a call of this very thread was answered."""
        return Answered.read(self._opened(f"answer {thread}", value))

    def _sealed(self, kind: str, plain: dict[str, Any]) -> dict[str, Any]:
        return {**plain, _SEAL: self._seals.seal(kind, plain)}

    def _opened(self, kind: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise DamagedRowError(f"it is no object of JSON, but {type(value).__name__}")
        plain = {name: each for name, each in value.items() if name != _SEAL}
        if not self._seals.holds(value.get(_SEAL), kind, plain):
            raise DamagedRowError("it does not bear the tenant's seal: somebody else wrote it, or has changed it")
        return plain
