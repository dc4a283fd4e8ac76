"""Limits of a server: sizes of requests, concurrent answers and time-outs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits of a server. A request beyond one is rejected at once, with the HTTP status that its field names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(4 << 20, ge=1)
    """Bytes of a request: 413."""
    messages: int = Field(4096, ge=1)
    """Messages of a request, and likewise its tools: 413."""
    body_s: float = Field(30.0, gt=0)
    """Seconds for a request to arrive: 408; also for a client to accept an event of a stream, else it is closed."""
    request_s: float | None = Field(600.0, gt=0)
    """Seconds for an answer: 504; None: no limit."""
    answers: int = Field(256, ge=1)
    """Concurrent answers, including queued ones: 429."""
    tenant_answers: int | None = Field(None, ge=1)
    """Concurrent answers of a tenant: 429, or 400 for a single request with more; None: only `answers` counts."""
    tenant_calls_per_second: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Engine calls that a tenant may start per second, one for each new message and each answer; more calls wait.
    None: no limit."""
    choices: int = Field(16, ge=1)
    """Answers to a request, its `n`: 400."""
