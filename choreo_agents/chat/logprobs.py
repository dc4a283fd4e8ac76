"""Log-probabilities as chat APIs tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Chosen

_PART = "\ufffd"


def logprobs_of(model: LoadedModel, chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Of the tokens of one message, with the likeliest in the place of each."""

    def told(token: int, logprob: float | None) -> dict[str, Any]:
        text = model.decode([token])
        # Of a part of a letter the text tells nothing.
        said = None if _PART in text else [*text.encode(errors="replace")]
        return {"token": text, "bytes": said, "logprob": logprob}

    return {
        "content": [
            {**told(each.token, each.logprob), "top_logprobs": [told(*likely) for likely in each.top]}
            for each in chosen
        ]
    }
