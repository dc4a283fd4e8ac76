"""A small team of made-up words, and what a synthesizer hears over a view of what they said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from choreo_agents import Decode, Engine, MessageHandle, Sampling
from choreo_agents.engine.branches import MergedView


def words(first: int, count: int) -> list[int]:
    return [3 + (first + 7 * i) % 300 for i in range(count)]


def team(engine: Engine, lengths: tuple[int, ...] = (12, 20, 16)) -> tuple[list[MessageHandle], list[MessageHandle]]:
    """A trunk of two messages, and what workers said after all of it, with a header of 2 tokens."""
    root = engine.prefill(words(1, 24))
    task = engine.prefill(words(2, 18), [root])
    said = engine.decode(
        [
            Decode(
                [7, 8 + i],
                [root, task],
                sampling=Sampling(forced_token_ids=tuple(words(50 * i, length - 2))),
                author=f"w{i}",
            )
            for i, length in enumerate(lengths)
        ]
    )
    return [root, task], said


def watching(seen: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    return lambda logits: seen.append(logits.clone())


def heard(engine: Engine, view: MergedView) -> torch.Tensor:
    """The logits over a merged view, [tokens, vocabulary]."""
    seen: list[torch.Tensor] = []
    forced = Sampling(forced_token_ids=(5, 6, 7))
    [said] = engine.decode([Decode([9], view.handles, view.offsets, view.end, forced, logits_callback=watching(seen))])
    engine.release(said)
    return torch.stack(seen)


def view_of(engine: Engine, branches: list[MessageHandle], prompt: Any = "", **options: Any) -> MergedView:
    return asyncio.run(engine.branches.aview(branches, prompt, **options))


def give_back(engine: Engine, view: MergedView) -> None:
    for handle in view.owned:
        engine.release(handle)


def require_nothing_left(engine: Engine) -> None:
    engine.check()
    stats = engine.stats()
    assert (stats.messages, stats.leases, stats.unfinished, stats.host_bytes) == (0, 0, 0, 0)
    assert stats.kv_bytes == 0 or engine.method == "baseline", "its prefix cache keeps what it may need again"
