"""Prepares the branches that a synthesizer merges: shorter messages, mapped copies of their KV, and boundary tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from choreo_agents.engine import Prefill
from choreo_agents.graph.state import HandleEntry, is_input, is_of_agent
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.reader_rules import CallReader
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.visibility import source_of_author
from choreo_agents.kv.handle import MessageHandle


class MergedBranches:
    """The messages that one call of one reader merges.

    Args:
        engine: The reader's engine.
        reader: The call in whose view they are.
    """

    def __init__(self, engine: BoundEngine, reader: CallReader) -> None:
        self._engine, self._reader = engine, reader.place.author
        self._merging, self._adapter = reader.agent.merging, reader.agent.adapter
        self.stands_for: dict[str, MessageHandle] = {}
        """The handle shown for each merged message, by the id of the message's own handle."""
        self.summaries: dict[str, str] = {}
        """Text of each summarized message, by the same ids."""
        self._fans: dict[int, int] = {}
        """The number of the fan of parallel branches that each branch belongs to, by its place in the view."""
        self._fan = 0
        """The latest fan."""

    def _merges(self, entry: HandleEntry) -> bool:
        """Return whether a message is one of the branches to merge."""
        return self._merging is not None and source_of_author(entry["author"], self._reader) in self._merging.sources

    def read_as_text(self, shown: Sequence[SeenEntry]) -> Sequence[HandleEntry]:
        """Return the messages that should be merged from KV but can only be read as text, since none has an agent's
        encoding.

        Without signatures, any input may be one of them.
        """
        if self._merging is None or not self._merging.caches:
            return ()
        merged = [entry for entry, rule in shown if self._merges(entry) and rule.mode.shares_kv]
        if any(is_of_agent(entry) or entry.get("answered") for entry in merged):
            return ()
        return merged or [entry for entry, _ in shown if is_input(entry)]

    async def prepare(self, shown: Sequence[SeenEntry]) -> None:
        """Make what is shown for the merged messages: summaries by their authors, or copies by the adapter's cache
        mapper.

        Args:
            shown: The messages of the view; those whose own encodings are to be merged are replaced.
        """
        merged = [self._engine.handle(entry) for entry, rule in shown if rule.mode.shares_kv and self._merges(entry)]
        if self._merging is None or not merged:
            return
        engine, summary = self._engine.engine, self._merging.summary
        summaries = [] if summary is None else await engine.branches.asummaries(merged, summary)
        self._engine.copies += summaries
        for handle, short in zip(merged, summaries, strict=False):
            sampled = [sample.token for sample in engine.logprobs(short)]
            self.summaries[handle.id] = engine.model.decode(sampled, special=False).strip()
        stands = summaries or list(merged)
        if engine.branches.maps(self._adapter):
            stands = await engine.branches.amap(stands, self._adapter)
        self.stands_for |= {handle.id: stand for handle, stand in zip(merged, stands, strict=True)}

    def record(self, view: PlacedView, first: int, shown: Sequence[SeenEntry], *, ends: bool) -> None:
        """Record which of the handles of a view from `first` on are branches.

        Args:
            view: The view.
            first: The place of the first of these handles.
            shown: Their messages.
            ends: True if later branches do not belong to earlier ones: input or an answer came in between.
        """
        self._fan += ends
        branches = [item for item in shown if self._merges(item.entry)]
        whole = len(branches) == len(shown)
        handles = [self._engine.handle(item.entry) for item in branches]
        ids = {self.stands_for.get(handle.id, handle).id for handle in handles}
        for place, handle in enumerate(view.handles[first:] if branches else (), start=first):
            if handle.id in ids or (whole and handle.id in view.ends):
                self._fans[place] = self._fan

    def _visible_places(self, place: int) -> tuple[int, ...]:
        """Return the places that a boundary attends to: all before its branch except parallel branches of the same
        fan."""
        return tuple(at for at in range(place) if self._fans.get(at) != self._fans[place])

    async def append_boundaries(self, view: PlacedView) -> None:
        """Append the tokens that the adapter reads behind each branch (see `Branches.boundaries`), if it has any.

        They attend to the branch and what stood before it, but to no parallel branch. Positions do not change: what
        follows starts where it would have started.
        """
        shown = {handle.id for handle in self.stands_for.values()}
        behind = [at for at in self._fans if view.handles[at].id in shown]
        calls: list[Prefill] = []
        places: list[int] = []
        for before, together in groupby(behind, key=self._visible_places):
            alike = list(together)
            branches, anchors = [view.handles[at] for at in alike], [view.offsets[at] for at in alike]
            trunk, offsets = [view.handles[at] for at in before], [view.offsets[at] for at in before]
            prefills = self._engine.engine.branches.boundaries(branches, trunk, offsets, anchors, self._adapter)
            calls += prefills
            places += alike[: len(prefills)]
        handles = await self._engine.aprefill(calls)
        self._engine.copies += handles
        for handle, place in zip(handles, places, strict=True):
            view.add_beside(handle, view.offsets[place] + view.handles[place].length)
