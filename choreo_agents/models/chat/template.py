"""A tokenizer's chat template, asked about conversations of marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from choreo_agents.errors import ChatTemplateError, InvalidRequestError
from choreo_agents.models.lines import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, Any]
DATE = "date"
"""The option that is ours: all others are the template's own variables."""
_CALLS = re.compile(r"""strftime_now\(\s*["']([^"']*)["']\s*\)""")
_LLAMA_DATE = "%d %b %Y"
_OURS = frozenset(
    {"messages", "add_generation_prompt", "tokenize", "return_dict", "strftime_now", "chat_template", "tools"}
)


class Template:
    """Renders conversations as the model was trained on them.

    Args:
        tokenizer: Has the template.
        options: Variables of the template, such as `enable_thinking`, by name. `date`, as a `datetime.date` or in ISO
            form, is the day that the template writes where it writes today's; without it, it is today.

    Raises:
        InvalidRequestError: An option cannot be one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.bos = str(tokenizer.bos_token or "")
        self.options, self.day = _variables(options or {})
        controls = sorted(tokenizer.added_tokens_encoder, key=len, reverse=True)
        marks = [re.escape(token) for token in controls if token.strip()]
        self._told: list[Turn] = []
        self._piece = re.compile("|".join([*marks, r"\s", r"\w+", r"[^\w\s]"]))
        self._failure: Exception | None = None

    def with_options(self, **more: Any) -> Template:
        """The same template with some variables set otherwise."""
        other = Template(self.tokenizer)
        other.options, other.day, other._told = self.options | more, self.day, self._told
        return other

    def with_instructions(self, words: str) -> Template:
        """The same template, which is given these instructions before any conversation."""
        other = self.with_options()
        other._told = [{"role": "system", "content": words}]
        return other

    @cached_property
    def source(self) -> str | None:
        """The template itself, in which today is the day that was asked for; None if there is none to choose."""
        found = self.tokenizer.chat_template
        source = found.get("default") if isinstance(found, Mapping) else found
        if not isinstance(source, str) or self.day is None:
            return source
        days = {written: self.day.strftime(written) for written in _CALLS.findall(source)}
        # Templates are given plain data, no functions: so it is one of theirs.
        return f"{{% macro strftime_now(format) %}}{{{{ {days!r}[format] }}}}{{% endmacro %}}{{{{ '' }}}}{source}"

    def render(self, turns: Sequence[Turn], *, answer: bool = False, tools: Sequence[Turn] | None = None) -> str | None:
        """A conversation as text; None if the template raises.

        Args:
            turns: Role, content and what else the template may look at.
            answer: Whether the model is to speak next.
            tools: Descriptions of those that it may call; None: none.
        """
        turns = [*self._told, *turns]
        return self._written([_parted(turn) for turn in turns] if self._reads_parts else turns, answer, tools)

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template finds words in the parts of a content, and none in a content that is text."""
        turn = {"role": "user", "content": "\u241fwords\u241f"}
        if turn["content"] in (self._written([turn], False) or ""):
            return False
        failure = self._failure
        found = turn["content"] in (self._written([_parted(turn)], False) or "")
        self._failure = failure
        return found

    def _written(self, turns: Sequence[Turn], answer: bool, tools: Sequence[Turn] | None = None) -> str | None:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [*turns],
                    tools=None if tools is None else [*tools],
                    chat_template=self.source,
                    tokenize=False,
                    add_generation_prompt=answer,
                    **self.options,
                )
            )
        except Exception as error:  # a template is a program of its author's
            self._failure = error
            return None

    def around(self, turns: Sequence[Turn], *, answer: bool = False) -> list[str] | None:
        """What stands before, between and behind the contents of a conversation.

        None if the template raises, or does not write each content once and in this order.
        """
        text = self.render(turns, answer=answer)
        if text is None or any(text.count(turn["content"]) != 1 for turn in turns):
            return None
        parts = []
        for turn in turns:
            before, found, text = text.partition(turn["content"])
            if not found:
                return None
            parts.append(before)
        return [*parts, text]

    def failed(self) -> ChatTemplateError:
        """The error of a template that writes not even one question."""
        why = "" if self._failure is None else f": {type(self._failure).__name__}: {first_line(self._failure)}"
        return ChatTemplateError(
            f"the chat template of {self.tokenizer.name_or_path or 'this tokenizer'!r} cannot write one question{why}; "
            "mend it, or remove it: turns are then plain lines"
        )

    def pieces(self, text: str) -> list[str]:
        """A text in parts that a turn's frame is never cut within: control tokens, words, signs."""
        return self._piece.findall(text)

    def common_start(self, one: str, other: str) -> str:
        """What both texts begin with, in whole pieces."""
        return "".join(_shared(self.pieces(one), self.pieces(other)))

    def common_end(self, one: str, other: str) -> str:
        """What both texts end with, in whole pieces."""
        return "".join(_shared(self.pieces(one)[::-1], self.pieces(other)[::-1])[::-1])


def _parted(turn: Turn) -> Turn:
    """The same turn with its words as the only part of its content."""
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


def _variables(options: Mapping[str, Any]) -> tuple[dict[str, Any], datetime | None]:
    """What a template is given, and the day that it is to write."""
    for name in options:
        if not isinstance(name, str) or name in _OURS:
            raise InvalidRequestError(f"{name!r} is no variable of a chat template that can be set")
    variables = {name: value for name, value in options.items() if name != DATE}
    if options.get(DATE) is None:
        return variables, None
    day = _day(options[DATE])
    # Some templates ask what day it is, others have a variable for the day as it is to be written.
    return {"date_string": day.strftime(_LLAMA_DATE)} | variables, day


def _day(said: Any) -> datetime:
    if isinstance(said, datetime):
        return said
    try:
        day = said if isinstance(said, date) else date.fromisoformat(said)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"date must be a day, as in '2026-01-31', not {said!r}") from None
    return datetime.combine(day, time())


def _shared(one: list[str], other: list[str]) -> list[str]:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return one[:same]
