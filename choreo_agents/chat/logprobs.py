"""Log-probabilities as chat APIs tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from choreo_agents.engine import Engine
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Chosen


def said_tokens(engine: Engine, handle: MessageHandle) -> tuple[Chosen, ...]:
    """Return the tokens that were sampled for a message, without one that only closes its turn."""
    chosen = engine.logprobs(handle)
    return chosen[:-1] if chosen and engine.model.closes(chosen[-1].token) else chosen


def logprobs_of(model: LoadedModel, chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Of the tokens of one message, with the likeliest in the place of each."""

    def told(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": model.decode([token]), "bytes": [*model.bytes_of(token)], "logprob": logprob}

    return {
        "content": [
            {**told(each.token, each.logprob), "top_logprobs": [told(*likely) for likely in each.top]}
            for each in chosen
        ]
    }
