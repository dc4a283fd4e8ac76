"""How the next token is chosen."""

from choreo_agents.sampling.answers import AnswerGuide, AnswerPaths
from choreo_agents.sampling.batch import BatchSampler
from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.sampler import Chosen, Sampler, SamplerCall, TokenSampler, choose_tokens, nth_seed

__all__ = [
    "AnswerGuide",
    "AnswerPaths",
    "BatchSampler",
    "Chosen",
    "Draw",
    "Sampler",
    "SamplerCall",
    "Sampling",
    "TokenSampler",
    "choose_tokens",
    "nth_seed",
]
