"""Whitespace rules of PML.

1. Between words, any run of blanks, tabs and line breaks is one blank; with an empty line in it, it is a paragraph
   break (two line breaks). So documents can be indented and wrapped freely, as in HTML.
2. CDATA sections, the content of elements with `xml:space="preserve"`, and files included with `src` (except for a line
   break at their end) are verbatim.
3. The whitespace of rule 1 belongs to the text that follows it, across tags: to the text of a module that starts there,
   or of each member of a union. This is how tokenizers split words. A module that is not imported takes it along.
4. Whitespace is dropped at the start and the end of a schema and of a turn, and around turns, where the chat template
   defines the text; and at the end of a prompt's text.
5. One blank right before a parameter, even a verbatim one, belongs to the argument: its first word is encoded with it,
   in its slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from choreo_agents.pml.markup.syntax import SchemaNode, SourcePlace, Text

BLANKS = " \t\n"
"""A carriage return is not among them: XML turns all but those written as `&#13;` into line breaks."""
PARAGRAPH = "\n\n"
_RUN = re.compile(f"[{BLANKS}]+")


@dataclass
class Flow:
    """State of whitespace while a document is read from start to end.

    Args:
        at_start: Whether there is no text before, so that whitespace is dropped.
        owed: Whitespace with which the next text starts.
    """

    at_start: bool
    owed: str = ""

    def text(self, text: str, *, verbatim: bool) -> str:
        """Return a text with the whitespace that belongs to it; empty if it is only whitespace."""
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
        """Take the blank that belongs to a parameter (rule 5) off the text before it, and return it."""
        owed = self._take()
        if owed:
            append_text(before, owed, place)
        last = before[-1] if before else None
        if not isinstance(last, Text) or not last.text.endswith(" "):
            return ""
        before[-1:] = [Text(last.text[:-1], last.place)] if last.text[:-1] else []
        return " "

    def turn(self) -> None:
        """Drop whitespace at the start or end of a turn."""
        self.owed, self.at_start = "", True

    def owe(self, blanks: str) -> None:
        """Keep whitespace for the text that follows."""
        if not self.at_start:
            self.owed = max(self.owed, _break(blanks), key=len)

    def _take(self) -> str:
        owed, self.owed, self.at_start = self.owed, "", False
        return owed


def append_text(nodes: list[Any], text: str, place: SourcePlace) -> None:
    """Append text, joined to a text right before it."""
    last = nodes[-1] if nodes else None
    if text and isinstance(last, Text):
        nodes[-1] = Text(last.text + text, last.place)
    elif text:
        nodes.append(Text(text, place))


def _break(blanks: str) -> str:
    return "" if not blanks else PARAGRAPH if blanks.count("\n") > 1 else " "
