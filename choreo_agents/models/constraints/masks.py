"""Constrains answers by grammars; fills the token masks of a step together, in parallel to the forward pass.

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
"""[rows, words]: bit b of word w is set if token 32 w + b is allowed."""


class StepMasks:
    """A thread that fills the masks of a step. For one engine's thread only.

    Args:
        device: Device that the masks are needed on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bits: Bits | None = None
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def fill_during(self, constraints: Iterable[AnswerConstraint | None]) -> Iterator[None]:
        """Fill the masks of a step's constraints while the block runs; they are complete after it."""
        groups: dict[int, list[GrammarConstraint]] = {}
        for constraint in constraints:
            leader: Any = None if constraint is None else constraint.leader
            filler = getattr(leader, "filler", None)
            if filler is not None and leader.mask is None:
                groups.setdefault(id(filler), []).append(leader)
        if not groups:
            yield
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="choreo-masks")
        filled: Future[None] = self._thread.submit(self._fill, list(groups.values()))
        try:
            yield
        finally:
            wait([filled])  # even if the step fails, nobody else may use the constraints meanwhile
        filled.result()

    def _fill(self, groups: list[list[GrammarConstraint]]) -> None:
        for constraints in groups:
            words = words_per_row(constraints[0].filler.vocabulary)
            if self._bits is None or self._bits.shape[1] != words or len(self._bits) < len(constraints):
                self._bits = np.zeros((len(constraints), words), dtype=np.int32)
            fill(constraints, self._bits[: len(constraints)], self._device)


class GrammarMasks:
    """A filler of the masks of all grammars over one vocabulary.

    Args:
        tokens: The tokenizer of llguidance.
        vocabulary: Width of the logits, in tokens.
        ends: The model's end tokens.
    """

    def __init__(self, tokens: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self._ends = frozenset(token for token in ends if token < vocabulary)
        flags = np.zeros(words_per_row(vocabulary) * 32, dtype=np.bool_)
        flags[:vocabulary] = [not tokens.is_special_token(token) for token in range(vocabulary)]
        flags[list(self._ends)] = False
        self._text_flags = flags
        """Flags of the tokens that are text: no control tokens, and no padding of the vocabulary."""
        self._words = _pack(flags)
        self._executor: Any = None

    def usable_ends(self, ends: Iterable[int]) -> frozenset[int]:
        """Return those tokens that are no text, and so can end an answer; if there are none, the model's end tokens."""
        return frozenset(t for t in ends if 0 <= t < self.vocabulary and not self._text_flags[t]) or self._ends

    def with_marks(self, marks: frozenset[int]) -> NDArray[np.int32]:
        """Return the text tokens and some control tokens as a row of bits."""
        if not marks:
            return self._words
        flags = self._text_flags.copy()
        flags[[token for token in marks if 0 <= token < self.vocabulary]] = True
        return _pack(flags)

    def fill(self, constraints: Sequence[GrammarConstraint], bits: Bits) -> None:
        """Write what each constraint allows into a row of bits; a constraint that fails does not raise here."""
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
            constraint.add_ends(row)


class GrammarConstraint:
    """A constraint of one answer by a grammar, with token masks (see `TokenConstraint`).

    Args:
        filler: Fills its masks, together with those of others.
        matcher: A matcher of llguidance at the start of the grammar, not shared.
        ends: Tokens that end an answer.
        words: Tokens that may be sampled at all, as a row of bits.
    """

    def __init__(self, filler: GrammarMasks, matcher: Any, ends: frozenset[int], words: NDArray[np.int32]) -> None:
        self.done = False
        self.words = words
        self.filler = filler
        self.matcher = matcher
        self.mask: Tensor | None = None
        """The tokens that may come next: bool, [vocabulary]; None: not filled since the last token."""
        self._ends = ends
        self._failure: str | None = None

    def allowed(self) -> Tensor:
        """Return the tokens that may come next, bool [vocabulary]; raise `ValueError` if the grammar fails."""
        if self.mask is None:
            fill([self], np.zeros((1, words_per_row(self.filler.vocabulary)), dtype=np.int32))
        assert self.mask is not None
        if self._failure is not None:
            raise ValueError(self._failure)
        return self.mask

    def add_ends(self, row: NDArray[np.int32]) -> None:
        """Allow the end tokens in its filled row, if the answer may end here."""
        if self.matcher.is_error():
            self._failure = _failure_of(self.matcher)
        elif self.matcher.is_accepting():
            for token in self._ends:
                row[token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))

    def permits(self, token: int) -> bool:
        """Return whether a token may come next."""
        return bool(self.allowed()[token])

    def take(self, token: int) -> None:
        """Go on with this token; raises `ValueError` if it is not allowed."""
        self.mask = None
        self.done = _advance(self.matcher, self._ends, token, [token])


