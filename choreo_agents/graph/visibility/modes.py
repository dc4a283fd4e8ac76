"""Visibility modes: what a reader has of a source. Whoever wants to know asks the mode; nobody asks for its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from choreo_agents.errors import VisibilityError

ModeName = Literal["private", "shared", "reencoded"]
Channel = Literal["encoding", "words"]
"""How a private text can reach a reader: through KV that attended to it, or through words decoded from it that were
encoded again or routed on."""
Presence = Literal["text"] | Channel
"""How a node has a context: it says the very text; it attends to KV of it, or that attended to it; it has words that
may have been decoded from it."""

_HOPS = ("own", "state", "called")
"""What stands in an audit's paths where no rule led on."""


@dataclass(frozen=True, repr=False)
class VisibilityMode:
    """What a reader has of a source.

    Three are known by name: `shared`, `reencoded` and `private`. Make others as you need them, and give them wherever a
    mode is declared: `visibility=VisibilityMode("first sentence", "words", reword=first_sentence)`.

    Raises:
        VisibilityError: Its name cannot be drawn, or it re-words, or promises to keep out, what it shows otherwise.
    """

    name: str
    """On edges, in reports and in errors: words."""
    attends_to: Literal["encoding", "words", "nothing"]
    """What the reader attends to: the source's own encoding, and with it all that this attended to; a fresh encoding of
    the source's words; nothing."""
    reword: Callable[[str], str] | None = None
    """Makes of a message's words those that are encoded for the reader: a summary, a redaction. It is called on the
    event loop, and must say the same for the same words. What it leaves of a private text nobody can prove: audits take
    it for the text. None: the words as they are."""
    keeps_out: bool = False
    """Whether no encoding that descends from the source reaches the reader through others either: a promise that
    audits and calls hold the graph to."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w '-]*", self.name):
            raise VisibilityError(f"a visibility mode is named by words, which stand on edges, not by {self.name!r}")
        if self.name in _HOPS:
            raise VisibilityError(f"{self.name!r} says in an audit how else a text gets on: give the mode another name")
        if self.attends_to not in ("encoding", "words", "nothing"):
            raise VisibilityError(
                f"mode {self.name!r} must say that its reader attends to 'encoding', 'words' or 'nothing', not to "
                f"{self.attends_to!r}"
            )
        if self.reword is not None and not self.encodes_again:
            raise VisibilityError(f"mode {self.name!r} re-words what is not encoded again: attend to 'words'")
        if self.keeps_out and self.shows:
            raise VisibilityError(f"mode {self.name!r} cannot both show a source and keep it out")

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def shows(self) -> bool:
        """Whether the reader has anything of the source in its view."""
        return self.attends_to != "nothing"

    @property
    def hands_on_encodings(self) -> bool:
        """Whether the reader attends to the source's own encodings."""
        return self.attends_to == "encoding"

    @property
    def encodes_again(self) -> bool:
        """Whether the reader attends to a fresh encoding of the source's words."""
        return self.attends_to == "words"

    def opens(self, presence: Presence) -> tuple[Channel, ...]:
        """The channels through which what its source has reaches the reader.

        A fresh encoding of a text is both: KV of it, and its words.
        """
        if not self.shows:
            return ()
        if presence == "words":
            return ("words",)
        if self.hands_on_encodings:
            return ("encoding",)
        return ("encoding", "words") if presence == "text" else ("words",)

    def narrowed(self, to: VisibilityMode) -> VisibilityMode | None:
        """What it is for a message that a `send` hands on as `to`; None: that would be more than it shows."""
        if not self.shows or not to.shows or (to.hands_on_encodings and not self.hands_on_encodings):
            return None
        return to if self.hands_on_encodings and not to.hands_on_encodings else self

    def says(self, words: str) -> str:
        """A message's words as the reader gets them.

        Raises:
            VisibilityError: They are re-worded to something that is no text.
        """
        said = words if self.reword is None else self.reword(words)
        if not isinstance(said, str):
            raise VisibilityError(f"mode {self.name!r} must make words of words, not {type(said).__name__}")
        return said


SHARED = VisibilityMode("shared", "encoding")
REENCODED = VisibilityMode("reencoded", "words")
PRIVATE = VisibilityMode("private", "nothing", keeps_out=True)
UNSEEN = VisibilityMode("unseen", "nothing")
"""Not in the view; of what reaches the reader through others nothing is promised."""
_NAMED = {mode.name: mode for mode in (PRIVATE, SHARED, REENCODED)}

Mode = ModeName | VisibilityMode
"""A mode as it is declared: by name, or itself."""


def mode_of(spelling: str | VisibilityMode) -> VisibilityMode:
    """The mode that is meant.

    Raises:
        VisibilityError: There is none of that name, or another.
    """
    if isinstance(spelling, VisibilityMode):
        if _NAMED.get(spelling.name, spelling) != spelling:
            raise VisibilityError(f"there is another visibility {spelling.name!r}: give yours a name of its own")
        return spelling
    known = _NAMED.get(spelling) if isinstance(spelling, str) else None
    if known is None:
        names = ", ".join(map(repr, _NAMED))
        raise VisibilityError(f"there is no visibility {spelling!r}: use one of {names}, or a VisibilityMode")
    return known
