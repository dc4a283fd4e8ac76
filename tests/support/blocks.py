"""A dense oracle for views whose messages stand where they were encoded: one forward pass under a mask of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from choreo_agents import Engine, MessageHandle
from support.exact import exactly
from support.oracle import Oracle


@dataclass(frozen=True)
class Block:
    """Tokens at a position, and the other blocks that they see, whole."""

    tokens: tuple[int, ...]
    start: int
    sees: tuple[int, ...]


def blocks_of(engine: Engine, view: Sequence[MessageHandle], offsets: Sequence[int | None]) -> list[Block]:
    """All that a view descends from, as the engine's lineage has it; nothing in it may have been moved."""
    records = engine.inspect.records(view)
    places = {record.handle.id: number for number, record in enumerate(records)}
    starts = {record.handle.id: record.position for record in records}
    assert [starts[handle.id] for handle in view] == list(offsets)
    for record in records:
        assert [starts[parent.id] for parent in record.parents] == list(record.offsets)
    return [
        Block(record.tokens, record.position, tuple(places[parent.id] for parent in record.parents))
        for record in records
    ]


@exactly()
def block_logits(oracle: Oracle, blocks: Sequence[Block]) -> Tensor:
    """Logits of the last block's tokens, [tokens, vocabulary]."""
    owner = torch.cat([torch.full((len(block.tokens),), number) for number, block in enumerate(blocks)])
    positions = torch.cat([torch.arange(block.start, block.start + len(block.tokens)) for block in blocks])
    sees = torch.eye(len(blocks), dtype=torch.bool)
    for number, block in enumerate(blocks):
        sees[number, list(block.sees)] = True
    own = owner[:, None] == owner[None, :]
    hidden = ~sees[owner][:, owner] | (own & (positions[None, :] > positions[:, None]))
    near = hidden if oracle.window is None else hidden | (positions[:, None] - positions[None, :] >= oracle.window)
    full, sliding = (
        torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, torch.finfo(torch.float64).min)[None, None]
        for mask in (hidden, near)
    )
    masks = {"full_attention": full, "sliding_attention": sliding} if oracle.masks_by_layer_type else sliding
    tokens = [token for block in blocks for token in block.tokens]
    out = oracle.model(torch.tensor([tokens]), position_ids=positions[None], attention_mask=masks, use_cache=False)
    return out.logits[0, -len(blocks[-1].tokens) :]
