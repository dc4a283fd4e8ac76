"""Shows branches that come late to a synthesizer that speaks already."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from choreo_agents.engine import Joining
from choreo_agents.graph.board import Branch
from choreo_agents.graph.entries import said_in
from choreo_agents.graph.gathering import Gathering
from choreo_agents.graph.placing import PlacedView
from choreo_agents.graph.reading import Reading
from choreo_agents.kv.handle import MessageHandle

T = TypeVar("T")


class Latecomers:
    """The branches that are out when a synthesizer starts.

        parallel      trunk |-- a --|                    a and b were in; c stands where they do,
                            |-- b -----|  own turn       d, which is longer than the room that they
                            |-- c --|                    take, ends where the own turn begins
                      |------ d -------|

        sequential    trunk |-- a --|-- b --|   room     |  own turn
                                            |-- c --| ...

    Args:
        gathering: Where they come from.
        branches: What was in.
        longest: Tokens of the longest message that one of them can be.
        keeps_kv: Whether the engine's method can take them in.
    """

    def __init__(self, gathering: Gathering, branches: Sequence[Branch], longest: int, *, keeps_kv: bool) -> None:
        self._gathering = gathering
        self._joins = keeps_kv and gathering.outstanding > 0
        self._present = [entry for branch in branches for entry in said_in(branch.update)]
        self._longest = longest
        self._start = 0
        self._end = 0
        self._shown: dict[str, str] = {}
        """The chat messages that were shown late, by the ids of the handles that stood for them."""

    def make_room(self, reading: Reading, view: PlacedView, most: int) -> None:
        """Leave room in a view for those that are to stand behind the others: as much as they can need.

        Args:
            reading: Whose view it is.
            view: So far: what follows is the synthesizer's own turn.
            most: Positions that the context has left over.
        """
        if reading.is_parallel:
            starts = [reading.starts.get(entry["message_id"], view.end) for entry in self._present]
            self._start = min(starts, default=view.end)
        elif self._joins:
            self._start = view.end
            view.end += max(0, min(self._gathering.outstanding * self._longest, most))
        self._end = view.end

    async def along(self, reading: Reading, view: PlacedView, joining: Joining, decode: Coroutine[Any, Any, T]) -> T:
        """Run a decode, and show it what comes meanwhile."""
        if not self._joins:
            return await decode
        try:
            async with asyncio.TaskGroup() as group:
                showing = group.create_task(self._show(reading, view.copy(), joining))
                done = await decode
                showing.cancel()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return done

    def said_of(self, joined: Mapping[MessageHandle, int]) -> list[dict[str, Any]]:
        """The branches that a message saw, and how many of its tokens, the header's too, came before each."""
        early = [{"message_id": e["message_id"], "handle": e["handle"]["id"], "since": 0} for e in self._present]
        late = [{"message_id": self._shown.get(h.id), "handle": h.id, "since": since} for h, since in joined.items()]
        return [*early, *late]

    async def _show(self, reading: Reading, view: PlacedView, joining: Joining) -> None:
        async for branch in self._gathering.late():
            async for entry, handle, offset in reading.late(branch.update, view, self._place):
                self._shown[handle.id] = entry["message_id"]
                if not reading.bound.join(joining, handle, offset):
                    return

    def _place(self, length: int, *, parallel: bool) -> int:
        """Where a message of so many tokens stands."""
        if self._start + length > self._end:
            return max(0, self._end - length)
        offset = self._start
        if not parallel:
            self._start += length
        return offset
