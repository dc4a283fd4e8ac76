"""One answer on its way through a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.sampling.guiding.masks import MaskFiller, fill, words_of


class GrammarGuide:
    """Leads one answer through a grammar over a vocabulary (see `TokenGuide` and `PackedGuide`).

    Args:
        filler: Fills its masks, beside those of others.
        matcher: The library's, at the start of the grammar; its own.
        ends: Tokens that end an answer.
        words: Those that may be said at all, as bits of a row.
    """

    def __init__(self, filler: MaskFiller, matcher: Any, ends: frozenset[int], words: NDArray[np.int32]) -> None:
        self.done = False
        self.words = words
        self.filler: MaskFiller = filler
        self.matcher = matcher
        self.mask: Tensor | None = None
        self._ends = ends
        self._failure: str | None = None

    def allowed(self) -> Tensor:
        """What may come next; raises `ValueError` if that cannot be said."""
        if self.mask is None:
            fill([self], np.zeros((1, words_of(self.filler.vocabulary)), dtype=np.int32))
        assert self.mask is not None
        if self._failure is not None:
            raise ValueError(self._failure)
        return self.mask

    def filled(self, row: NDArray[np.int32]) -> None:
        """Its row of words is there: ends are added, where it may end."""
        if self.matcher.is_error():
            self._failure = _told(self.matcher)
        elif self.matcher.is_accepting():
            for token in self._ends:
                row[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))

    def permits(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(self.allowed()[token])

    def take(self, token: int) -> None:
        """Go on with this token; raises `ValueError` if it is not allowed."""
        self.mask = None
        if token in self._ends and self.matcher.is_accepting():
            self.done = True
            return
        _go_on(self.matcher, token)
        self.done = self.matcher.is_stopped()


class ByteGuide:
    """The same over a vocabulary that nobody can list, whose tokens say their bytes: it permits, and has no mask.

    Args:
        matcher: Over bytes.
        bytes_of: What a token writes.
        ends: Tokens that end an answer.
    """

    def __init__(self, matcher: Any, bytes_of: Callable[[int], bytes], ends: frozenset[int]) -> None:
        self.done = False
        self._matcher, self._bytes_of, self._ends = matcher, bytes_of, ends

    def allowed(self) -> None:
        """See `permits`."""

    def permits(self, token: int) -> bool:
        """Whether a token may come next."""
        if token in self._ends:
            return bool(self._matcher.is_accepting())
        written = [*self._bytes_of(token)]
        return bool(written) and self._matcher.validate_tokens(written) == len(written)

    def take(self, token: int) -> None:
        """Go on with this token; raises `ValueError` if it is not allowed."""
        if token in self._ends and self._matcher.is_accepting():
            self.done = True
            return
        for byte in self._bytes_of(token) or b"\0":
            _go_on(self._matcher, byte)
        self.done = self._matcher.is_stopped()


def _go_on(matcher: Any, token: int) -> None:
    if not matcher.consume_token(token):
        raise ValueError(_told(matcher))


def _told(matcher: Any) -> str:
    """Why it is in no state to go on."""
    said = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    return "it allows nothing that the vocabulary can say" if not said or said.startswith("NoExtension") else said
