"""How the next token is chosen."""

from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.guiding.answers import AnswerGuide, AnswerPaths
from choreo_agents.sampling.guiding.grammar import Grammar
from choreo_agents.sampling.guiding.guides import Allowed, FreeAnswer, Guide, GuidedAnswer, TokenGuide
from choreo_agents.sampling.guiding.thoughts import BLANK_LINES, Phase, ThoughtsGuide
from choreo_agents.sampling.lottery import Lottery, Tickets
from choreo_agents.sampling.parameters import Sampling, checkpoint_sampling
from choreo_agents.sampling.sampler import (
    BatchSampler,
    Chosen,
    Sampler,
    SamplerCall,
    TokenSampler,
    choose_tokens,
    nth_seed,
)

__all__ = [
    "BLANK_LINES",
    "Allowed",
    "AnswerGuide",
    "AnswerPaths",
    "BatchSampler",
    "Chosen",
    "Draw",
    "FreeAnswer",
    "Grammar",
    "Guide",
    "GuidedAnswer",
    "Lottery",
    "Phase",
    "Sampler",
    "SamplerCall",
    "Sampling",
    "ThoughtsGuide",
    "Tickets",
    "TokenGuide",
    "TokenSampler",
    "checkpoint_sampling",
    "choose_tokens",
    "nth_seed",
]
