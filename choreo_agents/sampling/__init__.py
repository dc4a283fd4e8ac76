"""How the next token is chosen."""

from choreo_agents.sampling.answers import AnswerGuide, AnswerPaths
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.sampler import Chosen, Sampler, SamplerCall, TokenSampler, nth_seed

__all__ = [
    "AnswerGuide",
    "AnswerPaths",
    "Chosen",
    "Sampler",
    "SamplerCall",
    "Sampling",
    "TokenSampler",
    "nth_seed",
]
