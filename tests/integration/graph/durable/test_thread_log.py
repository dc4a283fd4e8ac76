"""A thread's log: what one process writes another reads, and what is broken off leaves a whole."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from langgraph.store.base import GetOp, Op, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore
from support.stored import BreakingStore, described, log_of, named

from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.thread_log import FORMAT, read_items

T = TypeVar("T")


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
    assert len(found.keys) == 300 and found.answers[f"call {last}"] == named(last) and found.damaged is None
    key = found.keys[named(last)]
    assert [each for each, _ in key.parents] == [named(each) for each in (last % speakers, *range(speakers, last))]
    assert [key.native_offset + offset for _, offset in key.parents] == [*range(300)]
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
    assert {*found.keys} == {named(1), named(3)} and found.damaged is None


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
        assert left.damaged is None and len(left.keys) == 1200 - 512 * breaks_at
        assert all(parent in left.keys for key in left.keys.values() for parent, _ in key.parents)
        store.breaks_at = None
        await log.delete(dropped.extend)
        assert not await read_items(store, log.place) and len(await read_items(store, other.place)) == 1


async def test_whoever_is_cancelled_waits_for_what_it_writes() -> None:
    """A thread is not deleted while a node uses it: nothing of it is written afterwards."""
    store, may = BreakingStore(), asyncio.Event()
    log, inner = log_of(store), store.inner

    async def wait(ops: Any) -> Any:
        await may.wait()
        return inner.batch([*ops])

    store.abatch = wait  # type: ignore[method-assign]
    writing = asyncio.create_task(log.write([described(1)]))
    await asyncio.sleep(0)
    for _ in range(9):
        await asyncio.sleep(0)
        writing.cancel()
    assert not writing.done()
    may.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(await read_items(store, log.place)) == 1 and await log.is_known()
    await log.delete(lambda ids: None)
    assert not await read_items(store, log.place)


async def test_what_ends_together_is_one_commit() -> None:
    store = BreakingStore()
    logs = [log_of(store, str(number)) for number in range(16)]
    for _ in range(2):
        await asyncio.gather(*(log.write([described(1)]) for log in logs))
    assert store.writes == 2
    for log in logs:
        assert len(await read_items(store, log.place)) == 2


async def test_what_cannot_be_written_of_one_is_not_the_others_fault() -> None:
    class Refusing(InMemoryStore):
        async def abatch(self, ops: Any) -> list[Any]:
            listed = [*ops]
            if any(isinstance(op, PutOp) and op.namespace == bad.place for op in listed):
                raise ValueError("no")
            return self.batch(listed)

    store = Refusing()
    bad, *good = [log_of(store, str(number)) for number in range(3)]
    ended = await asyncio.gather(
        *(log.write([described(1)]) for log in (good[0], bad, good[1])), return_exceptions=True
    )
    assert [type(each) for each in ended] == [type(None), StoreError, type(None)]
    assert [len(await read_items(store, log.place)) for log in (good[0], bad, good[1])] == [1, 0, 1]


def test_what_was_written_is_not_kept_in_memory() -> None:
    """Neither the words of a thread that is deleted, nor a store whose last write has failed."""
    store, broken = BreakingStore(), BreakingStore()
    log, other = log_of(store), log_of(broken)
    broken.breaks_at = 0
    asyncio.run(log.write([described(4242)]))
    asyncio.run(log.delete(lambda ids: None))
    with pytest.raises(StoreError):
        asyncio.run(other.write([described(1)]))
    gone = weakref.ref(broken)
    del log, other, broken
    gc.collect()
    held = [op for op in gc.get_objects() if isinstance(op, PutOp) and op.value and "4242" in str(op.value)]
    assert not held and gone() is None


class Waiting(InMemoryStore):
    """A store whose writes wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()

    async def abatch(self, ops: Any) -> list[Any]:
        listed: list[Op] = [*ops]
        if any(isinstance(op, PutOp) for op in listed):
            await self.may.wait()
        return self.batch(listed)


