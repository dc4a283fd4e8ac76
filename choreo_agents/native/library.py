"""The compiled kernels: found beside this file."""

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
_WIDTHS = {"AMX": 16, "AVX512": 16, "AVX2": 8}
"""Floats in a vector register, by what torch calls the processor's kind: the best first. With AMX it multiplies tiles
of bfloat16s, too."""


@dataclass(frozen=True)
class Kernels:
    """One variant of the functions. Each takes addresses of structures, and returns when it is done; meanwhile other
    threads of Python run."""

    name: str
    """Of the processor's kind that it is for."""
    width: int
    """Head dimensions are a multiple of this."""
    attend: Callable[[int, int, int], None]
    """(plan, layer, what of it to do)."""
    multiply: Callable[[int], None]
    """(product)."""
    decode: Callable[[int, int, int, int], None]
    """A decoder layer: (decoder, pass, plan, layer)."""
    normalise: Callable[[int, int], None]
    """(decoder, pass)."""
    draw: Callable[[int], None]
    """(drawing)."""
    tiles: bool = False
    """Whether they multiply tiles of bfloat16s."""

    def takes(self, head_dim: int) -> bool:
        """Whether heads of so many dimensions fill its vectors."""
        return head_dim % self.width == 0


def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bfloat16s (AMX), as torch's operators do."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return asked is not None and bool(asked())


@cache
def available_kernels() -> tuple[Kernels, ...] | str:
    """Those that this processor can run, the best first; or why there are none.

    `CHOREO_AGENTS_KERNELS=AVX512`, say, goes without those that are better.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _WIDTHS:
        return f"this processor is {capability} to torch: the kernels want AVX2"
    if not PATH.exists():
        return "they were not compiled when the package was installed: that takes a C compiler, on Linux on x86-64"
    names = [*_WIDTHS]
    best = "AMX" if capability == "AVX512" and has_tiles() else capability
    wanted = os.environ.get("CHOREO_AGENTS_KERNELS", best).upper()
    if wanted not in names:
        return f"CHOREO_AGENTS_KERNELS is one of {', '.join(names)}, not {wanted}"
    try:
        library = ctypes.CDLL(str(PATH))
        made = (_kernels(library, name) for name in names[max(names.index(best), names.index(wanted)) :])
        return tuple(kernels for kernels in made if kernels is not None)
    except (OSError, AttributeError, _OtherLayoutError) as error:
        return f"{PATH} cannot be used, install the package again: {error}"


def multiply_tiles() -> bool:
    """Whether the best of the kernels multiply tiles of bfloat16s."""
    kernels = available_kernels()
    return not isinstance(kernels, str) and kernels[0].tiles


class _OtherLayoutError(Exception):
    """A library of another version."""


def _kernels(library: ctypes.CDLL, name: str) -> Kernels | None:
    """Those of a variant; None: the system does not let this process have tiles."""
    if name == "AMX" and not library.choreo_permitted_amx():
        return None

    def function(called: str, *kinds: Any) -> Any:
        made = library[f"choreo_{called}_{name.lower()}"]
        made.argtypes, made.restype = kinds, None
        return made

    sizes = (ctypes.c_int32 * len(STRUCTS))()
    layout = library[f"choreo_layout_{name.lower()}"](sizes)
    if (layout, [*sizes]) != (LAYOUT, [ctypes.sizeof(struct) for struct in STRUCTS]):
        raise _OtherLayoutError("it is of another version")
    at = ctypes.c_void_p
    return Kernels(
        name,
        _WIDTHS[name],
        attend=function("attend", at, at, ctypes.c_int),
        multiply=function("multiply", at),
        decode=function("decode", at, at, at, at),
        normalise=function("normalise", at, at),
        draw=function("draw", at),
        tiles=name == "AMX",
    )


def floats(*shape: int) -> Tensor:
    """Memory for the kernels, whatever torch's defaults are at this moment."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


@cache
def parallel() -> int | None:
    """Where the function is by which torch's own operators share their work with its threads; None: it has no such.

    A second pool of threads would wait for cores on which torch's spin.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        # Found through what torch itself depends on: another library of OpenMP's has threads of its own.
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
