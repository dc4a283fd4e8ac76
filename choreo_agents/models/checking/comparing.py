"""Sets what agents read beside what the chat template writes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from choreo_agents.models.checking.given import written
from choreo_agents.models.checking.rendering import Rendering
from choreo_agents.models.checking.talk import View

if TYPE_CHECKING:
    from choreo_agents.models.chat import ChatFormat
    from choreo_agents.models.chat.template import Template
    from choreo_agents.models.spelling import Spelling


@dataclass(frozen=True)
class ViewComparison:
    """A view as the model reads it, beside the template's own."""

    view: View
    messages: Sequence[tuple[str, str]]
    """Whose each message is, and its text."""
    tokens: Sequence[int]
    template_text: str | None
    """None if it has none, or raises at any such conversation."""
    template_tokens: Sequence[int] | None

    @property
    def equal(self) -> bool:
        """Token by token."""
        return self.template_tokens is not None and [*self.tokens] == [*self.template_tokens]

    def as_object(self) -> dict[str, Any]:
        """JSON-plain."""
        return {
            "title": self.view.title,
            "edges": self.view.edges,
            "messages": [{"of": label, "text": text} for label, text in self.messages],
            "tokens": [*self.tokens],
            "template_text": self.template_text,
            "template_tokens": None if self.template_tokens is None else [*self.template_tokens],
            "equal": self.equal,
        }


def compared(chat: ChatFormat, template: Template, spelling: Spelling, view: View) -> ViewComparison:
    """A view beside the template's.

    Args:
        chat: How the model writes turns.
        template: What they were taken from.
        spelling: Of its tokenizer.
        view: What is read.
    """
    read = Rendering(chat, view).messages()
    messages = [(message.label, message.text.text) for message in read]
    tokens = [token for message in read for piece in message.pieces for token in spelling.encode(piece)]
    text = None if template.tokenizer.chat_template is None else written(template, chat, view)
    wanted = None if text is None else list(template.tokenizer.encode(text, add_special_tokens=False))
    return ViewComparison(view, messages, tokens, text, wanted)
