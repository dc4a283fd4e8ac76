"""Draw of a step's tokens in one kernel launch, for all rows that fp32 decides with certainty.

kernels    in Triton, for GPUs; the kernel for CPUs is native/draw.c
lottery    launches them, and decides close calls
"""

from choreo_agents.sampling.lottery.lottery import CONSTANTS, Lottery, Tickets

__all__ = ["CONSTANTS", "Lottery", "Tickets"]
