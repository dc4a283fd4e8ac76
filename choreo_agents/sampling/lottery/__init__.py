"""The tokens of a step's rows in one launch: what a row's own numbers decide there for certain.

kernels    in Triton, for GPUs; those for CPUs are in native/draw.c
lottery    asks them, and decides what they leave open
"""

from choreo_agents.sampling.lottery.lottery import CONSTANTS, Lottery, Tickets

__all__ = ["CONSTANTS", "Lottery", "Tickets"]
