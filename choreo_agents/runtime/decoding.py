"""When a decode ends, and what of what it sampled is the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from choreo_agents.sampling import Sampler, Sampling


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

    @property
    def longest(self) -> int:
        """Tokens that it can add at most, closing ones included."""
        guide = self.sampler.guide
        return (self.sampling.longest if guide is None else guide.longest) + len(self.closing)

    def ends(self, sampled: list[int]) -> bool:
        """Whether these are all the tokens to sample; asked once after each."""
        if self.sampling.forced is not None:
            return len(sampled) == len(self.sampling.forced)
        if self.sampler.guide is not None:
            return self.sampler.guide.done
        stopped = self.stop_text is not None and self.stop_text(sampled[-1])
        return stopped or sampled[-1] in self.stop_tokens or len(sampled) == self.sampling.max_tokens

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
