"""Mapped copies and adapted messages leave the pool, come back, and stay apart, like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from support.adapters import save_adapter, save_mapper

from choreo_agents import Decode, Engine, MessageHandle, Prefill, Sampling
from choreo_agents.errors import UnknownHandleError
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.step_trace import StepTrace

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
SMALL = 256 * TOKEN
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "lost": lambda _: {},
    "host": lambda _: {"host_bytes": 1 << 30},
    "disk": lambda folder: {"disk": folder},
    "tight": lambda folder: {"host_bytes": 40 * TOKEN, "disk": folder, "disk_bytes": 120 * TOKEN},
}


@pytest.fixture(scope="module")
def both(tiny: LoadedModel, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter and a mapper."""
    return save_mapper(save_adapter(tmp_path_factory.mktemp("both") / "both", tiny_path), tiny)


def words(first: int, count: int) -> list[int]:
    return [3 + (first + 7 * i) % 300 for i in range(count)]


def branches_of(engine: Engine) -> list[MessageHandle]:
    """One that the engine's adapter has encoded, and one of the base; their trunk is released."""
    root = engine.prefill(words(1, 24))
    made = engine.prefill([Prefill(words(2, 20), [root]), Prefill(words(3, 30), [root], adapter="base")])
    engine.release(root)
    return made


def fill(engine: Engine) -> None:
    """Push out whatever is idle."""
    for seed in range(3):
        with engine.scope():
            engine.prefill(words(100 + seed, 250), adapter="base")


def heard(engine: Engine, view: list[MessageHandle], **options: Any) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    watch = lambda logits: seen.append(logits.clone())  # noqa: E731
    forced = Sampling(forced_token_ids=(5, 6, 7, 8))
    engine.release(engine.decode([Decode([7], view, sampling=forced, logits_callback=watch, **options)])[0])
    return torch.stack(seen)


@pytest.fixture
def wanted(make_engine: MakeEngine, both: Path) -> torch.Tensor:
    engine = make_engine(adapter=both)
    return heard(engine, engine.branches.map(branches_of(engine))[::-1])


@pytest.mark.parametrize("tiers", TIERS)
def test_copies_that_left_the_pool_come_back(
    make_engine: MakeEngine, both: Path, tmp_path: Path, wanted: torch.Tensor, tiers: str
) -> None:
    engine = make_engine(adapter=both, kv_budget_bytes=SMALL, **TIERS[tiers](tmp_path))
    copies = engine.branches.map(branches_of(engine))
    fill(engine)
    assert engine.stats().evicted >= 4
    mapped, again = engine.stats().tokens_mapped, engine.stats().tokens_recomputed
    torch.testing.assert_close(heard(engine, copies[::-1]), wanted, atol=1e-4, rtol=0)
    stats = engine.stats()
    if tiers == "lost":
        # The root, then the sources, then what is made of them again.
        root, branches = 24, 50
        assert stats.recomputed == 5 and stats.tokens_recomputed - again == root + 2 * branches
    assert stats.tokens_mapped == mapped, "for the first time"
    if tiers in ("host", "disk"):
        assert stats.recomputed == 0
        assert stats.restored_from_host + stats.restored_from_disk >= 2
        before = heard(engine, copies)
        engine.kv.offload()
        assert torch.equal(heard(engine, copies), before)
    fill(engine)
    assert engine.branches.map([engine.prefill(words(9, 10))])[0].length == 10


def test_copies_are_made_again_after_a_restart(make_engine: MakeEngine, both: Path, wanted: torch.Tensor) -> None:
    engine = make_engine(adapter=both)
    sources = branches_of(engine)
    copies = engine.branches.map(sources)
    engine.admin.restart()
    assert engine.stats().kv_bytes == 0
    torch.testing.assert_close(heard(engine, copies[::-1]), wanted, atol=1e-4, rtol=0)
    assert engine.stats().recomputed == 5 and engine.branches.map(sources) == copies
    for source in sources:
        engine.release(source)
    assert engine.stats().messages == engine.stats().kv_bytes == 0


