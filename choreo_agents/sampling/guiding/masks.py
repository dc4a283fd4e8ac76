"""Masks of a step's rows, filled together beside the forward pass.

guides ── fill ── bits [rows, vocabulary / 32] ── unpacked, on the device ── masks [rows, vocabulary]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.sampling.guiding.guides import Guide, TokenGuide

Bits = NDArray[np.int32]
"""[rows, words]: bit b of word w says whether token 32 w + b is allowed."""


class MaskFiller(Protocol):
    """Knows one vocabulary, and fills the masks of all guides over it together."""

    vocabulary: int

    def fill(self, guides: Sequence[Any], bits: Bits) -> None:
        """Write what each of its own guides allows into a row. Does not raise for what is wrong with one of them."""
        ...


class PackedGuide(TokenGuide, Protocol):
    """A guide whose masks are filled together with others'."""

    filler: MaskFiller
    mask: Tensor | None
    """What may come next: bool, [vocabulary]; None: not asked since the last token."""


class StepMasks:
    """Fills the masks of a step on a thread of its own. For one engine's thread.

    Args:
        device: Where they are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bits: Bits | None = None
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def filling(self, guides: Iterable[Guide | None]) -> Iterator[None]:
        """A block beside which masks are filled; after it they are there. Guides that others fill are left alone."""
        found: dict[int, list[PackedGuide]] = {}
        for guide in guides:
            leader: Any = None if guide is None else guide.leader
            filler = getattr(leader, "filler", None)
            if filler is not None and leader.mask is None:
                found.setdefault(id(filler), []).append(leader)
        if not found:
            yield
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="choreo-masks")
        filled: Future[None] = self._thread.submit(self._fill, list(found.values()))
        try:
            yield
        finally:
            wait([filled])  # whatever becomes of the step, nobody else may touch the guides meanwhile
        filled.result()

    def _fill(self, groups: list[list[PackedGuide]]) -> None:
        for guides in groups:
            words = words_of(guides[0].filler.vocabulary)
            if self._bits is None or self._bits.shape[1] != words or len(self._bits) < len(guides):
                self._bits = np.zeros((len(guides), words), dtype=np.int32)
            fill(guides, self._bits[: len(guides)], self._device)


def words_of(vocabulary: int) -> int:
    """Words of 32 bits in a row."""
    return -(-vocabulary // 32)


def fill(guides: Sequence[PackedGuide], bits: Bits, device: torch.device | None = None) -> None:
    """Give guides with one filler their masks, by way of as many rows of bits."""
    filler = guides[0].filler
    filler.fill(guides, bits)
    for guide, mask in zip(guides, unpacked(bits, filler.vocabulary, device), strict=True):
        guide.mask = mask


def unpacked(bits: Bits, vocabulary: int, device: torch.device | None = None) -> Tensor:
    """Rows of bits as bool, [rows, vocabulary]."""
    if device is None or device.type == "cpu":
        flags = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    return unpacked_there(bits, vocabulary, device)


def unpacked_there(bits: Bits, vocabulary: int, device: torch.device) -> Tensor:
    """The same, unpacked where they are needed: an eighth of what masks take goes over the bus."""
    there = torch.from_numpy(bits.view(np.uint8)).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (there[:, :, None] >> places & 1).bool().flatten(1)[:, :vocabulary]
