"""Turns a prompt into what a model reads: encoded pieces at their places, and tokens that are yet to be encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from choreo_agents.models import LoadedModel
from choreo_agents.pml.compiler import CompiledSchema, PieceKey
from choreo_agents.pml.prompt import Prompt
from choreo_agents.pml.syntax import Path, Role


@dataclass(frozen=True)
class PlacedPiece:
    """An encoded piece in a prompt's view; whole, at the position where it was encoded."""

    key: PieceKey
    offset: int


@dataclass(frozen=True)
class FreshText:
    """Tokens that are encoded with the prompt, in one prefill."""

    tokens: tuple[int, ...]
    offset: int
    role: Role | None
    """Of a turn of the prompt."""
    kind: Literal["argument", "module", "text"]
    """The argument of a parameter, text of a module that is not cached, or the prompt's own text or turn."""
    module: Path
    """Whose argument or text it is; () for the schema's and the prompt's own."""
    confidential: bool
    """Whether that module is confidential."""

    @property
    def end(self) -> int:
        return self.offset + len(self.tokens)


@dataclass(frozen=True)
class Assembly:
    """A prompt as pieces of its schema and fresh tokens; none of them overlap."""

    prompt: Prompt
    cached: tuple[PlacedPiece, ...]
    """In the order of positions. Pieces of slots that have an argument are not among them."""
    fresh: tuple[FreshText, ...]
    """In the order of positions, in which they are encoded: each attends to cached pieces and to those before it."""
    end: int
    """The position after all of them, where an answer starts."""
    cached_tokens: int
    fresh_tokens: int


def compile_prompt(compiled: CompiledSchema, prompt: Prompt, model: LoadedModel) -> Assembly:
    """Place a prompt's imports, arguments and own text (Prompt Cache, section 3.4).

    An argument stands at the start of its slot; text between imports in the gap after what it follows, if it fits there;
    all other text, and turns, at the end, in the order in which they are written.

    Raises:
        PMLError: Arguments longer than their slots, or a prompt longer than the model's context.
        InvalidRequestError: The prompt is another schema's.
    """
    raise NotImplementedError
