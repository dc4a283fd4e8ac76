"""What a caller may say about sampling, and a checkpoint for calls that do not say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from choreo_agents.arguments import Options
from choreo_agents.sampling.constraints.grammar import Grammar

MOST_LOGPROBS = 64
MOST_ANSWERS = 4096
_SHAPES = ("temperature", "top_p", "top_k", "min_p")
"""Of what is drawn from; a model that says nothing of drawing, or that it does not draw, has no use for them."""


class Sampling(Options):
    """How one decode chooses its tokens. Frozen; every request has its own random numbers.

    Temperature, top-p, top-k, min-p and repetition penalty that are not given are what the model's checkpoint says
    (`LoadedModel.sampling_defaults`, of its `generation_config.json`), and only then the defaults below: with
    `temperature=0.0` the likeliest token is taken whatever the model.
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
    """Above 1, tokens that the view, the header or the answer hold already become less likely: their logits are
    divided by it if they are positive, and multiplied otherwise. 1 leaves them. By default the
    checkpoint's, or 1."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken from the logits of tokens that were sampled already; below 0 they become more likely. As with OpenAI and
    vLLM only what this decode has sampled counts: view and header do not."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """The same, once for each time that they were sampled."""
    max_tokens: int = Field(default=2048, ge=1)
    """Tokens to sample at most; header and closing tokens are not counted. By default 2,048, or what the rest of the
    context, or KV memory, has room for: an answer that this cuts is told once, by a `CutAnswerWarning`."""
    seed: int | None = None
    """Same seed, same tokens, whoever shares the batch. None: derived from the engine's seed and the call."""
    stop_tokens: tuple[int, ...] | None = None
    """Tokens after which the message ends; they are part of it. None: the model's own end tokens, of which the message
    of a call with a `turn_suffix` keeps those that begin it."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts after which the message ends, besides; they are part of it. Special tokens have no text here."""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Keep the log-probability of every token that was sampled, and of this many of the likeliest in its place. They
    are the model's own: of before penalties, temperature and filters."""
    forced_token_ids: tuple[int, ...] | None = Field(default=None, serialization_alias="forced")
    """Take exactly these tokens instead of sampling, at the full price of every step: to replay what was sampled, which
    may be nothing, and for fair timing."""
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    """Answers to sample, at most 4,096: over one view, each with its own random numbers. More than one come as a list,
    from a list of calls."""
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The allowed answers: the text that is sampled ends with one of them, and the decode with it. A longer choice may
    follow a shorter one that starts it, unless the model ends there; an end token that has a text of its own then
    stands behind the answer, unless a `turn_suffix` takes its place. Whatever is `forced_token_ids` is taken as it
    is."""
    answer_prefix: str = Field(default="", serialization_alias="lead")
    """Text that the answer comes after, as in "I vote for". The model writes freely until its text ends with it; where
    it would stop before, or has just enough tokens left, the lead is forced. Empty: the answer is all that is
    sampled."""

    constraint: Grammar | None = Field(default=None, serialization_alias="guide")
    """What all of the answer must be: `{"json_schema": {...}}`, `{"regex": "..."}` or `{"grammar": "..."}`, in Lark's
    notation. It may start with a space, as headers end without one, unless a grammar says how it starts; JSON is
    written as `json.dumps` writes it. The decode ends with it, and where it may end at a text of `stop`, or at
    `max_tokens`; cut elsewhere it fails with `ConstraintError`. Needs the extra `guided`. Whatever is
    `forced_token_ids` is taken as it is."""

    @model_validator(mode="after")
    def _leads_to_something(self) -> Sampling:
        if self.choices and self.constraint is not None:
            raise ValueError("choices and a constraint both say what the whole answer is: leave one of them out")
        if self.answer_prefix and not self.choices:
            raise ValueError(
                f"lead {self.answer_prefix!r} leads to no answer: give the allowed ones as choices, or leave it out"
            )
        return self

    @property
    def is_bounded(self) -> bool:
        """Whether somebody has said how many tokens it samples at most."""
        return "max_tokens" in self.model_fields_set or self.forced_token_ids is not None

    def within(self, room: int) -> Sampling:
        """The same, with no more tokens than there is room for, where nobody has said how many."""
        if self.is_bounded or self.max_tokens <= room:
            return self
        shorter = self.model_copy(update={"max_tokens": max(1, room)})
        shorter.model_fields_set.remove("max_tokens")  # it is still nobody's word
        return shorter

    def with_defaults(self, defaults: Sampling) -> Sampling:
        """The same, with what `defaults` sets in the place of what was never set."""
        missing = defaults.model_fields_set - self.model_fields_set
        return self.model_copy(update={name: getattr(defaults, name) for name in missing}) if missing else self

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens were there before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def longest(self) -> int:
        """Tokens that it lets a decode sample at most."""
        return self.max_tokens if self.forced_token_ids is None else len(self.forced_token_ids)


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
