"""Chat turns as self-contained spans, derived from a tokenizer's own chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2.exceptions import TemplateError

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.models.framed import FramedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["system", "user", "assistant"]
_WORDS = "\u241fwords\u241f"
"""Stands for a message's words while the template is taken apart."""
_INSTRUCTION = "\u241finstruction\u241f"
_NAME = "\u241fname\u241f"


@dataclass(frozen=True)
class TurnFormat:
    """What a template puts around a message's words."""

    plain: str
    """All before the words of a nameless turn."""
    named: str | None
    """The same with a mark for the speaker's name; None if the template ignores names."""
    after: str

    def opening(self, name: str | None) -> FramedText:
        """All before the words; the speaker's name stands in it, as the template writes it or as `name: `."""
        if name is None:
            return FramedText.frame(self.plain)
        before, *behind = [self.plain, ": "] if self.named is None else self.named.split(_NAME)
        opening = FramedText.frame(before)
        for text in behind:
            opening += FramedText.words(name) + FramedText.frame(text)
        return opening


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes chat turns, each as a span of its own.

    The root of every view is the begin-of-sequence text with the public system turn, if any.
    """

    bos: str
    system: TurnFormat
    user: TurnFormat
    assistant: TurnFormat

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """Take a tokenizer's chat template apart; plain `Role: words` lines where it has none.

        Raises:
            UnsupportedModelError: The template rewrites earlier messages when another follows.
        """
        bos = str(tokenizer.bos_token or "")
        if tokenizer.chat_template is None:
            system, user, assistant = (TurnFormat(f"{role}: ", None, "\n") for role in ("System", "User", "Assistant"))
            return cls(bos, system, user, assistant)
        template = _Template(tokenizer, bos)
        question = {"role": "user", "content": "u"}
        instruction = {"role": "system", "content": _INSTRUCTION}
        try:
            system = template.turn([instruction], "system")
            user = template.turn([instruction], "user")
            assistant = template.turn([instruction, question], "assistant")
        except (TemplateError, _FoldedError):
            # Some templates refuse system turns, others write them into the user's: then they come as the user's.
            system = user = template.turn([question, {"role": "assistant", "content": "a"}], "user")
            assistant = template.turn([question], "assistant")
            return cls(template.start("user", user), system, user, assistant)
        return cls(template.start("system", system), system, user, assistant)

    def root(self, system: str | None) -> FramedText:
        """The public root: begin of sequence, and the public system turn if there is one."""
        return FramedText.frame(self.bos) + (self.turn("system", system) if system else FramedText())

    def turn(self, role: Role, words: str, name: str | None = None) -> FramedText:
        """A whole turn. What words and name say is text, whatever it looks like: only its frame has control tokens."""
        turn = {"system": self.system, "user": self.user, "assistant": self.assistant}[role]
        return turn.opening(name) + FramedText.words(words) + FramedText.frame(turn.after)

    def header(self, name: str | None) -> FramedText:
        """What a decode of an assistant turn starts with.

        A trailing space is left to the first word, where tokenizers expect it.
        """
        return self.assistant.opening(name).rstrip(" ")

    def start(self, role: Role) -> str:
        """What a nameless turn starts with, without the space before its first word."""
        return {"system": self.system, "user": self.user, "assistant": self.assistant}[role].plain.rstrip(" ")

    @property
    def turn_end(self) -> str:
        """What closes an assistant turn."""
        return self.assistant.after


class _FoldedError(Exception):
    """The template writes the system's words into another turn."""


class _Template:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, bos: str) -> None:
        self.tokenizer = tokenizer
        self.bos = bos

    def turn(self, before: list[dict[str, Any]], role: Role) -> TurnFormat:
        """The text that the template adds for one more message, split at its words."""
        plain = self._added(before, {"role": role, "content": _WORDS})
        named = self._added(before, {"role": role, "content": _WORDS, "name": _NAME})
        opening, _, after = plain.partition(_WORDS)
        return TurnFormat(opening, named.partition(_WORDS)[0] if _NAME in named else None, after)

    def start(self, role: Role, turn: TurnFormat) -> str:
        """What the template writes before a first turn that it does not write before a later one."""
        first = self._render([{"role": role, "content": _WORDS}])
        later = f"{turn.plain}{_WORDS}{turn.after}"
        if first.endswith(later):
            return first.removesuffix(later)
        return self.bos if first.startswith(self.bos) and not later.startswith(self.bos) else ""

    def _added(self, before: list[dict[str, Any]], message: dict[str, Any]) -> str:
        whole = self._render([*before, message])
        prefix = self._render(before) if before else self.bos if whole.startswith(self.bos) else ""
        added = whole.removeprefix(prefix)
        if _INSTRUCTION in added:
            raise _FoldedError
        if not whole.startswith(prefix) or _WORDS not in added:
            raise UnsupportedModelError(
                "the chat template rewrites earlier messages when another follows: "
                "its turns cannot be encoded as spans of their own"
            )
        return added

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
