"""Messages that one engine has made become known to another, and KV that is sent after them is changed on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from choreo_agents import Engine, MessageHandle, Sampling
from choreo_agents.engine.kv_packets import KVPacket, export_kv, import_kv
from choreo_agents.engine.lineage import ReadLog
from choreo_agents.engine.messages.message import Scope
from choreo_agents.kv.store.format import in_bytes, opened, parsed, sealed
from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.tiers import HostKV

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model in fp32."""
SOON_S = 60
NO_ROOM = "neither the pool nor the host has memory for it now"


def rows_of(engine: Engine, handles: Sequence[MessageHandle]) -> dict[str, KVKey]:
    """From what messages, and all that they come from, are computed."""
    rows: dict[str, KVKey] = {}
    for handle in handles:
        message = engine._tenant.find(handle)
        rows |= {each.handle.id: each.kv_key() for each in (message, *message.ancestors())}
    return rows


def known_by(other: Engine, engine: Engine, handles: Sequence[MessageHandle]) -> Scope:
    """Let another engine know messages, and lease these in a scope."""
    scope = Scope(None)
    refused = other.lineage.import_messages([each.id for each in handles], ReadLog(rows_of(engine, handles)), scope)
    assert refused == {}
    return scope


def sent(engine: Engine, other: Engine, handles: Sequence[MessageHandle]) -> dict[str, str]:
    """What of these has KV goes to another engine that knows them; why what was refused was."""
    return import_kv(other._tenant, export_kv(engine._tenant, [each.id for each in handles]))


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def holding(engine: Engine, parcel: KVPacket) -> HostKV:
    """What a parcel of an engine's holds."""
    [handle] = [each.handle for each in engine._core.table.messages() if each.handle.id == parcel.id]
    key = engine.kv.key(handle)
    return opened(
        parsed(parcel.data), key.written(), key.length, engine._core.pool.geometry, engine._tenant.message_ids.seal
    )[0]


def parcel_of(key: KVKey, kv: HostKV, seal: bytes) -> KVPacket:
    """A parcel that anybody could make who has the key of the seal."""
    return KVPacket(key.id, kv.nbytes, in_bytes(sealed(key, kv, seal)))


def with_a_bit_flipped(parcel: KVPacket, bit: int) -> KVPacket:
    data = bytearray(parcel.data)
    data[bit // 8] ^= 1 << bit % 8
    return replace(parcel, data=bytes(data))


def words(number: int, count: int = 24) -> list[int]:
    return [3 + (7 * number + 11 * place) % 300 for place in range(count)]


def heard(engine: Engine, seen: Sequence[MessageHandle], seed: int) -> MessageHandle:
    """What is said of messages, out of order; its logits are found by the seed."""
    offsets = [300 - 45 * place for place in range(len(seen))]
    return engine.decode([7, 8], list(seen), offsets, 400, sampling=Sampling(max_tokens=6, seed=seed))


def require_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def arrived(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.sent_bytes, stats.received_bytes


def require_nothing_wanted(engine: Engine) -> None:
    assert not any(entry.wanted for entry in engine._core.cache.entries_of(None))
    engine.check()


class Gate:
    """Holds up whoever calls something, once, in the middle."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.inside, self.open = threading.Event(), threading.Event()
        inner = getattr(owner, name)

        def late(*args: Any, **options: Any) -> Any:
            if not self.inside.is_set():
                self.inside.set()
                assert self.open.wait(SOON_S)
            return inner(*args, **options)

        patch.setattr(owner, name, late)


def beside(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Something on a thread of its own, and what has come of it."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(act())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


def ended(thread: threading.Thread) -> None:
    thread.join(SOON_S)
    assert not thread.is_alive()
