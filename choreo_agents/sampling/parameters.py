"""Sampling parameters of a call, and the defaults that a checkpoint gives for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from choreo_agents.arguments import Options
from choreo_agents.sampling.constraints import Grammar

MOST_LOGPROBS = 64
MOST_ANSWERS = 4096
_SHAPES = ("temperature", "top_p", "top_k", "min_p")
"""Parameters of the distribution, which a checkpoint sets only along with `do_sample`."""


class Sampling(Options):
    """Sampling parameters of one decode. Frozen; every request has its own random numbers.

    Temperature, top-p, top-k, min-p and repetition penalty default to those of the model's checkpoint
    (`LoadedModel.sampling_defaults`, from its `generation_config.json`), and only then to the values below. Set
    `temperature=0.0` to take the likeliest token with any model.
    """

    temperature: float = Field(default=0.0, ge=0.0)
    """0 takes the likeliest token; 1 samples from the model's distribution. By default the checkpoint's, or 0."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the likeliest tokens whose probabilities sum to at least this. By default the checkpoint's, or all."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many of the likeliest tokens; 0 keeps all. By default the checkpoint's, or all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keep tokens at least this many times as likely as the likeliest; 0 keeps all. By default the checkpoint's, or
    all."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Above 1, tokens that are in the view, the header or the answer already become less likely: their logits are
    divided by it if positive, else multiplied. 1 changes nothing. By default the checkpoint's, or 1."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from the logits of tokens that were sampled already; below 0 they become more likely. As with OpenAI
    and vLLM, only tokens that this decode sampled count, not its view and header."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Like `presence_penalty`, once for each time that a token was sampled."""
    max_tokens: int = Field(default=2048, ge=1)
    """Upper bound on sampled tokens, without header and closing tokens. By default 2,048, or fewer if the rest of the
    context or KV memory holds fewer; an answer that this default cuts gives a `CutAnswerWarning`, once."""
    seed: int | None = None
    """Same seed, same tokens, in any batch. None: derived from the engine's seed and the call."""
    stop_tokens: tuple[int, ...] | None = None
    """Tokens after which the message ends; they are part of it. None: the model's end tokens, of which the message of a
    call with a `turn_suffix` keeps only those that begin the suffix."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts after which the message ends, too; they are part of it. Special tokens have no text here."""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Keep the log-probability of every sampled token, and of this many of the likeliest tokens in its place. They are
    the model's own, before penalties, temperature and filters."""
    forced_token_ids: tuple[int, ...] | None = Field(default=None, serialization_alias="forced")
    """Take exactly these tokens instead of sampling, at the full cost of every step: to replay an answer (which may be
    empty), and for fair timing."""
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    """Number of answers to sample over one view, at most 4,096, each with its own random numbers. More than one come as
    a list, from a list of calls."""
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Allowed answers: the sampled text ends with one of them, and the decode with it. If a choice starts a longer one,
    the model decides by an end token; if that has a text of its own, it follows the answer, unless a `turn_suffix`
    takes its place. Does not apply to `forced_token_ids`."""
    answer_prefix: str = Field(default="", serialization_alias="lead")
    """Text before the answer, as in "I vote for". The model writes freely until its text ends with it. If the model
    would stop before, or has just enough tokens left, the prefix is forced. Empty: the answer is the whole text."""

    constraint: Grammar | None = Field(default=None, serialization_alias="guide")
    """Grammar of the whole answer: `{"json_schema": {...}}`, `{"regex": "..."}` or `{"grammar": "..."}`, in Lark's
    notation. The answer may start with a space, as headers end without one, unless a grammar defines its start; JSON is
    formatted as by `json.dumps`. The decode ends when the answer is complete, or at a text of `stop` or `max_tokens` if
    it may end there; otherwise it fails with `ConstraintError`. Needs the extra `guided`. Does not apply to
    `forced_token_ids`."""

    @model_validator(mode="after")
    def _check_answers(self) -> Sampling:
        if self.choices and self.constraint is not None:
            raise ValueError("choices and constraint exclude each other: leave one of them out")
        if self.answer_prefix and not self.choices:
            raise ValueError(f"answer_prefix {self.answer_prefix!r} needs choices: set them, or leave it out")
        return self

    @property
    def is_bounded(self) -> bool:
        """True if the caller has set an upper bound on the sampled tokens."""
        return "max_tokens" in self.model_fields_set or self.forced_token_ids is not None

    def within(self, limit: int) -> Sampling:
        """Return a copy with at most `limit` tokens, unless the caller has set a bound."""
        if self.is_bounded or self.max_tokens <= limit:
            return self
        shorter = self.model_copy(update={"max_tokens": max(1, limit)})
        shorter.model_fields_set.remove("max_tokens")  # the caller has still not set it
        return shorter

    def with_defaults(self, defaults: Sampling) -> Sampling:
        """Return a copy in which fields that were never set are those that `defaults` sets."""
        missing = defaults.model_fields_set - self.model_fields_set
        return self.model_copy(update={name: getattr(defaults, name) for name in missing}) if missing else self

    @property
    def penalises(self) -> bool:
        """True if any penalty depends on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def longest(self) -> int:
        """Upper bound on the tokens that a decode samples."""
        return self.max_tokens if self.forced_token_ids is None else len(self.forced_token_ids)


def checkpoint_sampling(config: Mapping[str, Any]) -> Sampling:
    """Read the sampling parameters of a checkpoint's generation config, as transformers' `generate` does.

    Without `do_sample`, only the repetition penalty counts. With it, the temperature defaults to 1. Defaults that
    transformers adds by itself (a top-k of 50) are not used.

    Args:
        config: `generation_config.json`. Unusable values are left out and logged.
    """
    draws = config.get("do_sample") is True
    fields = {"temperature": 1.0} if draws else {}
    fields |= {name: config[name] for name in _SHAPES if draws and config.get(name) is not None}
    if config.get("repetition_penalty") is not None:
        fields["repetition_penalty"] = config["repetition_penalty"]
    if fields.get("top_k") == -1:
        fields["top_k"] = 0  # other libraries write "all" so
    usable = {name: value for name, value in fields.items() if _is_usable(name, value)}
    return Sampling(**usable)


def _is_usable(name: str, value: Any) -> bool:
    try:
        Sampling.model_validate({name: value})
    except ValidationError as error:
        logging.getLogger(__name__).warning(
            "the checkpoint's generation config has %s=%r, which is ignored: %s", name, value, error.errors()[0]["msg"]
        )
        return False
    return True
