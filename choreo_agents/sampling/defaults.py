"""What a checkpoint says about sampling, for calls that do not say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from choreo_agents.sampling.parameters import Sampling

_SHAPES = ("temperature", "top_p", "top_k", "min_p")
"""Of what is drawn from; a model that says nothing of drawing, or that it does not draw, has no use for them."""


def checkpoint_sampling(said: Mapping[str, Any]) -> Sampling:
    """The fields that a checkpoint's generation config sets, as transformers' `generate` understands them.

    Without `do_sample` nothing is drawn, whatever else it says: only its repetition penalty counts then. With it, the
    temperature is 1 unless it says another. What transformers itself fills in (a top-k of 50) is not the checkpoint's.

    Args:
        said: `generation_config.json`. A value that no decode can use is left out, and said in the log.
    """
    draws = said.get("do_sample") is True
    wanted = {"temperature": 1.0} if draws else {}
    wanted |= {name: said[name] for name in _SHAPES if draws and said.get(name) is not None}
    if said.get("repetition_penalty") is not None:
        wanted["repetition_penalty"] = said["repetition_penalty"]
    if wanted.get("top_k") == -1:
        wanted["top_k"] = 0  # as others write "all"
    usable = {name: value for name, value in wanted.items() if _is_usable(name, value)}
    return Sampling(**usable)


def _is_usable(name: str, value: Any) -> bool:
    try:
        Sampling.model_validate({name: value})
    except ValidationError as error:
        logging.getLogger(__name__).warning(
            "the checkpoint's generation config has %s=%r, which is left out: %s", name, value, error.errors()[0]["msg"]
        )
        return False
    return True
