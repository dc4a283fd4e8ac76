"""Text of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.models import LoadedModel

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Adds up the tokens of one message and tells what each adds to its text.

    A character may take several tokens: its text comes with the last of them. Special tokens add nothing, unless
    `special` says so.
    """

    def __init__(self, model: LoadedModel, *, special: bool = False) -> None:
        self._model = model
        self._special = special
        self._tokens: list[int] = []
        """From the last one on that said something by itself: it decides the spacing of what follows."""
        self._shown = ""
        """What has been told of their text."""
        self.whole = True
        """Whether no character is incomplete."""

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        text = self._model.decode(self._tokens, special=self._special)
        whole = text.rstrip(_INCOMPLETE)
        self.whole = whole == text
        added = whole[len(self._shown) :]
        if not added:
            return ""
        self._shown = whole
        last = self._model.decode(self._tokens[-1:], special=self._special)
        if self.whole and _INCOMPLETE not in last:
            self._tokens, self._shown = self._tokens[-1:], last
        return added


class TextStop:
    """Watches the text of one answer for any of some texts to stop at."""

    def __init__(self, model: LoadedModel, texts: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(model)
        self._texts = texts
        self._longest = max(len(text) for text in texts)
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        """Add the next token; whether one of the texts is complete with it."""
        added = self._detokenizer.add(token)
        seen = self._tail + added
        self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else ""
        return any(text in seen for text in self._texts)


class TextEnd:
    """Watches whether the text of one answer, with special tokens or without, ends with a given one.

    With `lines`, the token that completes it may go on with ends of lines: many tokenizers write `>` and those that
    follow as one.
    """

    def __init__(self, model: LoadedModel, text: str, *, special: bool = False, lines: bool = False) -> None:
        self.behind = ""
        """The ends of lines that the last token has."""
        self._detokenizer = Detokenizer(model, special=special)
        self._text = text
        self._lines = lines
        self._tail = ""

    def complete(self, token: int) -> bool:
        """Add the next token; whether the text ends with it, and with no part of another character."""
        seen = self._tail + self._detokenizer.add(token)
        bare = seen.rstrip("\r\n") if self._lines and not seen.endswith(self._text) else seen
        self.behind = seen[len(bare) :]
        self._tail = seen[-len(self._text) :]
        return self._detokenizer.whole and bare.endswith(self._text)
