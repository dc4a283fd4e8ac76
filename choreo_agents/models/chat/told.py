"""What others tell a model: turns of their own, or parts of one user's turn where users and model must take turns."""

from __future__ import annotations

from typing import Literal, NamedTuple

from choreo_agents.models.chat.format import ChatFormat
from choreo_agents.models.framed import FramedText

Kind = Literal["turn", "part", "lead"]
"""A whole turn, with its frame; a part of a user's turn; or a part that closes itself: nothing stands between it and
what follows. What stands around parts is put in where they are shown."""


class Said(NamedTuple):
    """Something to encode, and as what it stands in a conversation."""

    text: FramedText
    kind: Kind = "turn"


def instructions(words: str, chat: ChatFormat, *, later: bool) -> Said:
    """A system prompt; `later`: one that comes after anything else, and may have no turn of its own there."""
    in_users_turn = chat.leads or (later and chat.later is None)
    if chat.merges is None or not in_users_turn:
        return Said(chat.turn("system", words, later=later))
    return Said(chat.part(words), "part") if later else Said(chat.system.around(words), "lead")


def question(words: str, chat: ChatFormat, name: str | None = None) -> Said:
    """What a user says, or what a model is asked."""
    if chat.merges is None:
        return Said(chat.turn("user", words, name))
    return Said(chat.part(words, name), "part")
