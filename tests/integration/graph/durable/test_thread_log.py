"""A thread's log: what one process writes another reads, and what is broken off leaves a whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.store.base import GetOp, Op, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore
from support.stored import BreakingStore, described, log_of, named

from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.thread_log import read_items


@pytest.mark.parametrize("speakers", [1, 3, 40])
async def test_what_reads_all_that_was_said_before_is_written_once(speakers: int) -> None:
    """They speak by turns, each behind a note of its own: a row names what the speaker has read before."""
    store, size = InMemoryStore(), dict[int, int]()
    log = log_of(store)
    for number in range(speakers, speakers + 300):
        seen = [number % speakers, *range(speakers, number)]
        await log.write([described(number, seen, [f"call {number}"])])
        size[number] = len(str(max(store.search(log.place, limit=999), key=lambda item: item.key).value))
    found, last = await log_of(store).read(), speakers + 299
    assert len(found.rows) == 300 and found.answers[f"call {last}"] == named(last) and found.damaged is None
    row = found.rows[named(last)]
    assert [each for each, _ in row.parents] == [named(each) for each in (last % speakers, *range(speakers, last))]
    assert [row.at + offset for _, offset in row.parents] == [*range(300)]
    assert max(size[each] for each in range(last - speakers, last)) < 1.2 * max(size[2 * speakers], size[speakers + 10])


async def test_the_last_answer_counts_whoever_gave_it() -> None:
    store = InMemoryStore()
    one, two = log_of(store), log_of(store)
    await one.write([described(1, memos=["call"])])
    await two.read()
    await one.write([described(2, memos=["call"])])
    await two.write([described(3, memos=["call"])])
    assert (await one.read()).answers == {"call": named(3)}


async def test_what_others_have_written_or_deleted_is_noticed() -> None:
    store = InMemoryStore()
    one, two = log_of(store), log_of(store)
    assert await one.is_known() and await two.is_known()
    for number in range(3):
        await one.write([described(number)])
        assert await one.is_known() and not await two.is_known()
        await two.read()
        assert await two.is_known()
    await two.delete(lambda ids: None)
    for number in range(3):
        assert not await one.is_known()
        await two.write([described(number)])
    assert not await one.is_known(), "as many as before"


async def test_a_write_that_fails_is_named_by_nobody() -> None:
    store = BreakingStore(breaks_at=1)
    log = log_of(store)
    await log.write([described(1)])
    with pytest.raises(StoreError, match="nobody answers"):
        await log.write([described(2, [1])])
    store.breaks_at = None
    assert await log.is_known()
    await log.write([described(3, [1])])
    found = await log.read()
    assert {*found.rows} == {named(1), named(3)} and found.damaged is None


async def test_deleting_is_broken_off_anywhere_and_ended_by_the_next() -> None:
    for breaks_at in (0, 1, 2):
        store, dropped = BreakingStore(), list[str]()
        log, other = log_of(store), log_of(store, "2")
        for number in range(1200):
            await log.write([described(number, range(max(0, number - 3), number))])
        await other.write([described(5)])
        store.breaks_at = store.writes + breaks_at
        with pytest.raises(StoreError):
            await log.delete(dropped.extend)
        assert dropped == [named(number) for number in range(1200)]
        left = await log_of(store).read()
        assert left.damaged is None and len(left.rows) == 1200 - 512 * breaks_at
        assert all(parent in left.rows for row in left.rows.values() for parent, _ in row.parents)
        store.breaks_at = None
        await log.delete(dropped.extend)
        assert not await read_items(store, log.place) and len(await read_items(store, other.place)) == 1


async def test_what_waits_to_be_written_is_deleted_too() -> None:
    """A run that was cancelled leaves what it would have written to whoever writes next."""
    store, may = BreakingStore(), asyncio.Event()
    log, other = log_of(store), log_of(store, "2")
    slow, inner = store.abatch, store.inner

    async def wait(ops: Any) -> Any:
        listed = [*ops]
        if any(isinstance(op, PutOp) for op in listed):
            await may.wait()
        return inner.batch(listed)

    store.abatch = wait  # type: ignore[method-assign]
    first = asyncio.create_task(other.write([described(1)]))
    await asyncio.sleep(0)
    left = asyncio.create_task(log.write([described(2)]))
    await asyncio.sleep(0)
    left.cancel()
    deleting = asyncio.create_task(log.delete(lambda ids: None))
    await asyncio.sleep(0)
    may.set()
    await asyncio.gather(first, deleting)
    store.abatch = slow  # type: ignore[method-assign]
    assert not await read_items(store, log.place) and len(await read_items(store, other.place)) == 1


class Expiring(InMemoryStore):
    """Notes down for how long things are to be kept, and who is kept for longer."""

    supports_ttl = True

    def __init__(self) -> None:
        super().__init__()
        self.ttl_config = {"default_ttl": 60.0}
        self.refreshed = 0
        self.ttls: list[float | None] = []

    async def abatch(self, ops: Any) -> list[Any]:
        listed: list[Op] = [*ops]
        self.refreshed += sum(isinstance(op, SearchOp | GetOp) and op.refresh_ttl for op in listed)
        self.ttls += [op.ttl for op in listed if isinstance(op, PutOp)]
        return await super().abatch(listed)


async def test_a_log_lives_for_as_long_as_its_store_says(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Expiring()
    log = log_of(store)
    await log.read()
    await log.write([described(1)])
    assert store.ttls == [60.0] and store.refreshed == 1 and not log.is_stale
    now = log._read_s
    monkeypatch.setattr("choreo_agents.graph.durable.thread_log.time.monotonic", lambda: now + 31 * 60)
    assert log.is_stale
    await log.read()
    assert store.refreshed == 2 and not log.is_stale
    assert not log_of(InMemoryStore()).is_stale