def test_a_source_that_is_encoded_again_elsewhere_is_mapped_alike(
    make_engine: MakeEngine, both: Path, wanted: torch.Tensor
) -> None:
    """Released, and prefilled at another place: the copies of before and of now are of equal worth."""
    engine = make_engine(adapter=both)
    root = engine.prefill(words(1, 24))
    sources = engine.prefill(
        [Prefill(words(2, 20), [root], [0], 24), Prefill(words(3, 30), [root], [0], 24, adapter="base")]
    )
    copies = engine.branches.map(sources)
    keeping = engine.decode([7], copies, sampling=Sampling(forced_token_ids=(5,)))
    kept = heard(engine, [keeping])
    for source in sources:
        engine.release(source)
    again = engine.prefill(
        [Prefill(words(2, 20), [root], [60], 84), Prefill(words(3, 30), [root], [60], 84, adapter="base")]
    )
    assert again == sources, "the lineage of what has read the copies"
    # Lost, what has read the copies is computed again of copies that stand where they stood: their sources do not.
    engine.kv.offload()
    torch.testing.assert_close(heard(engine, [keeping]), kept, atol=1e-4, rtol=0)
    assert engine.stats().recomputed == 1 + 2 + 2 + 1
    assert engine.branches.map(again) == copies
    torch.testing.assert_close(heard(engine, copies[::-1]), wanted, atol=1e-4, rtol=0)


def test_tenants_do_not_find_each_others_copies(make_engine: MakeEngine, both: Path, tmp_path: Path) -> None:
    """In no tier; and what they get is the same."""
    engine = make_engine(adapter=both, disk=tmp_path, salt="a")
    found: dict[str, tuple[int, list[MessageHandle]]] = {}
    logits = []
    for salt in ("a", "b"):
        tenant = engine.tenant(salt)
        sources = branches_of(tenant)
        before = engine.admin.stats().tokens_mapped
        copies = tenant.branches.map(sources)
        found[salt] = engine.admin.stats().tokens_mapped - before, copies
        tenant.kv.offload()
        before = engine.admin.stats().tokens_mapped
        assert engine.tenant(salt).branches.map(sources) == copies and engine.admin.stats().tokens_mapped == before
        logits.append(heard(tenant, copies))
    assert found["a"][0] == found["b"][0] == 50
    assert not {copy.id for copy in found["a"][1]} & {copy.id for copy in found["b"][1]}
    assert torch.equal(*logits)
    for use in (
        engine.tokens,
        engine.release,
        engine.kv.pin,
        lambda h: engine.branches.map([h]),
        lambda h: engine.branches.merge([h]),
    ):
        with pytest.raises(UnknownHandleError):
            use(found["b"][1][0])


def test_the_prefix_cache_keeps_adapters_apart(make_engine: MakeEngine, both: Path) -> None:
    encoded, said = [], []
    engine = make_engine(adapter=both, method="baseline")
    root = engine.prefill(words(1, 40))
    for adapter in (None, "base", "both", "base"):
        before = engine.stats().tokens_encoded
        said.append(heard(engine, [root], adapter=adapter))
        encoded.append(engine.stats().tokens_encoded - before)
    assert encoded[0] == encoded[1] > 40 > encoded[2] == encoded[3]
    torch.testing.assert_close(said[0], said[2], atol=1e-4, rtol=0)
    assert (said[0] - said[1]).abs().max() > 0.1


def test_messages_that_are_not_seen_change_no_bit_beside_adapters_and_mappers(
    make_engine: MakeEngine, both: Path
) -> None:
    """Bitwise: the same steps and shapes; a branch that saw other words is mapped and read in the same steps."""

    def run(secret: list[int], step_trace: StepTrace) -> tuple[torch.Tensor, torch.Tensor]:
        engine = make_engine(adapter=both, step_trace=step_trace, max_batched_tokens=16)
        root = engine.prefill(words(1, 24))
        hidden = engine.prefill(secret, [root], author="hidden", adapter="base")
        forced = Sampling(forced_token_ids=tuple(words(4, 12)))
        pair = engine.decode(
            [
                Decode([7], [root, hidden], sampling=forced, author="one"),
                Decode([7], [root], sampling=forced, author="two", adapter="base"),
            ]
        )
        seen: list[list[torch.Tensor]] = [[], []]

        async def read() -> None:
            copies = await engine.branches.amap(pair)
            calls = [
                Decode(
                    [9],
                    [root, copy],
                    sampling=forced,
                    author=author,
                    logits_callback=lambda logits, kept=kept: kept.append(logits.clone()),
                )
                for copy, author, kept in zip(copies, ("reads one", "reads two"), seen, strict=True)
            ]
            more = engine.aprefill(words(5, 20), [copies[0]], author="more")
            await asyncio.gather(engine.adecode(calls), more)

        asyncio.run(read())
        return torch.stack(seen[0]), torch.stack(seen[1])

    step_trace = StepTrace()
    one, two = run(words(50, 20), step_trace)
    other_one, other_two = run(words(99, 20), step_trace.replay())
    assert torch.equal(two, other_two)
    assert not torch.equal(one, other_one), "who reads the branch that saw it"
