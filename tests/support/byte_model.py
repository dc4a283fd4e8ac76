"""A tokenizer whose tokens are bytes, besides some of several bytes: as much of a model as allowed answers need."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from choreo_agents.models import LoadedModel, PromptText


class ByteModel:
    """Encodes in bytes and in the first of its longer tokens; decodes the others too, as a model may choose them.

    Args:
        longer: Tokens of several bytes.
        used: How many of them `encode` knows.
        ends: How many end tokens it has, after all others.
    """

    def __init__(self, longer: Sequence[str | bytes] = (), used: int = 0, ends: int = 1) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + [
            piece.encode() if isinstance(piece, str) else piece for piece in longer
        ]
        self._used = sorted(range(256 + used), key=lambda token: -len(self.pieces[token]))
        first = len(self.pieces)
        self.adapter = SimpleNamespace(end_tokens=tuple(range(first, first + ends)), vocabulary_size=first + ends)

    def encode(self, text: str | PromptText) -> list[int]:
        rest, tokens = str(text).encode(), []
        while rest:
            tokens.append(next(token for token in self._used if rest.startswith(self.pieces[token])))
            rest = rest[len(self.pieces[tokens[-1]]) :]
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        return b"".join(self.pieces[token] for token in tokens if token < len(self.pieces)).decode(errors="replace")

    def loaded(self) -> LoadedModel:
        return cast(LoadedModel, self)
