"""ctypes structures of native.h. The owner of a structure must keep alive what its pointers refer to."""

from __future__ import annotations

import ctypes

LAYOUT = 4
"""Version of the structures, as in native.h."""
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


class PlanStruct(ctypes.Structure):
    """Attention of a step in the layers of one kind."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "heads", "kv_heads", "dim", "chunks", "pairs")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads", "pairing", "turned_from", "half")),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("chunk", "pair", "first_part", "part", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("outs", "tops", "totals", "scratch")),
        ("scratch_each", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
    )


class LayerStruct(ctypes.Structure):
    """Queries, keys and values of one layer."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("pool_head", "pool_slot")),
        *((name, ctypes.c_void_p) for name in ("new_keys", "new_values")),
        *((name, ctypes.c_int64) for name in ("new_key_token", "new_key_head")),
        *((name, ctypes.c_int64) for name in ("new_value_token", "new_value_head")),
        *((name, ctypes.c_void_p) for name in ("slots", "out", "sinks")),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class LinearStruct(ctypes.Structure):
    """A linear layer's weights."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "dtype")),
    )


class ProductStruct(ctypes.Structure):
    """Product of rows and a linear layer's weights."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("linear", "x", "out")),
        *((name, ctypes.c_int64) for name in ("x_row", "out_row")),
        *((name, ctypes.c_int32) for name in ("rows", "adds", "threads")),
        *((name, ctypes.c_void_p) for name in ("parallel", "scratch")),
        ("scratch_each", ctypes.c_int64),
    )


class DecoderStruct(ctypes.Structure):
    """A decoder layer's weights."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "inner_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_float) for name in ("eps", "query_eps")),
    )


class PassStruct(ctypes.Structure):
    """A forward pass through decoder layers."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "width", "inner", "threads")),
        *((name, ctypes.c_void_p) for name in ("parallel", "x", "normed", "qkv", "attended", "gated")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "scratch")),
        ("scratch_each", ctypes.c_int64),
    )


class DrawingStruct(ctypes.Structure):
    """A draw of tokens."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "asked", "told")),
        ("row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("draws", "words", "threads")),
        *((name, ctypes.c_float) for name in ("margin", "lost", "alike", "least", "lowest", "highest")),
        ("parallel", ctypes.c_void_p),
    )


STRUCTS = (PlanStruct, LayerStruct, LinearStruct, ProductStruct, DecoderStruct, PassStruct, DrawingStruct)
"""In the order in which the library reports their sizes."""