async def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has got as far as it gets by itself."""
    task = asyncio.create_task(work)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_what_waits_to_be_written_is_deleted_too() -> None:
    """A run whose event loop has ended leaves what it would have written to the loop whose batch it is in."""
    store = Waiting()
    log, *others = [log_of(store, str(number)) for number in range(3)]
    writing = [await begun(other.write([described(1)])) for other in others]
    await asyncio.to_thread(asyncio.run, begun(log.write([described(2)])))
    deleting = await begun(log.delete(lambda ids: None))
    store.may.set()
    await asyncio.gather(*writing, deleting)
    assert [len(await read_items(store, each.place)) for each in (log, *others)] == [0, 1, 1]


async def test_who_waits_for_a_loop_that_ends_is_told() -> None:
    store = Waiting()
    first, leading, log = [log_of(store, str(number)) for number in range(3)]
    writing = await begun(first.write([described(1)]))
    opened, joined = threading.Event(), threading.Event()

    async def left() -> None:
        await begun(leading.write([described(2)]))
        opened.set()
        joined.wait()

    ending = asyncio.create_task(asyncio.to_thread(asyncio.run, left()))
    await asyncio.to_thread(opened.wait)
    waiting = await begun(log.write([described(3)]))
    joined.set()
    with pytest.raises(StoreError, match="interrupted: run it again"):
        await waiting
    await ending
    deleting = await begun(first.delete(lambda ids: None))
    store.may.set()
    await asyncio.gather(writing, deleting)
    await log.write([described(3)])
    assert [len(await read_items(store, each.place)) for each in (first, leading, log)] == [0, 0, 1]


def test_a_loop_that_ends_leaves_the_store_to_others() -> None:
    """Its writes are broken off."""
    store, inner = BreakingStore(), InMemoryStore()
    waits = True

    async def wait(ops: Any) -> Any:
        while waits:
            await asyncio.Event().wait()
        return inner.batch([*ops])

    store.abatch = wait  # type: ignore[method-assign]
    one, other = log_of(store), log_of(store, "2")

    async def left() -> None:
        task = asyncio.create_task(one.write([described(1)]))
        for _ in range(9):
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(left())
    waits = False
    asyncio.run(other.write([described(2)]))
    assert len(inner.search(other.place)) == 1


async def test_what_refers_to_a_lost_message_is_damaged() -> None:
    store = InMemoryStore()
    log = log_of(store)
    for number in range(5):
        await log.write([described(number, range(number))])
    *_, lost, last = await read_items(store, log.place)
    assert last.value["messages"][0]["like"][0] == lost.value["messages"][0]["id"]
    store.delete(log.place, lost.key)
    found = await log_of(store).read()
    assert "which is not in the store" in (found.damaged or "") and {*found.keys} == {named(each) for each in range(3)}


ROW: dict[str, Any] = {"id": named(2), "model": "model", "tokens": [2], "parents": [], "at": 0}


@pytest.mark.parametrize(
    "plain",
    [
        *({name: value for name, value in ROW.items() if name != missing} for missing in ("at", "tokens", "parents")),
        *(ROW | {"tokens": tokens} for tokens in ([], ["a"], 3)),
        *(ROW | {"like": like} for like in ([named(7), 1], [named(1), "1"], 3)),
        ROW | {"parents": [[1]]},
        {},
        3,
        None,
    ],
    ids=str,
)
async def test_what_is_no_row_is_refused_and_all_others_are_read(plain: Any) -> None:
    store, dropped = InMemoryStore(), list[str]()
    log = log_of(store)
    await log.write([described(1)])
    await log.write([described(3)])
    for number, entry in enumerate(({"messages": [plain]}, {})):
        key, value = f"{number:020} a", {"v": FORMAT, **entry}
        store.put(log.place, key, value | {"seal": log._seals.seal(log._seal_purpose(key), value)})
        found = await log_of(store).read()
        assert found.damaged and {*found.keys} == {named(1), named(3)}
    await log.delete(dropped.extend)
    assert {named(1), named(3)} <= {*dropped} and not await read_items(store, log.place)


async def test_a_store_that_has_a_lock_of_its_own_kind_fails_as_others_do() -> None:
    class Locked(BreakingStore):
        conn, lock = sqlite3.connect(":memory:", check_same_thread=False), asyncio.Lock()

    with pytest.raises(StoreError, match="nobody answers"):
        await log_of(Locked(breaks_at=0)).write([described(1)])
    Locked.conn.close()


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
