"""Text as it is shown piece by piece: the pieces add up to what is said, without space around it or a turn's end."""

from __future__ import annotations

from choreo_agents.engine import Thinking
from choreo_agents.models import FramedText, LoadedModel


class ShownText:
    """Of one message: holds back what may turn out to be no part of it, and nothing else.

    What a piece costs depends on the piece and on `ending`, not on what was shown before.

    Args:
        ending: Text that may follow and is not shown: what ends a turn, or thoughts.
    """

    def __init__(self, ending: str = "") -> None:
        self._ending = ending
        self._shown: list[str] = []
        self._spaces: list[str] = []
        """What has come since the last word, ..."""
        self._tail = ""
        """... and then may begin the ending."""

    def add(self, text: str) -> str:
        """What can be shown of all that has come and was not yet shown, with the next piece; empty: nothing."""
        whole = self._tail + text
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
        """The longest end of a text that the ending may begin with."""
        for have in range(min(len(self._ending), len(text)), 0, -1):
            if text.endswith(self._ending[:have]):
                return self._ending[:have]
        return ""


def shown_thoughts(thinking: Thinking | None, model: LoadedModel) -> ShownText:
    """Thoughts as they are shown: without what ends them, of which control tokens have no text."""
    end = "" if thinking is None else thinking.end
    return ShownText(model.decode(model.encode(FramedText.frame(end)), special=False) if end else "")
