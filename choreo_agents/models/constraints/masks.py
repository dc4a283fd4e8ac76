"""Constrains answers by grammars; fills the token masks of a step together, in parallel to the forward pass.

constraints ── fill ── bits [rows, vocabulary / 32] ── unpacked, on the device ── masks [rows, vocabulary]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.errors import InvalidRequestError
from choreo_agents.sampling import AnswerConstraint

Bits = NDArray[np.int32]
"""[rows, words]: bit b of word w is set if token 32 w + b is allowed."""


EXTRA = "choreo-agents[guided]"


def llguidance() -> ModuleType:
    """Import llguidance.

    Raises:
        InvalidRequestError: It is not installed.
    """
    try:
        import llguidance as library  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidRequestError(f"a constraint needs llguidance: pip install '{EXTRA}'") from error
    module: ModuleType = library
    return module


class StepMasks:
    """A thread that fills the masks of a step. For one engine's thread only.

    Args:
        device: Device that the masks are needed on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def fill_during(self, constraints: Iterable[AnswerConstraint | None]) -> Iterator[None]:
        """Fill the masks of a step's constraints while the block runs; they are complete after it."""
        leaders: list[Any] = [constraint.leader for constraint in constraints if constraint is not None]
        # Those of grammars, which share the filler of the step's model.
        due = [leader for leader in leaders if getattr(leader, "filler", None) is not None and leader.mask is None]
        if not due:
            yield
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="choreo-masks")
        filled: Future[None] = self._thread.submit(due[0].filler.fill, due, self._device)
        try:
            yield
        finally:
            wait([filled])  # even if the step fails, nobody else may use the constraints meanwhile
        filled.result()


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
        self._is_control = tokens.is_special_token
        words = (token for token in range(vocabulary) if not self._is_control(token) and token not in self._ends)
        self.word_bits = self.bits_of(words)
        """Tokens that are text: no control tokens, and no padding of the vocabulary."""
        self._executor = llguidance().LLExecutor()

    def bits_of(self, tokens: Iterable[int]) -> Bits:
        """Return a row of bits of some tokens."""
        flags = np.zeros(-(-self.vocabulary // 32) * 32, dtype=np.bool_)
        flags[[token for token in tokens if 0 <= token < self.vocabulary]] = True
        return np.packbits(flags, bitorder="little").view(np.int32)

    def usable_ends(self, ends: Iterable[int]) -> frozenset[int]:
        """Return those tokens that are no text, and so can end an answer; if there are none, the model's end tokens."""
        ends = (token for token in ends if 0 <= token < self.vocabulary)
        return frozenset(token for token in ends if token in self._ends or self._is_control(token)) or self._ends

    def fill(self, constraints: Sequence[GrammarConstraint], device: torch.device | None = None) -> None:
        """Fill the masks of constraints; one that fails does not raise here."""
        bits = np.zeros((len(constraints), len(self.word_bits)), dtype=np.int32)
        rows = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.strides[0], len(constraints))
        for constraint, row in zip(constraints, bits, strict=True):
            np.bitwise_and(row, constraint.words, out=row)
            if constraint.matcher.is_accepting():
                np.bitwise_or(row, constraint.end_bits, out=row)
        for constraint, mask in zip(constraints, unpack(bits, self.vocabulary, device), strict=True):
            constraint.mask = mask


class GrammarConstraint:
    """A constraint of one answer by a grammar, with token masks (see `TokenConstraint`).

    Args:
        filler: Fills its masks, together with those of others.
        matcher: A matcher of llguidance at the start of the grammar, not shared.
        ends: Tokens that end an answer.
        marks: Control tokens that may be sampled, beside text.
    """

    def __init__(self, filler: GrammarMasks, matcher: Any, ends: frozenset[int], marks: frozenset[int]) -> None:
        self.done = False
        self.words = filler.word_bits | filler.bits_of(marks)
        self.end_bits = filler.bits_of(ends)
        self.filler = filler
        self.matcher = matcher
        self.mask: Tensor | None = None
        """The tokens that may come next: bool, [vocabulary]; None: not filled since the last token."""
        self._ends = ends

    def allowed(self) -> Tensor:
        """Return the tokens that may come next, bool [vocabulary]; raise `ValueError` if the grammar fails."""
        if self.mask is None:
            self.filler.fill([self])
        assert self.mask is not None
        if self.matcher.is_error():
            raise ValueError(_failure_of(self.matcher))
        return self.mask

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
