"""Pieces of a schema, encoded by engines of tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from choreo_agents import Engine, Schema
from choreo_agents.kv.tiers import HostKV
from choreo_agents.pml.compiler import CompiledSchema, SchemaPiece
from choreo_agents.pml.library import EncodedSchema

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
PLAIN = Schema.from_text("<schema name='s'>Hi.</schema>")


def tokens(seed: int, count: int = 32) -> tuple[int, ...]:
    """Drawn tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 360) for _ in range(count))


def text(key: str, words: tuple[int, ...], start: int, *parents: str) -> SchemaPiece:
    """A piece of its own module."""
    return SchemaPiece(key, (key,), words, start, parents, None, True, False)


ROOT, LEFT, RIGHT = (
    text("root", tokens(0), 0),
    text("left", tokens(1), 32, "root"),
    text("right", tokens(2), 64, "root"),
)
INNER = text("inner", tokens(3), 100, "root", "left")
ALL = [ROOT, LEFT, RIGHT, INNER]
KEYS = [piece.key for piece in ALL]

MakeEncoded = Callable[..., tuple[Engine, EncodedSchema]]


def encoded_by(engine: Engine, pieces: Sequence[SchemaPiece] = ALL) -> EncodedSchema:
    """The pieces, encoded by an engine."""
    compiled: Any = CompiledSchema(PLAIN, {piece.key: piece for piece in pieces}, None, (), {})  # type: ignore[arg-type]
    return EncodedSchema(engine, compiled)


def make_with(make_engine: Callable[..., Engine]) -> MakeEncoded:
    """Return a function that makes an engine, and the pieces encoded by it."""

    def make(
        folder: Path | None = None, pieces: Sequence[SchemaPiece] = ALL, **options: Any
    ) -> tuple[Engine, EncodedSchema]:
        engine = make_engine(**({"salt": "s", "persist_dir": folder} | options))
        return engine, encoded_by(engine, pieces)

    return make


def kv(engine: Engine, encoded: EncodedSchema, key: str) -> HostKV:
    """The KV of a piece."""
    return engine.kv.read(*encoded.handles([key]))


def same(one: HostKV, other: HostKV) -> bool:
    """Return whether both are the same, bit by bit."""
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def files(folder: Path, suffix: str = ".safetensors") -> list[Path]:
    """The files in a folder."""
    return sorted(folder.rglob(f"*{suffix}"))
