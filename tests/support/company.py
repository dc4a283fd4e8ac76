"""One row's attention, in several companies and places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from choreo_agents.attention.backends import AttentionBackend
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.rope import PureRotation
from choreo_agents.kv.blocks import Run
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.step import Row, make_step

HEADS = HeadShape(4, 2, 16)
_KIND = AttentionKind(PureRotation(1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16)))
_LENGTHS, _OFFSETS, _SLOTS = (9, 17, 5), (0, 0, 3), 128
"""Of three messages that the row sees at once, and where it sees them: two at one position."""


def in_all_companies(backend: AttentionBackend, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What the row is given, [heads, head_dim], with words of its company and of where its messages lie."""
    generator = torch.Generator().manual_seed(0)
    known = [torch.randn(2, HEADS.kv_heads, length, HEADS.head_dim, generator=generator) for length in _LENGTHS]
    own = torch.randn(2, HEADS.kv_heads, 1, HEADS.head_dim, generator=generator)
    queries = torch.randn(2, *HEADS[::2], generator=generator).to(dtype)
    for places in permutations((3, 40, 70)):
        messages = [Segment((Run(at, n),), 0, encoded=n) for at, n in zip(places, _LENGTHS, strict=True)]
        pool = torch.zeros(2, HEADS.kv_heads, _SLOTS, HEADS.head_dim)
        for message, kv in zip(messages, known, strict=True):
            pool[:, :, message.runs[0].start : message.runs[0].end] = kv
        pool[:, :, 110:111] = pool[:, :, 120:121] = own
        keys, values = pool.to(dtype)
        pieces = tuple(Piece(message, 0, n, at) for message, n, at in zip(messages, _LENGTHS, _OFFSETS, strict=True))
        row = Row(1, (7,), 0, Segment((Run(110, 4),), 30), pieces, True)
        other = Row(2, (7,), 0, Segment((Run(120, 4),), 30), pieces[::-1], True)
        for name, rows in (("alone", [row]), ("first", [row, other]), ("second", [other, row])):
            layout, at = make_step(rows).layout, rows.index(row)
            query = queries[:1] if len(rows) == 1 else queries[[0, 1]] if at == 0 else queries[[1, 0]]
            out = backend.prepare(layout, _KIND).attend(query, keys, values, 0.25)
            yield f"{name}, at {places}", out[at]
