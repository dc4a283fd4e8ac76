"""Kernels in Triton compiled for GPUs that are not there, and what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of a block at most, by compute capability."""
REGISTERS = 255
"""Of a thread at most."""
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on a processor."""

    registers: int
    stack: int
    """Bytes of a thread that are spilt to memory, or hold what cannot be in registers."""
    shared: int
    """Bytes of a block."""
    products: int
    """Instructions of tensor cores."""


def compiled(
    kernel: Any,
    constants: Mapping[str, Any],
    pointers: Mapping[str, str],
    capability: int,
    folder: Path,
    *,
    floats: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 3,
) -> Compiled:
    """Compile a kernel for a compute capability.

    Args:
        kernel: A function of `triton.jit`.
        constants: What is compiled in.
        pointers: Types of the arguments that are addresses, all of them multiples of 16, such as `*bf16`.
        capability: 80, 90, 100.
        folder: Where files may be written.
        floats: The arguments that are fp32; all others are integers, of which strides are multiples of 16.
        warps: Of a block.
        stages: Of loads under way.
    """
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    types |= dict.fromkeys(floats, "fp32")
    aligned = [name for name in names if name in pointers or re.search(r"_(head|token|slot)$", name)]
    source = ASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): _ALIGNED for name in aligned},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    said = subprocess.run(
        [_TOOLS / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    products = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", made.asm["ptx"]))
    return Compiled(int(registers), int(stack), made.metadata.shared, products)
