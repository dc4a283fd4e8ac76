"""What draws the tokens of a step in one launch, where there is something that does."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from choreo_agents.native.library import Kernels, found, parallel
from choreo_agents.native.structs import DrawingStruct
from choreo_agents.sampling import Lottery
from choreo_agents.sampling.lottery import CONSTANTS


def lottery_on(device: torch.device) -> Lottery | None:
    """That of a device: kernels in Triton on a GPU, those in C on a CPU; None if there are none."""
    made, kernels = Lottery.on(device), found()
    if made is not None or device.type != "cpu" or isinstance(kernels, str):
        return made
    return native_lottery(kernels[0])


def native_lottery(kernels: Kernels) -> Lottery:
    """That of the kernels in C, for logits in fp32."""

    def launch(logits: Tensor, asked: Tensor, told: Tensor) -> None:
        drawing = DrawingStruct(
            logits=logits.data_ptr(),
            asked=asked.data_ptr(),
            told=told.data_ptr(),
            row=logits.stride(0),
            draws=len(asked),
            words=logits.shape[1],
            threads=torch.get_num_threads(),
            margin=CONSTANTS["MARGIN"],
            lost=CONSTANTS["LOST"],
            alike=CONSTANTS["ALIKE"],
            least=CONSTANTS["LEAST"],
            lowest=CONSTANTS["LOWEST"],
            highest=CONSTANTS["HIGHEST"],
            parallel=parallel(),
        )
        kernels.draw(ctypes.addressof(drawing))

    return Lottery(launch, (torch.float32,))
