"""What stands in a synthesizer's view for the messages that it merges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from choreo_agents.engine import Prefill
from choreo_agents.errors import HandleError
from choreo_agents.graph.state import HandleEntry, is_of_agent
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.reader_rules import CallReader
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.visibility import source_of_author
from choreo_agents.graph.words.entries import is_input
from choreo_agents.kv.handle import MessageHandle


class MergedBranches:
    """The messages that one call of one reader merges.

    Args:
        engine: The reader's.
        reader: Whose view they are in.
    """

    def __init__(self, engine: BoundEngine, reader: CallReader) -> None:
        self._engine, self._reader = engine, reader.place.author
        self._merging, self._adapter = reader.agent.merging, reader.agent.adapter
        self.stands_for: dict[str, MessageHandle] = {}
        """What stands in the view for merged messages, by their handles' ids."""
        self.shorter: dict[str, str] = {}
        """What their speakers say of those that are summed up, by the same."""
        self._fans: list[int | None] = []
        """For each place of the view, which branches it came together with; None: it is no branch."""
        self._fan = 0
        """The latest of them."""

    def _is_from(self, entry: HandleEntry) -> bool:
        """Whether a message's words or encoding belong to a branch."""
        return self._merging is not None and source_of_author(entry["author"], self._reader) in self._merging.sources

    def in_words(self, shown: Sequence[SeenEntry]) -> Sequence[HandleEntry]:
        """Return the messages of the view that are to be merged from caches, if nobody's cache is: words are read.

        Where nothing is signed that may be any input.
        """
        if self._merging is None or not self._merging.caches:
            return ()
        merged = [entry for entry, rule in shown if self._is_from(entry) and rule.mode.shares_kv]
        if any(is_of_agent(entry) or entry.get("answered") for entry in merged):
            return ()
        return merged or [entry for entry, _ in shown if is_input(entry)]

    async def stand_in(self, seen: Sequence[SeenEntry]) -> list[MessageHandle]:
        """Make shorter messages, or copies by the adapter's cache mapper, to be shown for those that are merged.

        Args:
            seen: The messages of the view; those whose own encodings are to be merged are replaced.

        Returns:
            Those of them that have a lease, to be released.
        """
        merged = [
            self._engine.handle(each.entry) for each in seen if each.rule.mode.shares_kv and self._is_from(each.entry)
        ]
        if self._merging is None or not merged:
            return []
        engine, summary = self._engine.engine, self._merging.summary
        made = [] if summary is None else await engine.branches.asummaries(merged, summary)
        for handle, short in zip(merged, made, strict=False):
            sampled = [each.token for each in engine.logprobs(short)]
            self.shorter[handle.id] = engine.model.decode(sampled, special=False).strip()
        shown = made or list(merged)
        try:
            if engine.branches.maps(self._adapter):
                shown = await engine.branches.amap(shown, self._adapter)
        except BaseException:
            with suppress(HandleError):  # a scope may have ended meanwhile
                for handle in made:
                    engine.release(handle)
            raise
        self.stands_for |= {handle.id: stand for handle, stand in zip(merged, shown, strict=True)}
        return made

    def appended(self, view: PlacedView, seen: Sequence[SeenEntry] = (), *, ends: bool = False) -> None:
        """Say what was appended to the view.

        Args:
            view: With it.
            seen: The messages; none: what stands before all messages.
            ends: Whether branches that follow do not belong to those before: something was written, or answered.
        """
        self._fan += ends
        branches = [each for each in seen if self._is_from(each.entry)]
        whole = len(branches) == len(seen)
        said = [self._engine.handle(each.entry) for each in branches]
        ids = {self.stands_for.get(handle.id, handle).id for handle in said}
        for handle in view.handles[len(self._fans) :]:
            is_branch = handle.id in ids or (whole and handle.id not in view.separators)
            self._fans.append(self._fan if branches and is_branch else None)

    def _before(self, place: int) -> tuple[int, ...]:
        """The places that a boundary sees: all before its branch but those of branches that came together with it."""
        mine = self._fans[place]
        return tuple(at for at, fan in enumerate(self._fans[:place]) if fan is None or fan != mine)

    async def read_behind(self, view: PlacedView) -> list[MessageHandle]:
        """Show what the adapter reads behind each branch (see `Branches.boundaries`), if it reads that.

        It sees the branch and what stood before it, but no branch that came together with it. Nothing moves for it:
        what follows starts where it would have started.

        Args:
            view: With the branches in it.

        Returns:
            What was encoded, each with a lease.
        """
        shown = {handle.id for handle in self.stands_for.values()}
        behind = [at for at, fan in enumerate(self._fans) if fan is not None and view.handles[at].id in shown]
        calls: list[Prefill] = []
        places: list[int] = []
        for before, together in groupby(behind, key=self._before):
            alike = list(together)
            branches, anchors = [view.handles[at] for at in alike], [view.offsets[at] for at in alike]
            trunk, offsets = [view.handles[at] for at in before], [view.offsets[at] for at in before]
            made = self._engine.engine.branches.boundaries(branches, trunk, offsets, anchors, self._adapter)
            calls += made
            places += alike[: len(made)]
        handles = await self._engine.aprefill(calls) if calls else []
        for handle, place in zip(handles, places, strict=True):
            view.add_beside(handle, view.offsets[place] + view.handles[place].length)
        return handles
