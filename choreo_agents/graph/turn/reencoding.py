"""Private contexts that words are encoded in again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from choreo_agents.engine import Prefill
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.turn.bound_engine import BoundEngine
from choreo_agents.graph.turn.reader_rules import ReaderRules
from choreo_agents.graph.turn.run_place import RunPlace
from choreo_agents.kv.handle import MessageHandle

AskFor = Callable[[Sequence[Prefill]], Awaitable[list[MessageHandle]]]


async def named_context(
    name: str,
    parents: Sequence[MessageHandle],
    place: RunPlace,
    rules: ReaderRules,
    entries: Sequence[HandleEntry],
    bound: BoundEngine,
    ask_for: AskFor,
) -> list[MessageHandle]:
    """The messages of a private context, encoded after the root and the contexts named before.

    Args:
        name: As its graph calls it.
        parents: What they are encoded after.
        place: Of the reader, and `rules` by which it reads.
        entries: All that was said.
        bound: Its engine, and `ask_for` what encodes for it.
    """
    home = place.author.rpartition("|")[0]
    path = f"{home}|{name}" if home else name
    made: list[MessageHandle] = []
    for text in rules.systems.get(name, ()):
        turn = bound.engine.chat.turn("system", text)
        made += await ask_for([Prefill(turn, [*parents, *made], author=path, role="system")])
    if name not in rules.systems and name not in rules.confidential:
        raise VisibilityError(f"there is no private context {name!r} that words could be encoded in")
    for entry in sorted(entries, key=lambda one: one["superstep"]):
        if entry["author"] == path and entry["confidential"]:
            handle = MessageHandle.model_validate(entry["handle"])
            words = bound.tokens(bound.grant(handle, words_only=True))
            call = Prefill(words, [*parents, *made], author=path, confidential=True, source=handle)
            made += await ask_for([call])
    return made
