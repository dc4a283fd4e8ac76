"""File format of KV: keys and values, metadata, and a seal (keyed checksum) over both."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.store.key import KVKey
from choreo_agents.kv.tiers import HostKV

_HEADER_BYTES, _TOKEN_BYTES = 1 << 22, 16
"""Upper bound on a file's metadata: bytes in all, including the ids of parents, and per token."""
Written = tuple[dict[str, str], dict[str, Tensor]]
"""Metadata and tensors of a file."""


class UnusableFileError(Exception):
    """A file cannot be used; the message says why."""


def sealed(key: KVKey, kv: HostKV, seal: bytes) -> Written:
    """Return metadata and tensors of a message's KV, as they are written.

    Args:
        key: Key of the message.
        kv: Keys and values.
        seal: Secret key of the seal.
    """
    tensors = kv.tensors()
    about = key.written() | {"native_offset": str(key.native_offset)}
    return about | {"seal": seal_of(seal, about, tensors)}, tensors


def opened(
    written: Written, expected: dict[str, str], tokens: int, geometry: KVGeometry, seal: bytes
) -> tuple[HostKV, int]:
    """Return a message's KV, and the position at which it was encoded, from what `sealed` returned.

    Args:
        written: Metadata and tensors of a file.
        expected: Metadata that it must have, as of `KVKey.written`; the id alone stands for all of it.
        tokens: Number of the message's tokens.
        geometry: Shape of the model's KV.
        seal: Secret key of the seal.

    Raises:
        UnusableFileError: It holds another message, was changed, or was sealed with another key.
    """
    about, tensors = dict(written[0]), written[1]
    given, at = about.pop("seal", ""), about.get("native_offset", "")
    shape = (geometry.layers, geometry.kv_heads, tokens, geometry.head_dim), geometry.dtype
    if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != {"keys": shape, "values": shape}:
        raise UnusableFileError("has KV of another shape or dtype")
    if not at.isdecimal() or about | expected != about:
        raise UnusableFileError("belongs to another message")
    if not (given.isascii() and hmac.compare_digest(given, seal_of(seal, about, tensors))):
        raise UnusableFileError("was changed, or signed with another key")
    return HostKV(tensors["keys"], tensors["values"]), int(at)


def most_bytes(tokens: int, geometry: KVGeometry) -> int:
    """Return the most bytes of a message's file, with metadata; larger files are not read."""
    return (geometry.bytes_per_token + _TOKEN_BYTES) * tokens + _HEADER_BYTES


def seal_of(key: bytes, about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return a keyed checksum (BLAKE2b) over a file's metadata and all bytes of its tensors."""
    code = hashlib.blake2b(json.dumps(dict(about), sort_keys=True).encode(), key=key, digest_size=16)
    for name in sorted(tensors):
        code.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return code.hexdigest()


def in_bytes(written: Written) -> bytes:
    """Serialize metadata and tensors to the bytes of a file."""
    data: bytes = save(written[1], written[0])
    return data


def parsed(data: bytes) -> Written:
    """Parse the bytes of a file.

    Raises:
        UnusableFileError: They are truncated or damaged.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = {str(name): str(value) for name, value in header.get("__metadata__", {}).items()}
        return about, load(data)
    except (SafetensorError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UnusableFileError("is truncated or damaged") from error