class ByteConstraint:
    """A constraint of one answer over a vocabulary that cannot be listed: it checks tokens by bytes, without a mask.

    Args:
        matcher: A matcher of llguidance over bytes.
        bytes_of: Returns the bytes of a token.
        ends: Tokens that end an answer.
    """

    def __init__(self, matcher: Any, bytes_of: Callable[[int], bytes], ends: frozenset[int]) -> None:
        self.done = False
        self._matcher, self._bytes_of, self._ends = matcher, bytes_of, ends

    def allowed(self) -> None:
        """Return None: there is no mask, see `permits`."""

    def permits(self, token: int) -> bool:
        """Return whether a token may come next."""
        if token in self._ends:
            return bool(self._matcher.is_accepting())
        written = [*self._bytes_of(token)]
        return bool(written) and self._matcher.validate_tokens(written) == len(written)

    def take(self, token: int) -> None:
        """Go on with this token; raises `ValueError` if it is not allowed."""
        self.done = _advance(self._matcher, self._ends, token, self._bytes_of(token) or b"\0")


def _pack(flags: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Pack a flag per token into a row of bits."""
    words: NDArray[np.int32] = np.packbits(flags, bitorder="little").view(np.int32)
    return words


def words_per_row(vocabulary: int) -> int:
    """Return the number of 32-bit words of a row."""
    return -(-vocabulary // 32)


def fill(constraints: Sequence[GrammarConstraint], bits: Bits, device: torch.device | None = None) -> None:
    """Fill the masks of constraints that share a filler, with `bits` as a buffer of one row each."""
    filler = constraints[0].filler
    filler.fill(constraints, bits)
    for constraint, mask in zip(constraints, unpack(bits, filler.vocabulary, device), strict=True):
        constraint.mask = mask


def unpack(bits: Bits, vocabulary: int, device: torch.device | None = None) -> Tensor:
    """Unpack rows of bits to bool, [rows, vocabulary]."""
    if device is None or device.type == "cpu":
        flags = np.unpackbits(bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_))
    return unpack_on_device(bits, vocabulary, device)


def unpack_on_device(bits: Bits, vocabulary: int, device: torch.device) -> Tensor:
    """Unpack rows of bits on the device, so that an eighth of the masks' bytes is transferred."""
    packed = torch.from_numpy(bits.view(np.uint8)).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed[:, :, None] >> places & 1).bool().flatten(1)[:, :vocabulary]


def _advance(matcher: Any, ends: frozenset[int], token: int, written: Iterable[int]) -> bool:
    """Consume what a token writes; return whether the answer is over. Raises `ValueError` if it is not allowed."""
    if token in ends and matcher.is_accepting():
        return True
    if not all(matcher.consume_token(number) for number in written):
        raise ValueError(_failure_of(matcher))
    return bool(matcher.is_stopped())


def _failure_of(matcher: Any) -> str:
    """Return why a matcher cannot go on."""
    error = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    return "it allows nothing in the vocabulary" if not error or error.startswith("NoExtension") else error
