"""Where each message of a view appears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from choreo_agents.errors import InvalidRequestError


@dataclass(frozen=True)
class Placement:
    """Positions of the parents' first tokens and of the new message's."""

    offsets: tuple[int, ...]
    new_offset: int

    def relative(self) -> tuple[int, ...]:
        """The parents' offsets as seen from the new message."""
        return tuple(offset - self.new_offset for offset in self.offsets)

    def end(self, lengths: Sequence[int], new_length: int) -> int:
        """The first position that nothing reaches."""
        ends = [offset + length for offset, length in zip(self.offsets, lengths, strict=True)]
        return max([*ends, self.new_offset + new_length])


def place(lengths: Sequence[int], offsets: Sequence[int | None] | None, new_offset: int | None) -> Placement:
    """Fill in omitted offsets: each follows the end of the parent before it, the first is 0.

    Args:
        lengths: Tokens of each parent.
        offsets: One entry a parent, None where omitted; or None for all.
        new_offset: Of the new message; None puts it after the last parent.

    Raises:
        InvalidRequestError: A wrong number of offsets, or a negative one.
    """
    if offsets is not None and len(offsets) != len(lengths):
        raise InvalidRequestError(f"there are {len(lengths)} parents but {len(offsets)} offsets: give one for each")
    placed: list[int] = []
    following = 0
    for i, length in enumerate(lengths):
        offset = None if offsets is None else offsets[i]
        placed.append(require_position(f"offsets[{i}]", following if offset is None else offset))
        following = placed[-1] + length
    return Placement(tuple(placed), require_position("new_offset", following if new_offset is None else new_offset))


def require_position(name: str, offset: int) -> int:
    """A position that a caller has named; raises `InvalidRequestError` unless it is one."""
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise InvalidRequestError(f"{name} must be a position of 0 or more, not {offset!r}")
    return offset
