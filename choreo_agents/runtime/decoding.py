"""When a decode ends, and what of what it sampled is the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from choreo_agents.sampling import Sampler, Sampling

FinishReason = Literal["stop", "length"]
"""Why a decode has ended: by itself, with an end token, a text to stop at or an answer from a list; or cut, since it
might sample no more tokens."""


@dataclass
class Decoding:
    """The part of a request that samples."""

    sampling: Sampling
    sampler: Sampler
    stop_tokens: frozenset[int]
    closing: tuple[int, ...]
    """Tokens that the message ends with, whether the model produces them or not."""
    stop_text: Callable[[int], bool] | None = None
    """Told every sampled token, in order: whether a text to stop at is complete with it."""
    left_out: frozenset[int] = frozenset()
    """Tokens that end the decode and are no part of the message, unless they begin what closes it."""
    closes: frozenset[int] = frozenset()
    """Tokens that close the message in the place of the usual."""
    thoughts: int = 0
    """How many of tokens that are forced come before the answer."""
    complete: bool = False
    """Whether tokens that are forced are an answer that a guide ends, however many there may be."""
    known: tuple[int, ...] | None = None
    """What it says, if that is known before: it is encoded as a prompt is. None: it samples."""
    seed: int = 0
    """Of its sampler."""
    cut: bool = False
    """Whether it has ended since it may sample no more tokens, and not by itself."""
    _is_plain: bool = field(init=False)
    """Whether nothing but an end token or its length ends it."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        led = sampling.forced is not None or self.sampler.guide is not None or self.stop_text is not None
        self._is_plain = not (led or self.complete or sampling.choices or self.thoughts)

    @property
    def longest(self) -> int:
        """Tokens that it can add at most, closing ones included."""
        guide = self.sampler.guide
        return (self.sampling.longest if guide is None else guide.longest) + len(self.closing)

    def ends(self, sampled: list[int]) -> bool:
        """Whether these are all the tokens to sample; asked once after each."""
        if self._is_plain:
            is_end = sampled[-1] in self.stop_tokens
            is_full = len(sampled) >= self.sampling.max_tokens
            self.cut = is_full and not is_end
            return is_end or is_full
        sampling, guide = self.sampling, self.sampler.guide
        forced = sampling.forced
        if forced is None and guide is not None:
            self.cut = guide.cut
            return guide.done
        stopped = self.stop_text is not None and self.stop_text(sampled[-1])
        stopped = stopped or sampled[-1] in self.stop_tokens
        is_full = len(sampled) - self.thoughts >= sampling.max_tokens
        # What is chosen from a list is never cut.
        self.cut = is_full and not (stopped or self.complete or sampling.choices)
        return len(sampled) == len(forced) if forced is not None else stopped or is_full

    @property
    def finish_reason(self) -> FinishReason:
        """Why it has ended, once it has."""
        return "length" if self.cut else "stop"

    @property
    def is_silent(self) -> bool:
        """Whether it samples nothing: the message is its header, and what closes it."""
        return self.sampling.forced is not None and not self.sampling.forced

    def leaves_out_last(self, sampled: list[int]) -> bool:
        """Whether the last of all sampled tokens only says that the model is done, in a way that its turn does not."""
        if self.sampling.forced is not None or sampled[-1] not in self.left_out:
            return False
        return self.missing_end(sampled) == self.closing

    def missing_end(self, sampled: list[int]) -> tuple[int, ...]:
        """The closing tokens that the model has not produced itself."""
        if sampled and sampled[-1] in self.closes:
            return ()
        for have in range(min(len(self.closing), len(sampled)), 0, -1):
            if tuple(sampled[-have:]) == self.closing[:have]:
                return self.closing[have:]
        return self.closing
