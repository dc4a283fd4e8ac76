"""Sample conversation of three agents, with the view of each before it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PUBLIC = "Three of you settle a question. Answer in one sentence."
SEPARATOR = "\n\n"
"""Separator of texts that are joined in one message."""
QUESTION = "A bat and a ball cost eleven coins, the bat ten more than the ball. What does the ball cost?"


@dataclass(frozen=True)
class TalkTurn:
    """An answer of an agent."""

    name: str
    words: str
    thoughts: str
    """Thoughts before the answer, if the model thinks."""


ANN = TalkTurn("Ann", "The ball costs one coin.", "Eleven less ten is one.")
BOB = TalkTurn("Bob", "Half a coin: the bat costs ten and a half.", "Ten more than one is eleven, not ten.")
CAROL = TalkTurn("Carol", "Bob is right, it is half a coin.", "Half and ten and a half are eleven.")

ANN_AGAIN = TalkTurn("Ann", "Half a coin it is.", "Bob has counted, and I have not.")


@dataclass(frozen=True)
class View:
    """The view of one agent."""

    title: str
    reader: str
    """Name of the agent."""
    turns: Sequence[TalkTurn] = ()
    """Earlier answers, in the order of the view."""
    encodes_again: bool = False
    """Whether its edges encode others' answers again, as users' messages; if not, the view shares their KV."""
    instructions: Sequence[str] = ()
    """The instructions of all agents and the reader's own; or none."""
    open: bool = True
    """Whether the reader is to answer next; if not, the conversation is over."""

    @property
    def edges(self) -> str:
        """Name of the visibility mode of its edges."""
        return "reencoded" if self.encodes_again else "shared"


def views(*, encodes_again: bool = False) -> list[View]:
    """Return the view before each answer, the view of the whole conversation, and one without instructions."""
    instructions = {
        name: (PUBLIC, f"You are {name}. {duty}")
        for name, duty in {"Ann": "Answer first.", "Bob": "Doubt what you hear.", "Carol": "Decide."}.items()
    }
    return [
        View("Ann answers", "Ann", (), encodes_again, instructions["Ann"]),
        View("Bob reads Ann", "Bob", (ANN,), encodes_again, instructions["Bob"]),
        View("Carol reads both", "Carol", (ANN, BOB), encodes_again, instructions["Carol"]),
        View("Ann speaks again", "Ann", (ANN, BOB, CAROL), encodes_again, instructions["Ann"]),
        View("when all is said", "Ann", (ANN, BOB, CAROL, ANN_AGAIN), encodes_again, instructions["Ann"], open=False),
        View("without instructions", "Ann", (), encodes_again),
    ]
