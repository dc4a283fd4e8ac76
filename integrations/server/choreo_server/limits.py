"""How much a server takes at once."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Of one server. What is beyond is refused at once, and says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(4 << 20, ge=1)
    """Of one request: 413."""
    messages: int = Field(4096, ge=1)
    """In one request, and so many tools: 413."""
    body_s: float = Field(30.0, gt=0)
    """Seconds in which a request must be told: 408; and in which a piece of a stream must be taken, else it is left."""
    request_s: float | None = Field(600.0, gt=0)
    """Seconds in which it must be answered: 504."""
    answers: int = Field(256, ge=1)
    """Answers under way at once, those that wait for their turn among them: 429."""
    tenant_answers: int | None = Field(None, ge=1)
    """The same of one tenant with a key, and 400 for a request that asks for more; None: as many as there may be."""
    tenant_calls_per_second: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Calls of the engine that a tenant with a key may start, the others wait: a request makes one for each message
    that it tells and each answer. None: as many as come."""
    choices: int = Field(16, ge=1)
    """Answers to one request, its `n`: 400."""
