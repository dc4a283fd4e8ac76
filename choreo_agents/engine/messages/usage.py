"""What one call cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from choreo_agents.runtime.request import Request


@dataclass(frozen=True)
class Usage:
    """Every token that the engine encodes is charged to one call.

    A lazy prefill costs nothing: what it promised is charged to the call that reads it first; of several that do so
    in one step, to the one submitted first.
    """

    tokens_encoded: int
    """Tokens encoded for it for the first time, its own turn included."""
    tokens_reused: int
    """Tokens that its view holds and that it found encoded."""
    ttft_s: float | None
    """Seconds from the decode's submission to its first token; None for a prefill, and where nothing was sampled. Under
    choreo its parents were encoded before, by calls of their own, unless these were lazy."""
    duration_s: float
    tokens_recomputed: int = 0
    """Tokens encoded again for it since memory had lost them."""
    tokens_beyond: int = 0
    """Of those encoded and recomputed, in messages that its view does not hold: what its parents had attended to, and
    what came too late to join it."""
    tokens_mapped: int = 0
    """Of a mapped copy: its own tokens, which nothing encodes."""
    tokens_of_other_models: int = 0
    """Of those encoded: in messages whose words another model had said, of which it has no encoding to hand on."""
    queued_s: float | None = None
    """Seconds from its submission until a step could hold it; None where no step did."""

    @classmethod
    def of(cls, request: Request) -> Usage:
        """What a request that ends now has cost."""
        ttft = None if request.first_token_s is None else request.first_token_s - request.submitted_s
        return cls(
            tokens_reused=request.reused,
            ttft_s=ttft,
            duration_s=time.perf_counter() - request.submitted_s,
            tokens_beyond=request.beyond,
            queued_s=None if request.begun_s is None else request.begun_s - request.submitted_s,
            **request.charges,
        )

    @classmethod
    def found(cls, tokens: int) -> Usage:
        """What a call has cost whose message was there already."""
        return cls(0, tokens, None, 0.0)

    @property
    def prompt_tokens(self) -> int:
        """What its view held and its own turn, once each: encoded, reused or recomputed.

        The text methods do not encode the last token that a decode samples, and do not count it.
        """
        made = self.tokens_encoded + self.tokens_recomputed + self.tokens_mapped - self.tokens_beyond
        return made + self.tokens_reused
