"""Lays out a linear layer's weights for the kernel in choreo_agents/native/linear.c.

    panels    [outputs / 16, rounded up][inputs][16]: sixteen outputs side by side, the last panel padded with zeros

fp32 weights that are exact in bfloat16 are stored as bfloat16: nothing is lost, and they are read in half the time. For
kernels that multiply pairs or tiles of bfloat16s, two inputs are side by side, and zeros fill the last tile:

    pairs     [outputs / 16, rounded up][inputs / 2, up to a multiple of 16][16][2]
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from choreo_agents.native.library import Kernels, floats, parallel
from choreo_agents.native.structs import BF16, BF16_PAIRS, DEEP, FP32, PANEL, TILE, LinearStruct, ProductStruct

_ROWS_AT_ONCE = 1 << 12
"""Outputs that are compared at a time, to bound temporary memory."""


class Panels:
    """A linear layer's weights in panels.

    Args:
        panels: Panels or pairs as above, fp32 or bfloat16.
        inputs: Number of inputs without padding.
        outputs: Number of outputs without padding.
        plain: Dtype of the plain weights and of products.
    """

    def __init__(self, panels: Tensor, inputs: int, outputs: int, plain: torch.dtype = torch.float32) -> None:
        self.panels, self.plain_dtype = panels, plain
        self.inputs, self.outputs = inputs, outputs
        of_bfloat16s = BF16 if panels.dim() == 3 else BF16_PAIRS
        self.dtype = of_bfloat16s if panels.dtype == torch.bfloat16 else FP32

    @classmethod
    def of(cls, *weights: Tensor, pairs: bool = False) -> Panels:
        """Lay out weights in fp32 or bfloat16, [outputs, inputs] each, one after the other.

        Args:
            weights: The weights; all but the last must have whole panels.
            pairs: Whether the kernels multiply pairs; applies to bfloat16 weights only, since inputs are rounded.
        """
        assert all(len(weight) % PANEL == 0 for weight in weights[:-1])
        inputs, outputs = weights[0].shape[1], sum(len(weight) for weight in weights)
        dtype = torch.bfloat16 if all(map(_was_bfloat16, weights)) else torch.float32
        pairs = pairs and weights[0].dtype == torch.bfloat16
        shape = (-(-inputs // DEEP) * DEEP // 2, PANEL, 2) if pairs else (inputs, PANEL)
        panels = torch.zeros(-(-outputs // PANEL), *shape, dtype=dtype, device="cpu")
        # Panel by panel, to bound temporary memory.
        for at, rows in enumerate(rows for weight in weights for rows in torch.split(weight, PANEL)):
            if pairs:
                paired = functional.pad(rows, (0, inputs % 2)).reshape(len(rows), -1, 2)
                panels[at, : paired.shape[1], : len(rows)] = paired.transpose(0, 1)
            else:
                panels[at, :, : len(rows)] = rows.T
        return cls(panels, inputs, outputs, weights[0].dtype)

    def part(self, first: int, outputs: int) -> Panels:
        """Return some of its outputs, starting at a whole panel, without a copy."""
        assert first % PANEL == 0
        some = self.panels[first // PANEL : -(-(first + outputs) // PANEL)]
        return Panels(some, self.inputs, outputs, self.plain_dtype)

    def struct(self, bias: Tensor | None) -> ctypes.Structure:
        """Return the kernel's struct, valid while the panels and the bias, in fp32, are alive."""
        address = None if bias is None else bias.data_ptr()
        return LinearStruct(self.panels.data_ptr(), address, self.inputs, self.outputs, self.dtype)

    def plain(self) -> Tensor:
        """Return the plain weights, [outputs, inputs]."""
        panels = self.panels
        if self.dtype == BF16_PAIRS:
            panels = panels.transpose(2, 3).flatten(1, 2)[:, : self.inputs]
        rows = panels.transpose(1, 2).reshape(-1, self.inputs)
        return rows[: self.outputs].to(self.plain_dtype).contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """Map [..., inputs] to [..., outputs] in fp32; the result has the dtype of `x`."""
        rows = x.reshape(-1, self.inputs).float()
        bias = None if bias is None else bias.detach().float()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = floats(*x.shape[:-1], self.outputs)
        linear, threads = self.struct(bias), torch.get_num_threads()
        scratch = scratch_for(self.dtype, threads, len(rows), self.inputs)
        product = ProductStruct(
            linear=ctypes.addressof(linear),
            x=rows.data_ptr(),
            out=out.data_ptr(),
            x_row=rows.stride(0),
            out_row=self.outputs,
            rows=len(rows),
            threads=threads,
            parallel=parallel(),
            scratch=None if scratch is None else scratch.data_ptr(),
            scratch_each=0 if scratch is None else scratch.shape[1],
        )
        if len(rows):
            kernels.multiply(ctypes.addressof(product))
        return out.to(x.dtype)


def scratch_for(dtype: int, threads: int, rows: int, inputs: int) -> Tensor | None:
    """Return scratch memory for products with weights of a kernel's dtype; None if none is needed.

    For bfloat16, each thread converts a panel to fp32 in it; for pairs, it holds all rows rounded to bfloat16.
    """
    if dtype == BF16_PAIRS:
        return floats(1, -(-rows // TILE) * TILE * -(-inputs // DEEP) * DEEP // 2)
    return floats(threads, inputs * PANEL) if dtype == BF16 else None


def _was_bfloat16(weight: Tensor) -> bool:
    if weight.dtype == torch.bfloat16:
        return True
    return all(torch.equal(part.bfloat16().float(), part) for part in torch.split(weight, _ROWS_AT_ONCE))
