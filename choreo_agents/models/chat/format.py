"""Writes chat turns as self-contained spans, in the format of one model's chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from choreo_agents.models.chat.tools.format import ToolsFormat
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from collections.abc import Callable

Role = Literal["system", "user", "assistant"]
NAME = "\u241fname\u241f"
"""Placeholder of the speaker's name in rendered templates."""


@dataclass(frozen=True)
class TurnFormat:
    """The text that a template puts around a message."""

    plain: str
    """Text before the message in a turn without a name."""
    named: str | None
    """The same with the placeholder `NAME`; None if the template ignores names."""
    after: str
    trims: bool = False
    """Whether the template strips blanks around the message."""

    def opening(self, name: str | None) -> PromptText:
        """Return the text before the message, with the speaker's name as the template writes it, else as `name: `."""
        if name is None:
            return PromptText.special(self.plain)
        return PromptText.filled(f"{self.plain}{NAME}: " if self.named is None else self.named, {NAME: name})

    def around(self, words: str, name: str | None = None) -> PromptText:
        """Return the whole turn of a message."""
        text = PromptText.plain(words.strip() if self.trims else words)
        return self.opening(name) + text + PromptText.special(self.after)


@dataclass(frozen=True)
class ThoughtsFormat:
    """The format of a model's thoughts before its answer."""

    header: str
    """Text before the thoughts."""
    close: str
    """Text between the thoughts and the answer."""
    unthinking: str
    """The header of an answer without thoughts."""
    usual: bool
    """Whether the model thinks by default."""
    kept: bool
    """Whether the template shows the thoughts of earlier turns."""

    @property
    def end(self) -> str:
        """The mark that ends the thoughts: `close`, stripped."""
        return self.close.strip()


@dataclass(frozen=True)
class ChatFormat:
    """The chat format of one model, whose turns are self-contained spans (see `chat_format`).

    The root of every view is the begin-of-sequence text with the shared system turn, if any.
    """

    bos: str
    """Text that every conversation starts with."""
    system: TurnFormat
    """The turn of instructions that come first; without one, they are in the user's turn (see `leads`)."""
    user: TurnFormat
    assistant: TurnFormat
    """An answer as the template writes earlier ones."""
    later: TurnFormat | None = None
    """The turn of instructions that come after other turns; None: a user's turn."""
    answer: str | None = None
    """Header of the answer that the model is to write; None: the same as before earlier answers."""
    default_system: str = ""
    """Text that the template writes where there are no instructions."""
    merges: str | None = None
    """Separator of messages in one user's turn, if user and model must alternate; None: each message has a turn."""
    leads: bool = False
    """Whether instructions are in the first user's turn, before the message."""
    thoughts: ThoughtsFormat | None = None
    """None: the template has no thinking."""
    tools: ToolsFormat | None = None
    """None: the template has no tools."""
    whole: Callable[..., PromptText | None] | None = field(default=None, repr=False, compare=False)
    """Renders whole conversations as the template does, see `WholeConversation`; None: there is no template."""

    def root(self, system: str | None) -> PromptText:
        """Return the root of all views: begin of sequence, and the shared system turn if there is one."""
        return PromptText.special(self.bos) + (self.turn("system", system) if system else PromptText())

    def turn(self, role: Role, words: str, name: str | None = None, *, later: bool = False) -> PromptText:
        """Return a whole turn; message and name are plain text, so that only the template's text has control tokens.

        Args:
            role: The speaker's role.
            words: The message.
            name: The speaker's name.
            later: Whether these are instructions after other instructions.
        """
        return self._format(role, later).around(words, name)

    def part(self, words: str, name: str | None = None) -> PromptText:
        """Return one message of a user's turn that holds several, without the template's text around it."""
        return TurnFormat("", None, "", self.user.trims).around(words, name)

    def header(self, name: str | None, *, thinking: bool = False) -> PromptText:
        """Return the header that a decode of an assistant turn starts with.

        A trailing space is left to the first word, where tokenizers expect it.

        Args:
            name: The speaker. Not written before thoughts: it precedes the answer that follows them.
            thinking: Whether thoughts come first, which `Decode(thinking=...)` must then separate from the answer.
                Ignored by a model that has none.
        """
        if self.thoughts is not None and thinking:
            return PromptText.special(self.thoughts.header).rstrip(" ")
        plain = self.answer if self.thoughts is None else self.thoughts.unthinking
        if plain is None or plain == self.assistant.plain:
            return self.assistant.opening(name).rstrip(" ")
        return TurnFormat(plain, None, "").opening(name).rstrip(" ")

    def start(self, role: Role) -> str:
        """Return the opening of a turn without a name, without the space before its first word."""
        return self._format(role, False).plain.rstrip(" ")

    @property
    def turn_end(self) -> str:
        """Text that closes an assistant turn."""
        return self.assistant.after

    def _format(self, role: Role, later: bool) -> TurnFormat:
        if role == "system" and (self.leads or later):
            return self.user if self.leads or self.later is None else self.later
        form: TurnFormat = getattr(self, role)
        return form
