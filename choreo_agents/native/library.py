"""Loader of the compiled kernels, which lie beside this file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from choreo_agents.native.structs import LAYOUT, STRUCTS

PATH = Path(__file__).with_name("native.so")
_WIDTHS = {"AMX": 16, "AVX512_BF16": 16, "AVX512": 16, "AVX2": 8}
"""Floats in a vector register, by the name of the CPU capability, best first. AVX512_BF16 also multiplies pairs of
bfloat16s, and AMX tiles of them."""


@dataclass(frozen=True)
class Kernels:
    """Functions of one variant. They take addresses of structures, block until done, and release the GIL."""

    name: str
    """CPU capability that the variant is for."""
    width: int
    """Floats in a vector; head dimensions must be a multiple."""
    attend: Callable[[int, int, int], None]
    """Attention: (plan, layer, phases)."""
    multiply: Callable[[int], None]
    """Linear layer: (product)."""
    decode: Callable[[int, int, int, int], None]
    """Decoder layer: (decoder, pass, plan, layer)."""
    normalise: Callable[[int, int], None]
    """Norm: (decoder, pass)."""
    draw: Callable[[int], None]
    """Draw of tokens: (drawing)."""
    pairs: bool = False
    """Whether products read weights laid out as pairs of bfloat16s, and round their inputs to bfloat16."""

    def takes(self, head_dim: int) -> bool:
        """Return whether heads of `head_dim` dimensions fill whole vectors."""
        return head_dim % self.width == 0


def has_tiles() -> bool:
    """Return whether this processor multiplies tiles of bfloat16s (AMX), as torch's operators do."""
    return _supports("amx_tile")


def _supports(feature: str) -> bool:
    is_supported = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return is_supported is not None and bool(is_supported())


@cache
def available_kernels() -> tuple[Kernels, ...] | str:
    """Return the variants that this processor can run, best first, or why there are none.

    `CHOREO_AGENTS_KERNELS=AVX512`, for example, disables the better ones.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _WIDTHS:
        return f"torch reports this CPU as {capability}, but the kernels require AVX2"
    if not PATH.exists():
        return "they were not compiled at installation, which requires a C compiler on Linux on x86-64"
    names = [*_WIDTHS]
    best = capability
    if capability == "AVX512":
        best = "AVX512_BF16" if _supports("avx512_bf16") else best
        best = "AMX" if has_tiles() else best
    limit = os.environ.get("CHOREO_AGENTS_KERNELS", best).upper()
    if limit not in names:
        return f"CHOREO_AGENTS_KERNELS must be one of {', '.join(names)}, not {limit}"
    try:
        library = ctypes.CDLL(str(PATH))
        variants = (_kernels(library, name) for name in names[max(names.index(best), names.index(limit)) :])
        return tuple(kernels for kernels in variants if kernels is not None)
    except (OSError, AttributeError) as error:
        return f"{PATH} cannot be loaded, reinstall the package: {error}"


def multiply_tiles() -> bool:
    """Return whether the best variant multiplies tiles of bfloat16s."""
    kernels = available_kernels()
    return not isinstance(kernels, str) and kernels[0].name == "AMX"


def _kernels(library: ctypes.CDLL, name: str) -> Kernels | None:
    """Load a variant; return None if the system does not let this process use AMX tiles."""
    if name == "AMX" and not library.choreo_permitted_amx():
        return None

    def function(called: str, *kinds: Any) -> Any:
        pointer = library[f"choreo_{called}_{name.lower()}"]
        pointer.argtypes, pointer.restype = kinds, None
        return pointer

    sizes = (ctypes.c_int32 * len(STRUCTS))()
    layout = library[f"choreo_layout_{name.lower()}"](sizes)
    if (layout, [*sizes]) != (LAYOUT, [ctypes.sizeof(struct) for struct in STRUCTS]):
        raise OSError("it is of another version")
    at = ctypes.c_void_p
    return Kernels(
        name,
        _WIDTHS[name],
        attend=function("attend", at, at, ctypes.c_int),
        multiply=function("multiply", at),
        decode=function("decode", at, at, at, at),
        normalise=function("normalise", at, at),
        draw=function("draw", at),
        pairs=name in ("AMX", "AVX512_BF16"),
    )


def floats(*shape: int) -> Tensor:
    """Allocate fp32 memory on the host, whatever torch's default type and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


@cache
def parallel() -> int | None:
    """Return the address of OpenMP's `GOMP_parallel` in the library that torch uses, or None.

    The kernels run on torch's own threads: a second pool would wait for cores on which torch's threads spin.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        # Looked up through torch's own dependencies: another OpenMP library would have threads of its own.
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
