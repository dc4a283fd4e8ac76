"""Text as it is shown piece by piece: the pieces add up to what is said, without space around it or a turn's end."""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.engine import Thinking
from choreo_agents.models import FramedText, LoadedModel


class ShownText:
    """Of one message: holds back what may turn out to be no part of it, and nothing else.

    What a piece costs depends on the piece and on what may follow, not on what was shown before.

    Args:
        ending: Text that may follow and is not shown: what ends a turn, or thoughts.
        stops: Texts with which it is over: neither they are shown nor what follows.
    """

    def __init__(self, ending: str = "", stops: Sequence[str] = ()) -> None:
        self._endings, self._stops = (ending, *stops), stops
        self._is_over = False
        self._shown: list[str] = []
        self._spaces: list[str] = []
        """What has come since the last word, ..."""
        self._tail = ""
        """... and then may begin an ending."""

    def add(self, text: str) -> str:
        """What can be shown of all that has come and was not yet shown, with the next piece; empty: nothing."""
        whole = "" if self._is_over else before_stop(self._tail + text, self._stops)
        self._is_over = self._is_over or whole != self._tail + text
        self._tail = self._begun(whole)
        said = whole[: len(whole) - len(self._tail)]
        words = said.rstrip()
        spaces = said[len(words) :]
        if not words:
            self._spaces.append(spaces)
            return ""
        words = "".join([*self._spaces, words])
        self._spaces = [spaces]
        return self._show(words if self._shown else words.lstrip())

    def rest(self, whole: str) -> str:
        """What is still to be shown, given all that is said; empty if the pieces so far do not begin it."""
        shown = "".join(self._shown)
        return self._show(whole.removeprefix(shown)) if whole.startswith(shown) else ""

    def __bool__(self) -> bool:
        """Whether anything was shown."""
        return bool(self._shown)

    def _show(self, text: str) -> str:
        self._shown += [text] if text else []
        return text

    def _begun(self, text: str) -> str:
        """The longest end of a text that an ending begins with."""
        begun = (_begun(text, ending) for ending in self._endings)
        return max(begun, key=len, default="")


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of these that stands in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _begun(text: str, ending: str) -> str:
    """The longest end of a text that this ending begins with."""
    for have in range(min(len(ending), len(text)), 0, -1):
        if text.endswith(ending[:have]):
            return ending[:have]
    return ""


def shown_thoughts(thinking: Thinking | None, model: LoadedModel) -> ShownText:
    """Thoughts as they are shown: without what ends them, of which control tokens have no text."""
    end = "" if thinking is None else thinking.end
    return ShownText(model.decode(model.encode(FramedText.frame(end)), special=False) if end else "")
