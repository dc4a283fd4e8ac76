"""The spill file of an engine: who leaves it for whom, and at what price."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.entry_files import DiskThread, EntryFiles
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store.spill import SpillFile
from choreo_agents.kv.tier_counters import TierCounters
from choreo_agents.kv.tiers import HostKV
from choreo_agents.tracing import PerTenantCounters

GEOMETRY = KVGeometry(1, 1, 8, torch.float32)
TOKENS = 4
ENTRIES = 50


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskThread]:
    spill = SpillFile(tmp_path, GEOMETRY, ENTRIES * TOKENS * GEOMETRY.bytes_per_token, lambda path, why: None)
    thread = DiskThread(spill)
    yield thread
    thread.end()
    thread.close()


def files_on(disk: DiskThread) -> tuple[EntryFiles, PerTenantCounters[TierCounters]]:
    counters = PerTenantCounters(TierCounters)
    return EntryFiles(disk, {}, counters, deque(), lambda event: None), counters


def kv(number: int) -> HostKV:
    return HostKV(torch.full((1, 1, TOKENS, 8), float(number)), torch.zeros(1, 1, TOKENS, 8))


def spilled(files: EntryFiles, number: int) -> CacheEntry:
    entry = CacheEntry(str(number), TOKENS, 0)
    files.put(entry, kv(number))
    return entry


def written(files: EntryFiles, entry: CacheEntry) -> CacheEntry:
    files.arrive(entry, wait=True)
    return entry


class Counted(OrderedDict[Any, Any]):
    """Counts the entries that are looked at one after the other."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.looked_at += 1
            yield each


def test_a_full_file_looks_at_nobody_but_those_who_leave(disk: DiskThread) -> None:
    files, counters = files_on(disk)
    files._spilled = Counted()
    entries = [written(files, spilled(files, number)) for number in range(ENTRIES)]
    assert files._spilled.looked_at == 0 and all(entry.on_disk for entry in entries)
    for number in range(5):
        written(files, spilled(files, ENTRIES + number))
    assert [entry.on_disk for entry in entries] == [False] * 5 + [True] * (ENTRIES - 5)
    assert files._spilled.looked_at == 5 and counters.so_far(None).lost == 5


def test_a_file_that_ends_early_is_not_believed_whatever_memory_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory may be that of what was written, so that even the digest is right."""
    told: list[str] = []
    spill = SpillFile(tmp_path, GEOMETRY, 1 << 20, lambda path, why: told.append(why))
    runs = spill.space.allocate(TOKENS)
    assert runs is not None
    written_kv = kv(1)
    digest = spill.write(runs, written_kv)
    spill.file.truncate(TOKENS * GEOMETRY.bytes_per_token - 1)
    monkeypatch.setattr(torch, "empty", lambda *_, dtype: torch.stack([written_kv.keys, written_kv.values]))
    assert spill.read(runs, digest, 0) is None and told == ["cannot be read: it ends early"]
    spill.file.close()


def test_nobody_leaves_for_what_has_no_room_all_the_same(disk: DiskThread) -> None:
    files, counters = files_on(disk)
    entries = [written(files, spilled(files, number)) for number in range(ENTRIES)]
    over = threading.Event()
    disk.submit(over.wait)
    entries[-1].wanted = 1
    files.fetch(entries[-1])
    large = CacheEntry("large", ENTRIES * TOKENS, 0)
    files.put(large, HostKV(*torch.zeros(2, 1, 1, ENTRIES * TOKENS, 8)))
    over.set()
    assert large.writing is None and counters.so_far(None).lost == 1
    assert all(entry.on_disk for entry in entries)


def test_what_is_being_read_keeps_its_space(disk: DiskThread) -> None:
    files, counters = files_on(disk)
    entries = [written(files, spilled(files, number)) for number in range(ENTRIES)]
    over = threading.Event()
    disk.submit(over.wait)
    for entry in entries:
        entry.wanted = 1
        files.fetch(entry)
    late = spilled(files, ENTRIES)
    assert not late.on_disk and late.writing is None and counters.so_far(None).lost == 1, "there is no room for it"
    assert all(entry.on_disk for entry in entries)
    over.set()
    for number, entry in enumerate(entries):
        assert entry.fetching is not None and entry.fetching.result() is not None
        if number < ENTRIES // 2:
            files.arrive(entry)
            assert entry.staged is not None and bool((entry.staged.keys == number).all())
    # The others are read, and nobody has looked: they leave for what comes, and stay on the host for who waits.
    assert written(files, spilled(files, ENTRIES + 1)).on_disk
    [gone] = [entry for entry in entries if not entry.on_disk]
    assert gone.staged is not None and counters.so_far(None).lost == 1
