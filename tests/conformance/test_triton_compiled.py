"""The kernels compiled for GPUs that are not there: they compile, fit, and spill nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from choreo_agents.attention.kind import HeadShape
from choreo_agents.testing.conformance import kind_of

pytest.importorskip("triton", reason="the extra `kernels` is not installed: make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("what is interpreted is not compiled", allow_module_level=True)

from support.ahead_of_time import REGISTERS, SHARED_BYTES, compiled

from choreo_agents.attention.backends.triton import kernels, launch
from choreo_agents.attention.backends.triton.tiles import tiles
from choreo_agents.models.fused import kernels as fused
from choreo_agents.sampling.kernel import CONSTANTS, WARPS
from choreo_agents.sampling.triton_kernel import draw_kernel

HEADS = [(14, 2, 64), (32, 32, 80), (32, 32, 96), (32, 8, 128), (64, 8, 128), (8, 1, 256)]
POINTERS = {"outs": "*fp32", "sums": "*fp32", "first_part": "*i32", "parts": "*i32", "slots": "*i32"}
ATTENDED = POINTERS | {"tiles": "*i32", "pairs": "*i32", "cos": "*fp32", "sin": "*fp32"}
DTYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def chosen(kernel: Any, pointers: dict[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in pointers.items() if name in kernel.arg_names}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_fits_and_spills_nothing(dtype: Any, heads: Any, capability: int, tmp_path: Path) -> None:
    shape = HeadShape(*heads)
    given = DTYPES[dtype]
    pointers = ATTENDED | {"query": given, "keys": given, "values": given}
    for tile in dict.fromkeys(tiles(shape, dtype)):
        constants = launch.attend_constants(kind_of(shape.head_dim), shape, tile, upcast=False)
        made = compiled(
            kernels.attend_kernel,
            constants,
            chosen(kernels.attend_kernel, pointers),
            capability,
            tmp_path,
            floats=("scale", "softcap"),
            warps=tile.warps,
            stages=tile.stages,
        )
        assert made.stack == 0, f"{tile} spills: {made}"
        assert made.registers <= REGISTERS and made.shared <= SHARED_BYTES[capability], f"{tile}: {made}"
        assert (made.products > 0) == (dtype != torch.float32), f"{tile}: {made}"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (kind_of(128, rotation=None), torch.bfloat16),
        (kind_of(128, "neighbours", share=0.5), torch.bfloat16),
        (kind_of(128, softcap=30.0), torch.bfloat16),
        (kind_of(128), torch.float16),
    ],
    ids=["without positions", "interleaved, partial", "soft cap", "fp16"],
)
def test_every_kind_of_layer_spills_nothing(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    shape = HeadShape(32, 8, 128)
    pointers = ATTENDED | {"query": DTYPES[dtype], "keys": DTYPES[dtype], "values": DTYPES[dtype]}
    for tile in dict.fromkeys(tiles(shape, dtype)):
        constants = launch.attend_constants(kind, shape, tile, upcast=False)
        made = compiled(
            kernels.attend_kernel,
            constants,
            chosen(kernels.attend_kernel, pointers),
            90,
            tmp_path,
            floats=("scale", "softcap"),
            warps=tile.warps,
            stages=tile.stages,
        )
        assert made.stack == 0, f"{tile} spills: {made}"


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_writing_and_merging_fit_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    for heads in HEADS:
        shape = HeadShape(*heads)
        stored = dict.fromkeys(("key", "value", "keys", "values"), "*bf16") | {"slots": "*i32"}
        joined = POINTERS | {"joined": "*bf16", "sinks": "*bf16"}
        for kernel, constants, pointers in (
            (kernels.store_kernel, launch.store_constants(shape), stored),
            (kernels.merge_kernel, launch.merge_constants(shape, sinks=True), joined),
        ):
            made = compiled(kernel, constants, chosen(kernel, pointers), capability, tmp_path, warps=launch.MERGE_WARPS)
            assert made.stack == 0 and made.registers <= REGISTERS, f"{kernel.__name__} of {shape}: {made}"


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_lies_between_products_fits_and_spills_nothing(dtype: Any, capability: int, tmp_path: Path) -> None:
    """For the widths of an 8B model, heads with norms of their own, and those of a small one."""
    given = DTYPES[dtype]
    pointers = dict.fromkeys(("x", "added", "weight", "out", "qkv", "query_norm", "key_norm", "gate_up"), given) | {
        "cos": "*fp32",
        "sin": "*fp32",
    }
    turned = {"QUERIES": 32, "TURNED": 40, "TURNED_FROM": 0, "HEADS": 8}
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (fused.norm_kernel, {"ADDS": True, "WIDTH": 4096}, 8),
        (fused.norm_kernel, {"ADDS": False, "WIDTH": 16384}, 16),
        (fused.turn_kernel, {**turned, "DIM": 128, "WIDTH": 128, "HALF": 64, "NEIGHBOURS": False, "NORMS": True}, 4),
        (fused.turn_kernel, {**turned, "DIM": 80, "WIDTH": 128, "HALF": 20, "NEIGHBOURS": True, "NORMS": False}, 4),
        (fused.gate_kernel, {"TOGETHER": 1024}, 4),
    ]
    for kernel, constants, warps in cases:
        floats = ("eps",) if "eps" in kernel.arg_names else ()
        made = compiled(kernel, constants, chosen(kernel, pointers), capability, tmp_path, floats=floats, warps=warps)
        assert made.stack == 0 and made.registers <= REGISTERS, f"{kernel.__name__}: {made}"


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("given", ["*fp32", "*bf16"])
def test_drawing_fits_and_spills_nothing(given: str, capability: int, tmp_path: Path) -> None:
    pointers = {"logits": given, "draws": "*i32", "out": "*i32"}
    made = compiled(draw_kernel, CONSTANTS, pointers, capability, tmp_path, warps=WARPS)
    assert made.stack == 0 and made.registers <= REGISTERS, f"{made}"
