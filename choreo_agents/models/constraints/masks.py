"""One answer on its way through a grammar, and the masks of a step's answers, filled together beside the forward pass.

constraints ── fill ── bits [rows, vocabulary / 32] ── unpacked, on the device ── masks [rows, vocabulary]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.models.constraints.sources import llguidance
from choreo_agents.sampling import AnswerConstraint

Bits = NDArray[np.int32]
"""[rows, words]: bit b of word w says whether token 32 w + b is allowed."""


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
    def filling(self, constraints: Iterable[AnswerConstraint | None]) -> Iterator[None]:
        """A block beside which masks are filled; after it they are there. Guides that others fill are left alone."""
        found: dict[int, list[GrammarConstraint]] = {}
        for constraint in constraints:
            leader: Any = None if constraint is None else constraint.leader
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
            wait([filled])  # whatever becomes of the step, nobody else may touch the constraints meanwhile
        filled.result()

    def _fill(self, groups: list[list[GrammarConstraint]]) -> None:
        for constraints in groups:
            words = words_of(constraints[0].filler.vocabulary)
            if self._bits is None or self._bits.shape[1] != words or len(self._bits) < len(constraints):
                self._bits = np.zeros((len(constraints), words), dtype=np.int32)
            fill(constraints, self._bits[: len(constraints)], self._device)


class GrammarMasks:
    """Fills the masks of all grammars over one vocabulary together.

    Args:
        tokens: The library's tokenizer.
        vocabulary: Words of the logits.
        ends: Tokens that say that a message ends.
    """

    def __init__(self, tokens: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self._ends = frozenset(token for token in ends if token < vocabulary)
        flags = np.zeros(words_of(vocabulary) * 32, dtype=np.bool_)
        flags[:vocabulary] = [not tokens.is_special_token(token) for token in range(vocabulary)]
        flags[list(self._ends)] = False
        self._said = flags
        """Which words say something: no control tokens, and nothing that only fills the vocabulary up."""
        self._words = _packed(flags)
        self._executor: Any = None

    def that_end(self, ends: Iterable[int]) -> frozenset[int]:
        """Those of some tokens that say nothing, and so can end an answer; the model's own, if there are none."""
        return frozenset(t for t in ends if 0 <= t < self.vocabulary and not self._said[t]) or self._ends

    def with_marks(self, marks: frozenset[int]) -> NDArray[np.int32]:
        """The words that say something, and control tokens that may be said besides, as bits of a row."""
        if not marks:
            return self._words
        flags = self._said.copy()
        flags[[token for token in marks if 0 <= token < self.vocabulary]] = True
        return _packed(flags)

    def fill(self, constraints: Sequence[GrammarConstraint], bits: Bits) -> None:
        """Write what each constraint allows into a row. Does not raise for what is wrong with one of them."""
        row_bytes = bits.shape[1] * bits.itemsize
        if len(constraints) == 1:
            constraints[0].matcher.unsafe_compute_mask_ptr(bits.ctypes.data, row_bytes)
        else:
            if self._executor is None:
                self._executor = llguidance().LLExecutor()
            rows = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
            self._executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, row_bytes, len(constraints))
        for constraint, row in zip(constraints, bits, strict=True):
            np.bitwise_and(row, constraint.words, out=row)
            constraint.filled(row)


class GrammarConstraint:
    """Leads one answer through a grammar over a vocabulary (see `TokenConstraint`).

    Args:
        filler: Fills its masks, beside those of others.
        matcher: The library's, at the start of the grammar; its own.
        ends: Tokens that end an answer.
        words: Those that may be said at all, as bits of a row.
    """

    def __init__(self, filler: GrammarMasks, matcher: Any, ends: frozenset[int], words: NDArray[np.int32]) -> None:
        self.done = False
        self.words = words
        self.filler = filler
        self.matcher = matcher
        self.mask: Tensor | None = None
        """What may come next: bool, [vocabulary]; None: not asked since the last token."""
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
        self.done = _goes_on(self.matcher, self._ends, token, [token])


class ByteConstraint:
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
        self.done = _goes_on(self._matcher, self._ends, token, self._bytes_of(token) or b"\0")


def _packed(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """One flag for each word as bits of a row."""
    words: NDArray[np.int32] = np.packbits(flags, bitorder="little").view(np.int32)
    return words


def words_of(vocabulary: int) -> int:
    """Words of 32 bits in a row."""
    return -(-vocabulary // 32)


def fill(constraints: Sequence[GrammarConstraint], bits: Bits, device: torch.device | None = None) -> None:
    """Give constraints with one filler their masks, by way of as many rows of bits."""
    filler = constraints[0].filler
    filler.fill(constraints, bits)
    for constraint, mask in zip(constraints, unpacked(bits, filler.vocabulary, device), strict=True):
        constraint.mask = mask


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


def _goes_on(matcher: Any, ends: frozenset[int], token: int, written: Iterable[int]) -> bool:
    """Go on with what a token writes; whether the answer is over with it."""
    if token in ends and matcher.is_accepting():
        return True
    if not all(matcher.consume_token(each) for each in written):
        raise ValueError(_told(matcher))
    return bool(matcher.is_stopped())


def _told(matcher: Any) -> str:
    """Why it is in no state to go on."""
    said = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    return "it allows nothing that the vocabulary can say" if not said or said.startswith("NoExtension") else said
