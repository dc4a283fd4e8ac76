"""Many short runs in one attention call: padded to the longest, so that the number of calls does not grow with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from choreo_agents.attention.backends.partial import Partial, attend_padded
from choreo_agents.attention.layout import Read

LONGEST_RUN = 128
MOST_QUERIES = 32
"""Longer runs, or those with more queries, repay a call of their own: there the copy would cost more than the call."""


def packable(read: Read) -> bool:
    masked = read.causal or read.window is not None
    return not masked and read.length <= LONGEST_RUN and read.queries <= MOST_QUERIES


class PackedRuns:
    """Runs r with their queries, both padded.

    slots     [runs, longest run]       the pool's slots of each run, the first slot again where padded
    queries   [runs, most queries]      pairs that read it, the first pair again where padded
    """

    def __init__(self, reads: Sequence[Read], dtype: torch.dtype, device: torch.device, softcap: float | None) -> None:
        self.softcap = softcap
        lengths = torch.tensor([read.length for read in reads])
        counts = torch.tensor([read.queries for read in reads])
        starts = torch.tensor([read.start for read in reads])
        across = torch.arange(int(lengths.max()))[None, :]
        padded = across >= lengths[:, None]
        self.slots = (starts[:, None] + across.masked_fill(padded, 0)).flatten().to(device)
        self.hidden = (
            torch.zeros(padded.shape, dtype=dtype).masked_fill(padded, float("-inf"))[:, None, None, :].to(device)
        )
        first = counts.cumsum(0) - counts
        along = torch.arange(int(counts.max()))[None, :]
        beyond = along >= counts[:, None]
        self.queries = (first[:, None] + along.masked_fill(beyond, 0)).to(device)
        self.real = (~beyond).flatten().nonzero().flatten().to(device)
        self.pairs = int(counts.sum())

    def attend(self, pairs: Tensor, keys: Tensor, values: Tensor, scale: float) -> Partial:
        """Partial attention of [pairs, heads, head_dim] queries, in the order of the reads they belong to.

        Returns:
            Output [pairs, heads, head_dim] and log-sum-exp [pairs, heads].
        """
        runs, most = self.queries.shape
        kv_heads, _, dim = keys.shape
        heads = pairs.shape[1]
        group = heads // kv_heads
        query = (
            pairs[self.queries].view(runs, most, kv_heads, group, dim).transpose(1, 2).reshape(runs, kv_heads, -1, dim)
        )
        key = keys.index_select(1, self.slots).view(kv_heads, runs, -1, dim).transpose(0, 1)
        value = values.index_select(1, self.slots).view(kv_heads, runs, -1, dim).transpose(0, 1)
        out, lse = attend_padded(query, key, value, self.hidden, scale, self.softcap)
        out = out.view(runs, kv_heads, most, group, dim).transpose(1, 2).reshape(runs * most, heads, dim)
        lse = lse.view(runs, kv_heads, most, group).transpose(1, 2).reshape(runs * most, heads)
        return out[self.real], lse[self.real]
