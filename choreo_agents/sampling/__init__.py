"""Sampling: chooses the next token of each request from logits, within filters, penalties and constraints."""

from choreo_agents.sampling.constraints import (
    BLANK_LINES,
    Allowed,
    AnswerConstraint,
    AnswerPaths,
    ChoiceConstraint,
    ConstrainedAnswer,
    FreeAnswer,
    Grammar,
    Phase,
    ThinkingConstraint,
    TokenConstraint,
)
from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.kernel import DrawKernel, DrawnTokens
from choreo_agents.sampling.parameters import Sampling, checkpoint_sampling
from choreo_agents.sampling.sampler import (
    BatchSampler,
    SampledToken,
    Sampler,
    SamplerCall,
    TokenSampler,
    choose_tokens,
    nth_seed,
)

__all__ = [
    "BLANK_LINES",
    "Allowed",
    "AnswerConstraint",
    "AnswerPaths",
    "BatchSampler",
    "ChoiceConstraint",
    "ConstrainedAnswer",
    "Draw",
    "DrawKernel",
    "DrawnTokens",
    "FreeAnswer",
    "Grammar",
    "Phase",
    "SampledToken",
    "Sampler",
    "SamplerCall",
    "Sampling",
    "ThinkingConstraint",
    "TokenConstraint",
    "TokenSampler",
    "checkpoint_sampling",
    "choose_tokens",
    "nth_seed",
]
