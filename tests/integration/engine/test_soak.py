"""Two thousand requests from eight tasks in two event loops: no leak, no wrong token, every tier in use.

`CHOREO_SOAK` sets another number of requests.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from choreo_agents import Engine, Memory, MessageHandle, Sampling, Scheduling
from choreo_agents.models import LoadedModel

REQUESTS = int(os.environ.get("CHOREO_SOAK", "2000"))
TASKS, LOOPS = 8, 2
BYTES_PER_TOKEN = 2 * 3 * 2 * 16 * 4
POOL, HOST, DISK = 640, 300, 2000
"""Tokens in each tier: all together hold less than the tasks' messages, so that some are computed again."""


@dataclass(eq=False)
class Said:
    """A message as its task remembers it."""

    handle: MessageHandle
    seen: tuple[tuple[Said, int], ...]
    """Parents and offsets."""
    start: int
    header: tuple[int, ...]
    sampling: Sampling | None
    """None for a prefill."""
    tokens: tuple[int, ...]


@dataclass
class Tally:
    requests: int = 0
    cancelled: int = 0
    said: list[Said] = field(default_factory=list)
    """Every twentieth message, to be computed again by an engine that has nothing else to do."""


async def work(engine: Engine, number: int, tally: Tally) -> None:
    """One task: prefills, decodes and cancelled decodes over random views of its own messages; then it releases all."""
    rng = random.Random(number)
    mine: list[Said] = []
    for _ in range(REQUESTS // TASKS):
        tally.requests += 1
        seen, at = [], 0
        for said in rng.sample(mine, rng.randint(0, min(3, len(mine)))):
            seen.append((said, at))
            at += said.handle.length + rng.choice((0, 0, 5))
        header = tuple(rng.randrange(3, 360) for _ in range(rng.randint(1, 24)))
        parents, offsets = [said.handle for said, _ in seen], [offset for _, offset in seen]
        sampling = Sampling(
            max_tokens=rng.randint(1, 12), stop_tokens=(), temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(1000)
        )
        if rng.random() < 0.1:
            call = asyncio.create_task(engine.adecode(header, parents, offsets, at, sampling=sampling))
            await asyncio.sleep(rng.random() * 0.01)
            call.cancel()
            try:
                engine.release(await call)
            except asyncio.CancelledError:
                tally.cancelled += 1
            continue
        if rng.random() < 0.35:
            handle = await engine.aprefill(header, parents, offsets, at)
            made = Said(handle, tuple(seen), at, header, None, header)
        else:
            handle = await engine.adecode(header, parents, offsets, at, sampling=sampling)
            made = Said(handle, tuple(seen), at, header, sampling, tuple(engine.tokens(handle)))
        mine.append(made)
        if len(tally.said) < tally.requests // 20:
            tally.said.append(made)
        if rng.random() < 0.02:
            engine.kv.offload()
        if len(mine) > 40:
            engine.release(mine.pop(rng.randrange(len(mine))).handle)
    for said in mine:
        engine.release(said.handle)


def again(engine: Engine, said: Said, known: dict[Said, MessageHandle]) -> MessageHandle:
    """The same message from its lineage, in another engine."""
    if said not in known:
        parents = [again(engine, parent, known) for parent, _ in said.seen]
        offsets = [offset for _, offset in said.seen]
        if said.sampling is None:
            known[said] = engine.prefill(said.header, parents, offsets, said.start)
        else:
            known[said] = engine.decode(said.header, parents, offsets, said.start, sampling=said.sampling)
    return known[said]


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_soak_leaks_nothing_and_says_nothing_wrong(tiny: LoadedModel, tmp_path: Path, capsys) -> None:
    tallies = [Tally() for _ in range(TASKS)]
    memory = Memory(
        kv_budget_bytes=POOL * BYTES_PER_TOKEN,
        host_bytes=HOST * BYTES_PER_TOKEN,
        disk=tmp_path,
        disk_bytes=DISK * BYTES_PER_TOKEN,
    )
    with Engine.load(tiny, memory=memory, scheduling=Scheduling(max_batched_tokens=128)) as engine:

        async def several(first: int) -> None:
            await asyncio.gather(*(work(engine, i, tallies[i]) for i in range(first, TASKS, LOOPS)))

        failures: list[BaseException] = []

        def run(first: int) -> None:
            try:
                asyncio.run(several(first))
            except BaseException as error:
                failures.append(error)

        begun = time.perf_counter()
        threads = [threading.Thread(target=run, args=(first,)) for first in range(LOOPS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - begun
        assert not failures, failures
        while engine.stats().unfinished:
            time.sleep(0.001)
        stats = engine.stats()
        engine.check()
        assert (stats.kv_bytes, stats.host_bytes, stats.leases, stats.messages) == (0, 0, 0, 0)
        assert stats.failed == 0
        assert stats.evicted and stats.restored_from_host and stats.restored_from_disk and stats.recomputed
    requests, cancelled = sum(t.requests for t in tallies), sum(t.cancelled for t in tallies)
    assert requests == REQUESTS // TASKS * TASKS and cancelled > requests // 20
    assert not any(thread.name == "choreo-engine" for thread in threading.enumerate())

    checked = 0
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 26)) as quiet:
        known: dict[Said, MessageHandle] = {}
        for tally in tallies:
            for said in tally.said:
                assert tuple(quiet.tokens(again(quiet, said, known))) == said.tokens
                checked += 1
    with capsys.disabled():
        sys.stdout.write(
            f"\nsoak: {requests} requests ({cancelled} cancelled) in {elapsed:.0f} s, "
            f"{requests / elapsed:.0f} a second; {stats.tokens_encoded / elapsed:.0f} tokens encoded a second; "
            f"{stats.evicted} messages left the pool, {stats.restored_from_host} came back from the host, "
            f"{stats.restored_from_disk} from the disk, {stats.recomputed} were computed again; "
            f"{checked} messages checked\n"
        )
