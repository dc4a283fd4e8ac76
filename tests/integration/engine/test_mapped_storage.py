"""Mapped copies below the KV memory: whole, in eight bits, or made again; what they say does not depend on where they
have been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import MakeEngine
from support.adapters import save_mapper
from support.merges import give_back, heard, require_nothing_left, team, view_of, words

from choreo_agents import Engine
from choreo_agents.errors import UnknownHandleError
from choreo_agents.models import LoadedModel

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
INT8_TOKEN = 2 * 3 * 2 * (16 + 1)
TIERS = ("host", "disk")
COPIED = 12 + 20 + 16
"""Tokens of the branches."""
OTHER = 24 + 18
"""Tokens of the trunk; the prompt has 5."""


@pytest.fixture(scope="module")
def mapper(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mapper(tmp_path_factory.mktemp("mapper") / "mapper", tiny)


def settled_bytes(engine: Engine) -> int:
    """Below the pool, when all that was on its way to the disk is there."""
    with engine._core.lock:
        for entry in engine._core.cache._entries:
            engine._core.cache.files.arrive(entry, wait=True)
    stats = engine.stats()
    return stats.host_bytes + stats.disk_bytes


def load(make_engine: MakeEngine, mapper: Path, stored: str, tier: str, folder: Path) -> Engine:
    tiers = {"host": {"host_bytes": 1 << 24}, "disk": {"disk": folder}, "none": {}}[tier]
    return make_engine(adapter=mapper, mapped_storage=stored, **tiers)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stored", ["full", "int8", "low-rank"])
def test_copies_come_back_bit_by_bit(
    make_engine: MakeEngine, mapper: Path, tmp_path: Path, stored: str, tier: str
) -> None:
    engine = load(make_engine, mapper, stored, tier, tmp_path)
    trunk, branches = team(engine)
    view = view_of(engine, branches, words(9, 5))
    before, encoded = heard(engine, view), engine.stats().tokens_encoded
    for _ in range(2):
        engine.kv.park()
        assert engine.stats().kv_bytes == 0
        per_token = {"full": TOKEN, "int8": INT8_TOKEN, "low-rank": 0}[stored]
        assert settled_bytes(engine) == COPIED * per_token + (COPIED + OTHER + 5) * TOKEN
        assert torch.equal(heard(engine, view), before)
    assert engine.stats().tokens_encoded - encoded == 2 * (1 + 3), "nothing but the questions to the view"
    assert engine.stats().recomputed == (2 * 3 if stored == "low-rank" else 0)
    give_back(engine, view)
    for handle in [*trunk, *branches]:
        engine.release(handle)
    assert settled_bytes(engine) == 0
    require_nothing_left(engine)


def test_a_small_host_keeps_more_of_what_takes_less(make_engine: MakeEngine, mapper: Path) -> None:
    lost = {}
    for stored in ("full", "int8", "low-rank"):
        engine = make_engine(adapter=mapper, mapped_storage=stored, host_bytes=(COPIED + OTHER + 5 + 16) * TOKEN)
        _, branches = team(engine)
        view = view_of(engine, branches, words(9, 5))
        before = heard(engine, view)
        engine.kv.park()
        lost[stored] = engine.stats().lost
        torch.testing.assert_close(heard(engine, view), before, atol=1e-4, rtol=0)
        engine.check()
    assert lost["full"] > lost["int8"] == 0, "three copies of 48 tokens in the room of 16, at a quarter of the bytes"
    assert lost["low-rank"] == 3


def test_eight_bits_change_a_little_and_nothing_of_those_who_do_not_map(make_engine: MakeEngine, mapper: Path) -> None:
    said: dict[str, torch.Tensor] = {}
    for stored in ("full", "int8"):
        engine = make_engine(adapter=mapper, mapped_storage=stored)
        _, branches = team(engine)
        said[stored] = heard(engine, view_of(engine, branches, words(9, 5)))
        said[f"{stored} alone"] = heard(engine, view_of(engine, branches, words(9, 5), adapter="base"))
    assert torch.equal(said["full alone"], said["int8 alone"])
    error = (said["full"] - said["int8"]).abs().max()
    assert 0 < error <= 0.05 * said["full"].abs().max()


def test_rounded_copies_are_other_messages_than_whole_ones(make_engine: MakeEngine, mapper: Path) -> None:
    copies, engines = [], []
    for stored in ("full", "int8", "low-rank"):
        engines.append(make_engine(adapter=mapper, mapped_storage=stored, salt="s"))
        copies += engines[-1].branches.map([engines[-1].prefill(words(1, 20))])
    whole, rounded, again = copies
    assert whole == again and whole.id != rounded.id and rounded.model == f"{whole.model}.int8"
    assert whole.base_model == rounded.base_model
    with pytest.raises(UnknownHandleError):
        engines[0].tokens(rounded)


@pytest.mark.parametrize("host_bytes", [1 << 24, 0])
def test_what_a_waiting_request_wants_is_not_made_again(make_engine: MakeEngine, mapper: Path, host_bytes: int) -> None:
    engine = make_engine(adapter=mapper, mapped_storage="low-rank", host_bytes=host_bytes)
    source = engine.prefill(words(1, 20))
    [copy] = engine.branches.map([source])
    core = engine._core
    message = core.table.get(copy.id)
    assert message is not None
    with core.lock:
        entry = core.table.want(message)
        core.cache.park([entry])
        assert not core.cache.lost(entry), "kept on the host for who waits"
        core.table.unwant(message)
        assert core.cache.lost(entry) and core.cache.bytes_by_tier()["host"] == 0
    assert engine.stats().lost == 1
    engine.check()


def test_a_restarted_engine_maps_again_as_before(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper, mapped_storage="int8", host_bytes=1 << 24)
    _, branches = team(engine)
    view = view_of(engine, branches, words(9, 5))
    before = heard(engine, view)
    engine.owner.restart()
    torch.testing.assert_close(heard(engine, view), before, atol=1e-3, rtol=0)
    engine.kv.park()
    assert engine.stats().host_bytes == COPIED * INT8_TOKEN + (COPIED + OTHER + 5) * TOKEN


def test_another_way_of_storing_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="mapped_storage"):
        make_engine(mapped_storage="int4")
