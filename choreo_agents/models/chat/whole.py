"""A conversation as a chat template writes it at once, in which what anybody said is words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.hiding import Hiding
from choreo_agents.models.chat.thinking import FIELDS, SPOKEN, switched
from choreo_agents.models.framed import FramedText

if TYPE_CHECKING:
    from choreo_agents.models.chat.template import Template, Turn


class WholeConversation:
    """Writes conversations whose last turn is the model's to say.

    Args:
        template: Of the model.
        usual: Whether it lets the model think if nothing is said about it.
    """

    def __init__(self, template: Template, *, usual: bool) -> None:
        self._template, self._usual = template, usual
        self._switch, self._thinks, self._answers = switched(template)

    def __call__(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        header: FramedText,
        *,
        thinks: bool,
    ) -> FramedText | None:
        """A whole prompt; None if the template refuses the conversation.

        Args:
            turns: Role, content and what else templates look at: `tool_calls`, `tool_call_id`, `name`, and an
                assistant's `reasoning_content`.
            tools: Descriptions of those that may be called.
            header: What the answer starts with: as much of it as the template has not written stands at the end.
            thinks: Whether the model is to think before it answers.
        """
        hiding = Hiding(self._template.tokenizer)
        template, shown = self._template, [hiding.hidden(_thought(turn)) for turn in turns]
        if thinks != self._usual and self._switch in SPOKEN:
            shown = _told(shown, SPOKEN[0] if thinks else SPOKEN[1])
        elif thinks != self._usual:
            template = (self._thinks if thinks else self._answers) or template
        text = template.render(shown, answer=True, tools=hiding.hidden([*tools]) or None)
        if text is None:
            return None
        return _opened(hiding.shown(text), header)


def _thought(turn: Turn) -> Turn:
    """A turn whose thoughts stand wherever some template looks for them."""
    thoughts = turn.get(FIELDS[0])
    return turn | dict.fromkeys(FIELDS, thoughts) if thoughts else turn


def _told(turns: Sequence[Turn], words: str) -> list[Turn]:
    """A conversation whose instructions also say these words."""
    first = next(iter(turns), None)
    if first is None or first["role"] != "system":
        return [{"role": "system", "content": words}, *turns]
    return [first | {"content": f"{first['content']}\n\n{words}"}, *turns[1:]]


def _opened(prompt: FramedText, header: FramedText) -> FramedText:
    """A prompt that ends with a header, of which its end may be the beginning.

    A blank at the end is left to the first word, as in turns.
    """
    asked, wanted = prompt.rstrip(" "), header.text
    written = asked.text
    begun = next(n for n in range(len(wanted), -1, -1) if written.endswith(wanted[:n]))
    return asked + header.removeprefix(wanted[:begun])
