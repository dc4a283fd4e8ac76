"""Shows branches that come late to a synthesizer that speaks already."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from choreo_agents.engine import Joining
from choreo_agents.graph.quorum.board import BranchUpdate
from choreo_agents.graph.quorum.gathering import Gathering
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.reading import Reading
from choreo_agents.graph.words.entries import said_in
from choreo_agents.kv.handle import MessageHandle

T = TypeVar("T")


class LateBranches:
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

    def __init__(self, gathering: Gathering, branches: Sequence[BranchUpdate], longest: int, *, keeps_kv: bool) -> None:
        self._gathering = gathering
        self._joins = keeps_kv and gathering.outstanding > 0
        self._present = [entry for branch in branches for entry in said_in(branch.update)]
        self._longest = longest
        self._start = 0
        self._end = 0
        self._late: list[str] = []
        """The ids of the chat messages that were shown late."""

    def make_room(self, reading: Reading, view: PlacedView, most: int) -> None:
        """Leave room in a view for those that are to stand behind the others: as much as they can need.

        Args:
            reading: Whose view it is.
            view: So far: what follows is the synthesizer's own turn.
            most: Positions that the context has left over.
        """
        if reading.is_parallel:
            starts = [reading.showing.starts.get(entry["message_id"], view.end) for entry in self._present]
            self._start = min(starts, default=view.end)
        elif self._joins:
            self._start = view.end
            view.resume_at(view.end + max(0, min(self._gathering.outstanding * self._longest, most)))
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

    def said_of(self, reading: Reading, joined: Sequence[tuple[MessageHandle, int]]) -> list[dict[str, Any]]:
        """The branches that a message saw, and how many of its tokens, the header's too, came before each.

        Args:
            reading: Whose view it is.
            joined: What came into it late, and since when.
        """
        shown = reading.showing.shown
        since = {name: 0 for name in dict.fromkeys(e["message_id"] for e in self._present) if name in shown}
        late: dict[str, list[int]] = defaultdict(list)
        for handle, count in joined:
            late[handle.id].append(count)
        for name in dict.fromkeys(self._late):
            counts = late[shown[name].id]  # two branches may have said the same in the same place
            if counts:
                since[name] = counts.pop(0)
        return [{"message_id": name, "handle": shown[name].id, "since": seen} for name, seen in since.items()]

    async def _show(self, reading: Reading, view: PlacedView, joining: Joining) -> None:
        async for branch in self._gathering.late():
            async for entry, handle, offset in reading.late(branch.update, view, self._place):
                self._late.append(entry["message_id"])
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
