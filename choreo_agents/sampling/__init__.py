"""How the next token is chosen."""

from choreo_agents.sampling.answers import AnswerGuide, AnswerPaths
from choreo_agents.sampling.batch import BatchSampler
from choreo_agents.sampling.defaults import checkpoint_sampling
from choreo_agents.sampling.draw import Draw
from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.sampler import Chosen, Sampler, SamplerCall, TokenSampler, choose_tokens, nth_seed
from choreo_agents.sampling.thoughts import BLANK_LINES, AnswerEnds, Guide, Phase, ThoughtsGuide

__all__ = [
    "BLANK_LINES",
    "AnswerEnds",
    "AnswerGuide",
    "AnswerPaths",
    "BatchSampler",
    "Chosen",
    "Draw",
    "Guide",
    "Phase",
    "Sampler",
    "SamplerCall",
    "Sampling",
    "ThoughtsGuide",
    "TokenSampler",
    "checkpoint_sampling",
    "choose_tokens",
    "nth_seed",
]
