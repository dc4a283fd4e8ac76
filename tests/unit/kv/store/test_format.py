"""KV as it is written: what was sealed is opened as it was, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store.format import (
    UnusableFileError,
    Written,
    in_bytes,
    most_bytes,
    opened,
    parsed,
    sealed,
)
from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.tiers import HostKV

TOKENS = 5
SEAL = b"key"
KEY = KVKey("a" * 32, "model", tuple(range(TOKENS)), (("b" * 32, -7),), 12)
CHANGED = "was changed, or signed with another key"


def kv(dtype: torch.dtype = torch.float32) -> tuple[KVGeometry, HostKV]:
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 1, TOKENS, 8, generator=rng).to(dtype) for _ in range(2))
    return KVGeometry(2, 1, 8, dtype), HostKV(keys, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_was_sealed_is_opened_bit_by_bit(dtype: torch.dtype) -> None:
    geometry, held = kv(dtype)
    data = in_bytes(sealed(KEY, held, SEAL))
    assert held.nbytes < len(data) < most_bytes(TOKENS, geometry)
    found, at = opened(parsed(data), KEY.written(), TOKENS, geometry, SEAL)
    assert at == 12 and found.tensors().keys() == held.tensors().keys()
    assert all(torch.equal(tensor, held.tensors()[name]) for name, tensor in found.tensors().items())


def changed(written: Written, name: str, value: str) -> Written:
    return written[0] | {name: value}, written[1]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("native_offset", "13", CHANGED),
        ("native_offset", "-1", "belongs to another message"),
        ("message", "c" * 32, "belongs to another message"),
        ("model", "other", "belongs to another message"),
        ("tokens", "[0,1,2,3,5]", "belongs to another message"),
        ("parents", "[]", "belongs to another message"),
        ("seal", "0" * 32, CHANGED),
        ("seal", "\u00e9", CHANGED),
        ("more", "said", CHANGED),
    ],
)
def test_what_it_says_of_itself_is_sealed(name: str, value: str, why: str) -> None:
    geometry, held = kv()
    with pytest.raises(UnusableFileError, match=why):
        opened(changed(sealed(KEY, held, SEAL), name, value), KEY.written(), TOKENS, geometry, SEAL)


def test_its_tensors_are_sealed_and_are_what_was_asked_for() -> None:
    geometry, held = kv()
    about, tensors = sealed(KEY, held, SEAL)
    swapped = {"keys": tensors["values"], "values": tensors["keys"]}
    for others in (swapped, tensors | {"values": tensors["values"] + 1e-6}):
        with pytest.raises(UnusableFileError, match=CHANGED):
            opened((about, others), KEY.written(), TOKENS, geometry, SEAL)
    with pytest.raises(UnusableFileError, match=CHANGED):
        opened((about, tensors), KEY.written(), TOKENS, geometry, b"other")
    for tokens, others in (
        (TOKENS, {"keys": tensors["keys"]}),
        (TOKENS, tensors | {"more": tensors["keys"]}),
        (TOKENS, {name: each.view(torch.int32) for name, each in tensors.items()}),
        (TOKENS - 1, tensors),
    ):
        with pytest.raises(UnusableFileError, match="has KV of another shape or dtype"):
            opened((about, others), KEY.written(), tokens, geometry, SEAL)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 100, (92).to_bytes(8, "little") + b"[" * 92, bytes(100)])
def test_what_is_no_file_is_damaged(data: bytes) -> None:
    with pytest.raises(UnusableFileError, match="is truncated or damaged"):
        parsed(data)
