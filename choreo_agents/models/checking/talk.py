"""A conversation of three agents, and what each of them reads of it when it is to speak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PUBLIC = "Three of you settle a question. Answer in one sentence."
PARTED = "\n\n"
"""Between two things that are said as one."""
QUESTION = "A bat and a ball cost eleven coins, the bat ten more than the ball. What does the ball cost?"


@dataclass(frozen=True)
class TalkTurn:
    """What an agent has said."""

    name: str
    words: str
    thoughts: str
    """Before it spoke, if its model thinks."""


ANN = TalkTurn("Ann", "The ball costs one coin.", "Eleven less ten is one.")
BOB = TalkTurn("Bob", "Half a coin: the bat costs ten and a half.", "Ten more than one is eleven, not ten.")
CAROL = TalkTurn("Carol", "Bob is right, it is half a coin.", "Half and ten and a half are eleven.")

ANN_AGAIN = TalkTurn("Ann", "Half a coin it is.", "Bob has counted, and I have not.")


@dataclass(frozen=True)
class View:
    """What one agent reads."""

    title: str
    reader: str
    """Its name."""
    said: Sequence[TalkTurn] = ()
    """In the order of the view."""
    encodes_again: bool = False
    """Whether its edges encode what others say among what it reads; else it stands as it was encoded."""
    instructions: Sequence[str] = ()
    """Those of all agents, and the reader's own; or none."""
    open: bool = True
    """Whether the reader is to speak next; else the conversation is over."""

    @property
    def edges(self) -> str:
        """What such edges are called."""
        return "reencoded" if self.encodes_again else "shared"


def views(*, encodes_again: bool = False) -> list[View]:
    """The conversation, speaker by speaker; its end, and what is read where nobody gives instructions."""
    told = {
        name: (PUBLIC, f"You are {name}. {duty}")
        for name, duty in {"Ann": "Answer first.", "Bob": "Doubt what you hear.", "Carol": "Decide."}.items()
    }
    return [
        View("Ann answers", "Ann", (), encodes_again, told["Ann"]),
        View("Bob reads Ann", "Bob", (ANN,), encodes_again, told["Bob"]),
        View("Carol reads both", "Carol", (ANN, BOB), encodes_again, told["Carol"]),
        View("Ann speaks again", "Ann", (ANN, BOB, CAROL), encodes_again, told["Ann"]),
        View("when all is said", "Ann", (ANN, BOB, CAROL, ANN_AGAIN), encodes_again, told["Ann"], open=False),
        View("without instructions", "Ann", (), encodes_again),
    ]
