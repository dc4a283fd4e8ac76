"""A forgetting that is broken off anywhere is ended by the next, and takes nothing from other threads."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest
from langgraph.store.base import PutOp
from support.stored import TENANT, BreakingStore, keys_of, named, store_of, thread_named, writes

from choreo_agents.engine.lineage import Note
from choreo_agents.errors import StoreError
from choreo_agents.graph.durable.forgetting import forget_thread, leaving_of, rows_of
from choreo_agents.graph.durable.lineage_store import digest_of, everything

OWN, SHARED, LATER = range(600), range(600, 620), range(590, 600)
"""What Ann's thread alone has; what both have; and what Bob's comes to hold while hers is forgotten."""
CHAIN = {number: (number - 1,) for number in range(1, 620)}
WRITES = 8
"""That a forgetting of so many messages takes: holders, rows, what is put back, notes; two times."""


@cache
def written() -> list[PutOp]:
    return [*writes("ann", [*OWN, *SHARED], CHAIN), *writes("bob", SHARED)]


def filled(breaks_at: int | None = None) -> BreakingStore:
    store = BreakingStore(breaks_at)
    store.inner.batch(written())
    return store


def forget(store: BreakingStore, thread: str = "ann") -> list[str]:
    return asyncio.run(forget_thread(store, TENANT, thread_named(thread)))


def other_than_bobs(store: BreakingStore, *numbers: int) -> list[tuple[str, ...]]:
    """The first of what is there and should not be, or should and is not, if there is to be only what he has."""
    ids = [named(each) for each in numbers]
    notes = [("notes", TENANT, thread_named("bob"), each, digest_of(Note(each))) for each in ids]
    holders = [("holders", TENANT, each, thread_named("bob")) for each in ids]
    expected = {*(("rows", TENANT, each) for each in ids), *notes, *holders}
    return sorted({*keys_of(store.inner)} ^ expected)[:3]


def test_it_takes_so_many_writes() -> None:
    store = filled()
    assert sorted(forget(store)) == [named(each) for each in OWN]
    assert store.writes == WRITES and not other_than_bobs(store, *SHARED)
    assert forget(store) == [] and forget(store, "bob") == [named(each) for each in SHARED] and not keys_of(store.inner)


@pytest.mark.parametrize(
    ("breaks_at", "meanwhile"),
    [
        *((at, before) for at in range(WRITES) for before in range(at + 1)),
        *((None, before) for before in range(WRITES)),
    ],
)
def test_it_is_broken_off_while_another_thread_goes_on(breaks_at: int | None, meanwhile: int) -> None:
    """Bob's thread writes what only Ann's had right before any write, and any write from the same one on fails."""
    store = filled(breaks_at)
    store.between[meanwhile] = writes("bob", LATER)
    if breaks_at is None:
        forget(store)
    else:
        with pytest.raises(StoreError, match="nobody answers"):
            forget(store)
    # Before anybody has ended it, each row that he needs is found.
    found = asyncio.run(store_of(store).rows([named(each) for each in (*SHARED, *LATER)]))
    assert len(found) == len(SHARED) + len(LATER)
    store.breaks_at = None
    forget(store)
    assert not other_than_bobs(store, *LATER, *SHARED)


def test_another_threads_forgetting_ends_it_as_well() -> None:
    store = filled(breaks_at=2)
    with pytest.raises(StoreError):
        forget(store)
    assert len(asyncio.run(everything(store, leaving_of(TENANT)))) > 500, "rows are on their way out"
    store.breaks_at = None
    forget(store, "bob")
    assert not asyncio.run(everything(store, leaving_of(TENANT)))
    rows = {item.key for item in store.inner.search(rows_of(TENANT), limit=999)}
    assert {named(each) for each in SHARED} <= rows, "Ann's is not forgotten to its end"
