"""Keys and values outside of the pool, some of which are still on their way."""

from __future__ import annotations

import pickle

import torch

from choreo_agents.kv.tiers import HostKV


class Slow:
    """A copy that is made when somebody waits for it."""

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys, self.waits = keys, 0

    def synchronize(self) -> None:
        self.waits += 1
        self._keys.fill_(7.0)


def test_what_is_still_coming_is_waited_for_by_whoever_looks_at_it_and_by_nobody_else() -> None:
    keys, values = torch.zeros(2, 1, 3, 8), torch.ones(2, 1, 3, 8)
    slow = Slow(keys)
    kv = HostKV(keys, values, copied=slow)
    assert kv.nbytes == 2 * keys.nbytes
    assert slow.waits == 0, "sizes are known before"
    for look in (lambda: kv.keys, lambda: kv.values, kv.tensors, lambda: pickle.dumps(kv)):
        look()
    assert slow.waits == 1 and bool((kv.keys == 7.0).all())
    kv = HostKV(keys, values, copied=Slow(keys.zero_()))
    assert bool((pickle.loads(pickle.dumps(kv)).keys == 7.0).all())
