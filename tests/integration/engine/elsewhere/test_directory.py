"""Several fronts of the same engines: what one has had encoded, another reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import pytest

from choreo_agents import Engine, Memory, Sampling
from choreo_agents.engine import engine_over
from choreo_agents.engine.elsewhere.directory import HandleDirectory, KnownHolders
from choreo_agents.models import LoadedModel

MEMORY = Memory(kv_budget_bytes=1 << 23)
GREEDY = Sampling(max_tokens=8, stop_tokens=())
TRUNK = "Ann has 3 red kites. " * 6


class NearDirectory:
    """A directory of this process; it can be lost, and replaced."""

    def __init__(self) -> None:
        self.inner: HandleDirectory | None = HandleDirectory()
        self.asked = 0

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> str:
        return "" if self.inner is None else self.inner.report(front, engine, added, removed)

    async def holders(self, front: str, ids: Collection[str]) -> KnownHolders:
        self.asked += 1
        return KnownHolders("", {}) if self.inner is None else self.inner.holders(front, ids)

    async def lost(self, engine: str) -> None:
        if self.inner is not None:
            self.inner.lost(engine)

    async def gone(self, front: str) -> None:
        if self.inner is not None:
            self.inner.gone(front)


class Shared:
    """Two engines, and fronts over them with one directory."""

    def __init__(self, model: LoadedModel) -> None:
        self.directory = NearDirectory()
        self.engines = [Engine.load(model, memory=MEMORY) for _ in range(2)]
        self.model = model
        self.servers = [engine.owner.server(f"engine {n}") for n, engine in enumerate(self.engines) if engine.owner]
        self.fronts: list[Engine] = []

    def front(self, salt: str = "ours") -> Engine:
        """One more, of a tenant."""
        self.fronts.append(engine_over(self.servers, self.model, salt=salt, directory=self.directory))
        return self.fronts[-1]

    def encoded(self) -> int:
        """Tokens, by both engines."""
        return sum(engine.owner.stats().tokens_encoded for engine in self.engines if engine.owner)

    def close(self) -> None:
        for each in (*self.fronts, *self.engines):
            each.check()
            each.close()


@pytest.fixture
def shared(tiny: LoadedModel) -> Iterator[Shared]:
    made = Shared(tiny)
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> None:
    """Reports go out soon."""
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to that")


def test_what_one_front_has_had_encoded_another_finds(shared: Shared) -> None:
    one, other = shared.front(), shared.front()
    trunk = one.prefill([7] * 60)
    until(lambda: shared.directory.inner is not None and len(shared.directory.inner) == 1)
    before = shared.encoded()
    again = other.prefill([7] * 60)
    assert again == trunk and shared.encoded() == before, "it was found where it is"
    said = other.tokens(other.decode([9], [again], sampling=GREEDY))
    assert said == one.tokens(one.decode([9], [trunk], sampling=GREEDY))
    assert shared.encoded() - before == 2 * (1 + 8), "each has decoded, over one trunk"


def test_tenants_of_one_name_only_find_each_other(shared: Shared) -> None:
    one, stranger = shared.front(), shared.front("theirs")
    trunk = one.prefill([7] * 60)
    until(lambda: shared.directory.inner is not None and len(shared.directory.inner) == 1)
    before = shared.encoded()
    assert stranger.prefill([7] * 60) != trunk and shared.encoded() - before == 60


def test_who_has_no_salt_is_told_of_to_nobody(shared: Shared) -> None:
    one = shared.front("")
    one.prefill([7] * 60)
    salted = one.tenant("s")
    salted.prefill([8] * 10)
    until(lambda: shared.directory.inner is not None and len(shared.directory.inner) == 1)
    assert shared.directory.asked == 1, "nor does it ask"


def test_a_directory_that_was_lost_is_told_again(shared: Shared) -> None:
    one, other = shared.front(), shared.front()
    first = one.prefill([7] * 60)
    until(lambda: shared.directory.inner is not None and len(shared.directory.inner) == 1)
    shared.directory.inner = None
    second = one.prefill([8] * 40, [first])
    assert one.usage(second).tokens_encoded == 40, "calls go on without one"
    inner = shared.directory.inner = HandleDirectory()
    one.prefill([9] * 5)
    until(lambda: len(inner) == 3)
    inner.check()
    before = shared.encoded()
    assert other.prefill([8] * 40, [other.prefill([7] * 60)]) == second and shared.encoded() == before


def test_a_directory_that_did_not_answer_at_first_is_told_what_it_missed(shared: Shared) -> None:
    inner, shared.directory.inner = shared.directory.inner, None
    one = shared.front()
    one.prefill([7] * 60)
    asked = shared.directory.asked
    shared.directory.inner = inner
    one.prefill([8] * 40)
    assert inner is not None and shared.directory.asked > asked
    until(lambda: len(inner) == 2)
    inner.check()


def test_what_is_released_is_told_and_a_front_that_goes(shared: Shared) -> None:
    one = shared.front()
    trunk, other = one.prefill([7] * 60), one.prefill([8] * 60)
    inner = shared.directory.inner
    assert inner is not None
    until(lambda: len(inner) == 2)
    one.release(trunk)
    until(lambda: len(inner) == 1)
    assert one.tokens(other) == [8] * 60
    shared.fronts.remove(one)
    one.close()
    assert len(inner) == 0
    inner.check()
