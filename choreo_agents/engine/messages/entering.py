"""How a message comes into the table: with all that belongs to it, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.segment import Segment
from choreo_agents.sampling import Chosen


@contextmanager
def entering(table: MessageTable, made: Message, segment: Segment | None = None) -> Iterator[Message]:
    """Add a message, or find the one with the same id, for a block that leases it: nobody keeps it otherwise.

    All or nothing: if anything fails, here or in the block, messages, leases and memos are as they were, and the
    segment is given back unless somebody waits to read this very message.

    Args:
        table: Which.
        made: The message.
        segment: Its KV. The pin is taken over in any case: for the message, or given back.
    """
    known = table.known(made.handle.id)
    message = made if known is None else known
    before = message.remembered()
    held = False
    try:
        lost = message.entry is None or table.cache.lost(message.entry)
        held = segment is not None and lost
        table.fill(message, segment if lost else None)
        if segment is not None or lost:
            message.usage, message.promise, message.again = made.usage, made.promise, made.again
        message.finish_reason = made.finish_reason or message.finish_reason
        if made.chosen is not None and not (message.chosen and _tells_more(message.chosen, made.chosen)):
            message.chosen, message.header = made.chosen, made.header
        yield message
        table.drop_if_unleased(message)
    except BaseException:
        holder = None if segment is None else segment.holder
        held = holder is not None
        if isinstance(holder, CacheEntry) and holder is not message.entry:
            table.cache.drop(holder)
        # Whoever wants to read it meanwhile waits for this entry; the rest is as before.
        table.put_back(message, before | {"entry": message.entry, "lineage": message.lineage})
        raise
    finally:
        if segment is not None and not held:
            # The same content was decoded twice, and the first encoding serves both; or nothing came of it.
            table.cache.pool.unpin(segment)


def _tells_more(known: Sequence[Chosen], made: Sequence[Chosen]) -> bool:
    """Whether of two ways to sample one message the known one, in which something was sampled, is to be kept."""
    return not made or known[0].logprob is not None
