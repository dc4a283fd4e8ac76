"""ctypes structures of native.h, read from it. The owner of a structure must keep alive what its pointers refer to."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

FP32, BF16, BF16_PAIRS = 0, 1, 2
PAIRINGS = {"halves": 1, "neighbours": 2}
WRITE, ATTEND, MERGE = 1, 2, 4
"""Phases of a call of `attend`, as bits."""
BLOCK = 64
"""Slots of a block of attention, as in segments.c."""
PANEL = 16
"""Outputs that are interleaved in a linear layer's packed weights."""
TILE, DEEP = 16, 32
"""Rows of an AMX tile, and the number of bfloat16s that one product of tiles sums over."""
_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "parallel_fn": ctypes.c_void_p}


def _read_structs(header: str) -> dict[str, type[ctypes.Structure]]:
    """Return the structures that a header declares, by name. Pointers become addresses, as integers."""
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", header, re.DOTALL):
        fields = []
        for kind, names in re.findall(r"(?:const )?(?:struct )?(\w+) ([^;]+);", body):
            for field in re.split(r",\s*", names):
                pointer = field.startswith("*")
                fields.append((field.lstrip("*"), ctypes.c_void_p if pointer else {**_TYPES, **structs}[kind]))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


_HEADER = re.sub(r"/\*.*?\*/", "", Path(__file__).with_name("native.h").read_text(), flags=re.DOTALL)
LAYOUT = int(_HEADER.partition("#define LAYOUT ")[2].split()[0])
"""Version of the structures."""
_STRUCTS = _read_structs(_HEADER)
PlanStruct, LayerStruct = _STRUCTS["plan"], _STRUCTS["layer"]
LinearStruct, ProductStruct = _STRUCTS["linear"], _STRUCTS["product"]
DecoderStruct, PassStruct, DrawingStruct = _STRUCTS["decoder"], _STRUCTS["pass"], _STRUCTS["drawing"]
STRUCTS = (PlanStruct, LayerStruct, LinearStruct, ProductStruct, DecoderStruct, PassStruct, DrawingStruct)
"""In the order in which the library reports their sizes."""
