"""What stands in a synthesizer's view for the messages that it merges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from choreo_agents.engine import Engine
from choreo_agents.errors import HandleError
from choreo_agents.graph.bound import BoundEngine
from choreo_agents.graph.placing import PlacedView
from choreo_agents.graph.view import Seen, source_of_author
from choreo_agents.kv.handle import MessageHandle


@dataclass(frozen=True)
class Merging:
    """Whose messages a synthesizer merges, and what becomes of their encodings first."""

    sources: frozenset[str]
    summary: str | None = None
    """What each of their speakers is asked to say it shorter; None: they are read as they are."""


async def stand_ins(
    engine: Engine, seen: Sequence[Seen], reader: str, merging: Merging | None, adapter: str | None
) -> tuple[Mapping[str, MessageHandle], list[MessageHandle]]:
    """Shorter messages, or copies by the adapter's cache mapper, in the place of those that are merged.

    Args:
        engine: Makes them.
        seen: The messages of the view; those whose own encodings are to be merged are replaced.
        reader: Whose view it is.
        merging: None: nothing is merged.
        adapter: The reader's.

    Returns:
        By the id of what they stand for; and those of them that have a lease, to be released.
    """
    merged = [
        MessageHandle.model_validate(entry["handle"])
        for entry, rule in seen
        if merging and rule.mode == "shared" and source_of_author(entry["author"], reader) in merging.sources
    ]
    if merging is None or not merged:
        return {}, []
    made = [] if merging.summary is None else await engine.asummaries(merged, merging.summary)
    shown = made or list(merged)
    try:
        if engine.maps(adapter):
            shown = await engine.amap(shown, adapter)
    except BaseException:
        with suppress(HandleError):  # a scope may have ended meanwhile
            for handle in made:
                engine.release(handle)
        raise
    return {handle.id: stand for handle, stand in zip(merged, shown, strict=True)}, made


async def read_boundaries(
    engine: BoundEngine, view: PlacedView, merged: Collection[MessageHandle], adapter: str | None, first: int = 0
) -> list[MessageHandle]:
    """Show what a synthesizer's adapter reads behind each branch (see `Engine.boundaries`), if it reads that.

    Nothing moves for it: what follows starts where it would have started.

    Args:
        engine: The reader's.
        view: With the branches in it.
        merged: They, as they are shown.
        adapter: The reader's.
        first: The place in the view of the first branch to read behind; all before it have been.

    Returns:
        What was encoded, each with a lease.
    """
    shown = {handle.id for handle in merged}
    places = [place for place, handle in enumerate(view.handles) if handle.id in shown]
    behind = [place for place in places if place >= first]
    if not behind:
        return []
    trunk, branches = slice(places[0]), [view.handles[place] for place in behind]
    anchors = [view.offsets[place] for place in behind]
    calls = engine.engine.boundaries(branches, view.handles[trunk], view.offsets[trunk], anchors, adapter)
    made = await engine.aprefill(calls)
    for handle, place in zip(made, behind, strict=False):
        view.offsets.append(view.offsets[place] + view.handles[place].length)
        view.handles.append(handle)
    return made
