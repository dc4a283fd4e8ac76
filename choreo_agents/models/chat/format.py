"""Chat turns as self-contained spans, as one model's chat template writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from choreo_agents.models.chat.tools.format import ToolsFormat
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Role = Literal["system", "user", "assistant"]
NAME = "\u241fname\u241f"
"""Stands for the speaker's name in what a template writes."""


@dataclass(frozen=True)
class TurnFormat:
    """What a template puts around a message's words."""

    plain: str
    """All before the words of a nameless turn."""
    named: str | None
    """The same with a mark for the speaker's name; None if the template ignores names."""
    after: str
    trims: bool = False
    """Whether the template leaves out blanks around the words."""

    def opening(self, name: str | None) -> PromptText:
        """All before the words; the speaker's name stands in it, as the template writes it or as `name: `."""
        if name is None:
            return PromptText.special(self.plain)
        return PromptText.filled(f"{self.plain}{NAME}: " if self.named is None else self.named, {NAME: name})

    def around(self, words: str, name: str | None = None) -> PromptText:
        """A whole turn."""
        said = PromptText.plain(words.strip() if self.trims else words)
        return self.opening(name) + said + PromptText.special(self.after)


@dataclass(frozen=True)
class ThoughtsFormat:
    """How a model thinks before it answers."""

    header: str
    """All before its thoughts."""
    close: str
    """All between them and the answer."""
    unthinking: str
    """The header of an answer without thoughts."""
    usual: bool
    """Whether the template lets it think if nothing is said about it."""
    kept: bool
    """Whether the template shows a model what it has thought in earlier turns."""

    @property
    def end(self) -> str:
        """What tells that the thoughts are over: `close` without blanks around it."""
        return self.close.strip()


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes chat turns, each as a span of its own (see `chat_format`).

    The root of every view is the begin-of-sequence text with the public system turn, if any.
    """

    bos: str
    """What every conversation starts with."""
    system: TurnFormat
    """Instructions that come first. Where there is no such turn they stand in the user's (see `leads`)."""
    user: TurnFormat
    assistant: TurnFormat
    """As the template writes earlier turns."""
    later: TurnFormat | None = None
    """Instructions that come after other turns; None: as a user's turn."""
    answer: str | None = None
    """The header of an answer of a model that is to speak next; None: what stands before earlier ones."""
    default_system: str = ""
    """What stands in the place of instructions where there are none."""
    merges: str | None = None
    """Between what several others say in one user's turn, where users and model must take turns; None: each of them
    has a turn."""
    leads: bool = False
    """Whether instructions stand in the first user's turn, before its words."""
    thoughts: ThoughtsFormat | None = None
    """None: the template knows of no thoughts."""
    tools: ToolsFormat | None = None
    """None: the template knows of no tools."""
    whole: Callable[..., PromptText | None] | None = field(default=None, repr=False, compare=False)
    """Writes whole conversations as the template does, see `WholeConversation`; None: there is no template."""

    def root(self, system: str | None) -> PromptText:
        """The public root: begin of sequence, and the public system turn if there is one."""
        return PromptText.special(self.bos) + (self.turn("system", system) if system else PromptText())

    def turn(self, role: Role, words: str, name: str | None = None, *, later: bool = False) -> PromptText:
        """A whole turn. What words and name say is text, whatever it looks like: only its frame has control tokens.

        Args:
            role: Whose turn.
            words: What is said.
            name: Who says it.
            later: Whether instructions come after other instructions.
        """
        return self._format(role, later).around(words, name)

    def part(self, words: str, name: str | None = None) -> PromptText:
        """What somebody says within a user's turn that others speak in, too: the frame stands in between."""
        opening = TurnFormat("", None, "").opening(name)
        said = words.strip() if self.user.trims else words
        return opening + PromptText.plain(said)

    def header(self, name: str | None, *, thinking: bool = False) -> PromptText:
        """What a decode of an assistant turn starts with.

        A trailing space is left to the first word, where tokenizers expect it.

        Args:
            name: Who speaks. Not written before thoughts: it stands before the answer that follows them.
            thinking: Whether thoughts come first, which `Decode(thinking=...)` must then tell from the answer. A model
                without any answers at once.
        """
        if self.thoughts is not None and thinking:
            return PromptText.special(self.thoughts.header).rstrip(" ")
        plain = self.answer if self.thoughts is None else self.thoughts.unthinking
        if plain is None or plain == self.assistant.plain:
            return self.assistant.opening(name).rstrip(" ")
        return TurnFormat(plain, None, "").opening(name).rstrip(" ")

    def start(self, role: Role) -> str:
        """What a nameless turn starts with, without the space before its first word."""
        return self._format(role, False).plain.rstrip(" ")

    @property
    def turn_end(self) -> str:
        """What closes an assistant turn."""
        return self.assistant.after

    def _format(self, role: Role, later: bool) -> TurnFormat:
        if role == "system" and (self.leads or later):
            return self.user if self.leads or self.later is None else self.later
        formats: Mapping[Role, TurnFormat] = {
            "system": self.system,
            "user": self.user,
            "assistant": self.assistant,
        }
        return formats[role]
