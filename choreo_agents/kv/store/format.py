"""KV as it is written: keys and values, what they are of, and a seal over both that nobody can make without the key."""

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
from choreo_agents.kv.store.key import FileKey
from choreo_agents.kv.tiers import HostKV, shapes_of

_HEADER_BYTES, _TOKEN_BYTES = 1 << 22, 16
"""Of what a file says of itself, at most: by itself, its parents' names included, and for each token."""
Written = tuple[dict[str, str], dict[str, Tensor]]
"""What a file says of itself, and its tensors."""


class UnusableFileError(Exception):
    """Why a file is passed over."""


def sealed(key: FileKey, kv: HostKV, seal: bytes) -> Written:
    """A message's KV as it is written.

    Args:
        key: What it is of.
        kv: Keys and values.
        seal: The key of the seal.
    """
    tensors = kv.tensors()
    about = key.written() | {"native_offset": str(key.native_offset)}
    return about | {"seal": seal_of(seal, about, tensors)}, tensors


def opened(written: Written, key: FileKey, geometry: KVGeometry, seal: bytes) -> tuple[HostKV, int]:
    """A message's KV, and the position that it was encoded at, of what `sealed` wrote.

    Args:
        written: What a file says of itself, and its tensors.
        key: What is asked for.
        geometry: The model's KV shape.
        seal: The key of the seal.

    Raises:
        UnusableFileError: It holds anything else, or was sealed with another key.
    """
    about, tensors = dict(written[0]), written[1]
    given, at = about.pop("seal", ""), about.get("native_offset", "")
    shapes = shapes_of(geometry, key.length)
    if {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} != shapes:
        raise UnusableFileError("holds other keys and values")
    if not at.isdecimal() or about | key.written() != about:
        raise UnusableFileError("is of another message")
    if not (given.isascii() and hmac.compare_digest(given, seal_of(seal, about, tensors))):
        raise UnusableFileError("was changed, or sealed with another key")
    return HostKV(tensors["keys"], tensors["values"]), int(at)


def kv_bytes(key: FileKey, geometry: KVGeometry) -> int:
    """Of a message's keys and values."""
    return geometry.bytes_per_token * key.length


def most_bytes(key: FileKey, geometry: KVGeometry) -> int:
    """Of a file of theirs, with what it says of itself; no larger one is read."""
    return kv_bytes(key, geometry) + _HEADER_BYTES + _TOKEN_BYTES * key.length


def seal_of(key: bytes, about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A keyed checksum over what a file says of itself and all bytes of its tensors."""
    code = hashlib.blake2b(json.dumps(dict(about), sort_keys=True).encode(), key=key, digest_size=16)
    for name in sorted(tensors):
        code.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return code.hexdigest()


def in_bytes(written: Written) -> bytes:
    """The bytes of a file."""
    data: bytes = save(written[1], written[0])
    return data


def parsed(data: bytes) -> Written:
    """What the bytes of a file hold.

    Raises:
        UnusableFileError: Nothing that can be read.
    """
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = {str(name): str(value) for name, value in header.get("__metadata__", {}).items()}
        return about, load(data)
    except (SafetensorError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UnusableFileError("is cut short or damaged") from error
