"""Prepares the branches that a synthesizer merges: shorter messages, mapped copies of their KV, and boundary tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from choreo_agents.engine import Prefill
from choreo_agents.errors import HandleError
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
        self._fans: list[int | None] = []
        """For each message of the view, the number of the fan of parallel branches it belongs to; None: it is no
        branch."""
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

    async def prepare(self, shown: Sequence[SeenEntry]) -> list[MessageHandle]:
        """Make what is shown for the merged messages: summaries by their authors, or copies by the adapter's cache
        mapper.

        Args:
            shown: The messages of the view; those whose own encodings are to be merged are replaced.

        Returns:
            Those with a lease, to be released after the call.
        """
        merged = [self._engine.handle(entry) for entry, rule in shown if rule.mode.shares_kv and self._merges(entry)]
        if self._merging is None or not merged:
            return []
        engine, summary = self._engine.engine, self._merging.summary
        summaries = [] if summary is None else await engine.branches.asummaries(merged, summary)
        for handle, short in zip(merged, summaries, strict=False):
            sampled = [sample.token for sample in engine.logprobs(short)]
            self.summaries[handle.id] = engine.model.decode(sampled, special=False).strip()
        stands = summaries or list(merged)
        try:
            if engine.branches.maps(self._adapter):
                stands = await engine.branches.amap(stands, self._adapter)
        except BaseException:
            with suppress(HandleError):  # a scope may have ended meanwhile
                for handle in summaries:
                    engine.release(handle)
            raise
        self.stands_for |= {handle.id: stand for handle, stand in zip(merged, stands, strict=True)}
        return summaries

    def record(self, view: PlacedView, shown: Sequence[SeenEntry] = (), *, ends: bool = False) -> None:
        """Record which of the handles just appended to the view are branches.

        Args:
            view: The view with them.
            shown: The messages; empty for what stands before all messages.
            ends: True if later branches do not belong to earlier ones: input or an answer came in between.
        """
        self._fan += ends
        branches = [item for item in shown if self._merges(item.entry)]
        whole = len(branches) == len(shown)
        handles = [self._engine.handle(item.entry) for item in branches]
        ids = {self.stands_for.get(handle.id, handle).id for handle in handles}
        for handle in view.handles[len(self._fans) :]:
            is_branch = handle.id in ids or (whole and handle.id not in view.separators)
            self._fans.append(self._fan if branches and is_branch else None)

    def _visible_places(self, place: int) -> tuple[int, ...]:
        """Return the places that a boundary attends to: all before its branch except parallel branches of the same
        fan."""
        own_fan = self._fans[place]
        return tuple(at for at, fan in enumerate(self._fans[:place]) if fan is None or fan != own_fan)

    async def append_boundaries(self, view: PlacedView) -> list[MessageHandle]:
        """Append the tokens that the adapter reads behind each branch (see `Branches.boundaries`), if it has any.

        They attend to the branch and what stood before it, but to no parallel branch. Positions do not change: what
        follows starts where it would have started.

        Args:
            view: The view with the branches in it.

        Returns:
            The new handles, each with a lease.
        """
        shown = {handle.id for handle in self.stands_for.values()}
        behind = [at for at, fan in enumerate(self._fans) if fan is not None and view.handles[at].id in shown]
        calls: list[Prefill] = []
        places: list[int] = []
        for before, together in groupby(behind, key=self._visible_places):
            alike = list(together)
            branches, anchors = [view.handles[at] for at in alike], [view.offsets[at] for at in alike]
            trunk, offsets = [view.handles[at] for at in before], [view.offsets[at] for at in before]
            prefills = self._engine.engine.branches.boundaries(branches, trunk, offsets, anchors, self._adapter)
            calls += prefills
            places += alike[: len(prefills)]
        handles = await self._engine.aprefill(calls) if calls else []
        for handle, place in zip(handles, places, strict=True):
            view.add_beside(handle, view.offsets[place] + view.handles[place].length)
        return handles
