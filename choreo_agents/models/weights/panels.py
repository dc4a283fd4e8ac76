"""A linear layer's weights as the kernel of choreo_agents/native/linear.c reads them.

    panels    [outputs / 16, rounded up][inputs][16]: sixteen outputs side by side, the last ones padded with noughts

Weights that were bfloat16 once are kept as such: they lose nothing by it, and are read in half the time. For kernels
that multiply tiles of them, two inputs stand side by side, and noughts fill the last tile:

    pairs     [outputs / 16, rounded up][inputs / 2, up to a multiple of 16][16][2]
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from choreo_agents.native.library import Kernels, floats, parallel
from choreo_agents.native.structs import BF16, BF16_PAIRS, DEEP, FP32, PANEL, TILE, LinearStruct, ProductStruct

_ROWS_AT_ONCE = 1 << 12
"""Outputs that are looked at at once, so that little memory is taken beside."""


class Panels:
    """Weights that are laid out, and what the kernel is told of them.

    Args:
        panels: As above, fp32 or bfloat16.
        inputs: How many of them are real, and how many outputs.
        plain: In which dtype the weights were, and their products are given.
    """

    def __init__(self, panels: Tensor, inputs: int, outputs: int, plain: torch.dtype = torch.float32) -> None:
        self.panels, self.plain_dtype = panels, plain
        self.inputs, self.outputs = inputs, outputs
        of_bfloat16s = BF16 if panels.dim() == 3 else BF16_PAIRS
        self.dtype = of_bfloat16s if panels.dtype == torch.bfloat16 else FP32

    @classmethod
    def of(cls, *weights: Tensor, pairs: bool = False) -> Panels:
        """Those of weights in fp32 or bfloat16, [outputs, inputs] each, one after the other: all but the last have
        whole panels.

        Args:
            weights: Which.
            pairs: Whether the kernels multiply tiles: of weights that are bfloat16s, since tiles round what comes.
        """
        assert all(len(weight) % PANEL == 0 for weight in weights[:-1])
        inputs, outputs = weights[0].shape[1], sum(len(weight) for weight in weights)
        dtype = torch.bfloat16 if all(map(_was_bfloat16, weights)) else torch.float32
        if pairs and weights[0].dtype == torch.bfloat16:
            return cls(_paired(weights, inputs, outputs), inputs, outputs, weights[0].dtype)
        panels = torch.zeros(-(-outputs // PANEL), inputs, PANEL, dtype=dtype, device="cpu")
        at = 0
        for weight in weights:
            whole = len(weight) // PANEL
            panels[at : at + whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
            at += whole
            if rest := len(weight) - whole * PANEL:
                panels[at, :, :rest] = weight[whole * PANEL :].T
        return cls(panels, inputs, outputs, weights[0].dtype)

    def part(self, first: int, outputs: int) -> Panels:
        """Some of its outputs, from a whole panel on, in the same memory."""
        assert first % PANEL == 0
        some = self.panels[first // PANEL : -(-(first + outputs) // PANEL)]
        return Panels(some, self.inputs, outputs, self.plain_dtype)

    def struct(self, bias: Tensor | None) -> LinearStruct:
        """What the kernel is told; good while the panels and the bias, fp32, are."""
        told = None if bias is None else bias.data_ptr()
        return LinearStruct(self.panels.data_ptr(), told, self.inputs, self.outputs, self.dtype)

    def plain(self) -> Tensor:
        """The weights as they were, [outputs, inputs]."""
        panels = self.panels
        if self.dtype == BF16_PAIRS:
            panels = panels.transpose(2, 3).flatten(1, 2)[:, : self.inputs]
        rows = panels.transpose(1, 2).reshape(-1, self.inputs)
        return rows[: self.outputs].to(self.plain_dtype).contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """[..., inputs] to [..., outputs], in fp32; what comes in bfloat16 goes so."""
        rows = x.reshape(-1, self.inputs).float()
        bias = None if bias is None else bias.detach().float()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = floats(*x.shape[:-1], self.outputs)
        linear, threads = self.struct(bias), torch.get_num_threads()
        scratch = beside(self.dtype, threads, len(rows), self.inputs)
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


def beside(dtype: int, threads: int, rows: int, inputs: int) -> Tensor | None:
    """Memory for products with weights of a dtype: threads make floats of bfloat16s in it, a panel each; or, for those
    in pairs, all rows are rounded to such."""
    if dtype == BF16_PAIRS:
        return floats(1, -(-rows // TILE) * TILE * -(-inputs // DEEP) * DEEP // 2)
    return floats(threads, inputs * PANEL) if dtype == BF16 else None


def _paired(weights: Sequence[Tensor], inputs: int, outputs: int) -> Tensor:
    """Weights, [outputs, inputs] each, in pairs of inputs; nothing of their size is made beside."""
    shape = (-(-outputs // PANEL), -(-inputs // DEEP) * DEEP // 2, PANEL, 2)
    made = torch.zeros(shape, dtype=torch.bfloat16, device="cpu")
    for at, panel in enumerate(panel for weight in weights for panel in torch.split(weight, PANEL)):
        pairs = functional.pad(panel, (0, inputs % 2)).reshape(len(panel), -1, 2)
        made[at, : pairs.shape[1], : len(panel)] = pairs.transpose(0, 1)
    return made


def _was_bfloat16(weight: Tensor) -> bool:
    if weight.dtype == torch.bfloat16:
        return True
    return all(torch.equal(part.bfloat16().float(), part) for part in torch.split(weight, _ROWS_AT_ONCE))
