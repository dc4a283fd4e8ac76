"""Where whitespace counts, and to whom it belongs.

1. Between words, any run of blanks, tabs and line breaks is one blank; with an empty line in it, it is a paragraph
   break (two line breaks). So documents can be indented and wrapped as one likes, as in HTML.
2. CDATA sections, what stands inside an element with `xml:space="preserve"`, files included with `src` (but for a line
   break at their end), and texts of schemas built in Python are taken to the letter.
3. The whitespace of rule 1 belongs to what follows it, across tags: to the words of the module that starts there, to
   each member of a union. This is how tokenizers read words. What is left out of a prompt takes it along.
4. It counts for nothing at the start and the end of a schema and of a turn, and around turns, where the chat template
   says what stands there; and at the end of a prompt's text.
5. One blank right before a parameter, also one that is taken to the letter, belongs to the argument: its first word is
   encoded with it, in its slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from choreo_agents.pml.markup.syntax import SchemaNode, SourcePlace, Text

BLANKS = " \t\n"
"""A carriage return is a character like others: XML makes line breaks of those that are not written as `&#13;`."""
PARAGRAPH = "\n\n"
_RUN = re.compile(f"[{BLANKS}]+")


@dataclass
class Flow:
    """Gives whitespace to whom it belongs, while a document is read from its start to its end.

    Args:
        at_start: Whether nothing stands before, so that whitespace counts for nothing.
        owed: What the next words start with.
    """

    at_start: bool
    owed: str = ""

    def text(self, text: str, *, verbatim: bool) -> str:
        """The words of a text, with the whitespace that belongs to them; empty if it has none."""
        if not text:
            return ""
        if verbatim:
            return self._take() + text
        words = text.strip(BLANKS)
        if not words:
            self.owe(text)
            return ""
        before = len(text) - len(text.lstrip(BLANKS))
        self.owe(text[:before])
        settled = self._take() + _RUN.sub(lambda run: _break(run.group()), words)
        self.owe(text[before + len(words) :])
        return settled

    def lead(self, before: list[SchemaNode], place: SourcePlace) -> str:
        """The blank that belongs to a parameter which comes after these nodes."""
        owed = self._take()
        if owed:
            append_text(before, owed, place)
        return lead_of(before)

    def turn(self) -> None:
        """A turn starts or ends here: whitespace around counts for nothing."""
        self.owed, self.at_start = "", True

    def owe(self, blanks: str) -> None:
        """Blanks stand here: they belong to what follows."""
        if not self.at_start:
            self.owed = max(self.owed, _break(blanks), key=len)

    def _take(self) -> str:
        owed, self.owed, self.at_start = self.owed, "", False
        return owed


def append_text(nodes: list[Any], text: str, place: SourcePlace) -> None:
    """Add text to that which stands right before, if any does."""
    last = nodes[-1] if nodes else None
    if text and isinstance(last, Text):
        nodes[-1] = Text(last.text + text, last.place)
    elif text:
        nodes.append(Text(text, place))


def lead_of(before: list[SchemaNode]) -> str:
    """Take the last blank off the text before a parameter (rule 5)."""
    last = before[-1] if before else None
    if not isinstance(last, Text) or not last.text.endswith(" "):
        return ""
    before[-1:] = [Text(last.text[:-1], last.place)] if last.text[:-1] else []
    return " "


def is_settled(text: str, *, at_start: bool) -> bool:
    """Whether a text stays as it is if it is read by rule 1."""
    return text[-1:] not in BLANKS and Flow(at_start).text(text, verbatim=False) == text


def _break(blanks: str) -> str:
    return "" if not blanks else PARAGRAPH if blanks.count("\n") > 1 else " "
