"""How the next token is chosen."""

from choreo_agents.sampling.parameters import Sampling
from choreo_agents.sampling.sampler import TokenSampler

__all__ = ["Sampling", "TokenSampler"]
