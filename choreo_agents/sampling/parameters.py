"""What a caller may say about sampling."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Sampling(BaseModel):
    """How one decode chooses its tokens. Frozen; every request has its own random numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.0, ge=0.0)
    """0 takes the likeliest token; 1 samples from the model's distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the likeliest tokens whose probabilities sum to at least this."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many of the likeliest tokens; 0 keeps all."""
    max_tokens: int = Field(default=256, ge=1)
    """Tokens to sample at most; header and closing tokens are not counted."""
    seed: int | None = None
    """Same seed, same tokens, whoever shares the batch. None: derived from the engine's seed and the call."""
    stop_tokens: tuple[int, ...] | None = None
    """Tokens after which the message ends; they are part of it. None: the model's own end tokens."""
    forced: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Take exactly these tokens instead of sampling, at the full price of every step (for fair timing)."""

    @property
    def longest(self) -> int:
        """Tokens that it lets a decode sample at most."""
        return self.max_tokens if self.forced is None else len(self.forced)
