"""Renders a tokenizer's chat template around placeholder messages, and around messages kept as plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from choreo_agents.errors import ChatTemplateError, InvalidRequestError
from choreo_agents.models.lines import first_line
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Turn = dict[str, Any]
DATE = "date"
"""Name of the option that sets the date; all others are the template's own variables."""
_CALLS = re.compile(r"""strftime_now\(\s*["']([^"']*)["']\s*\)""")
_LLAMA_DATE = "%d %b %Y"
_OURS = frozenset(
    {"messages", "add_generation_prompt", "tokenize", "return_dict", "strftime_now", "chat_template", "tools"}
)


class Template:
    """A chat template, which renders conversations as the model was trained on them.

    Args:
        tokenizer: The tokenizer that has the template.
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
        self._instructions: list[Turn] = []
        self._piece = re.compile("|".join([*marks, r"\s", r"\w+", r"[^\w\s]"]))
        self._failure: Exception | None = None

    def with_options(self, **more: Any) -> Template:
        """Return a copy with some variables changed."""
        template = Template(self.tokenizer)
        template.options, template.day, template._instructions = self.options | more, self.day, self._instructions
        return template

    def with_instructions(self, words: str) -> Template:
        """Return a copy that renders these instructions before any conversation."""
        template = self.with_options()
        template._instructions = [{"role": "system", "content": words}]
        return template

    @cached_property
    def source(self) -> str | None:
        """Source of the template, in which today is the requested day; None if there is no default template."""
        templates = self.tokenizer.chat_template
        source = templates.get("default") if isinstance(templates, Mapping) else templates
        if not isinstance(source, str) or self.day is None:
            return source
        days = {written: self.day.strftime(written) for written in _CALLS.findall(source)}
        # Templates get plain data, no functions; so the date function is a macro of the template.
        return f"{{% macro strftime_now(format) %}}{{{{ {days!r}[format] }}}}{{% endmacro %}}{{{{ '' }}}}{source}"

    def render(self, turns: Sequence[Turn], *, answer: bool = False, tools: Sequence[Turn] | None = None) -> str | None:
        """Render a conversation as text; None if the template raises.

        Args:
            turns: Messages with role, content and any other field that the template reads.
            answer: Whether the model is to answer next.
            tools: Descriptions of the tools that it may call; None: none.
        """
        turns = [*self._instructions, *turns]
        return self._apply([_with_parts(turn) for turn in turns] if self._reads_parts else turns, answer, tools)

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template reads contents only as lists of parts, not as text."""
        turn = {"role": "user", "content": "\u241fwords\u241f"}
        if turn["content"] in (self._apply([turn], False) or ""):
            return False
        failure = self._failure
        is_read = turn["content"] in (self._apply([_with_parts(turn)], False) or "")
        self._failure = failure
        return is_read

    def _apply(self, turns: Sequence[Turn], answer: bool, tools: Sequence[Turn] | None = None) -> str | None:
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
        except Exception as error:  # a template is a program and raises anything
            self._failure = error
            return None

    def around(self, turns: Sequence[Turn], *, answer: bool = False) -> list[str] | None:
        """Return the texts before, between and after the contents of a conversation.

        None if the template raises, or does not write each content once and in order.
        """
        text = self.render(turns, answer=answer)
        if text is None or any(text.count(turn["content"]) != 1 for turn in turns):
            return None
        parts = []
        for turn in turns:
            before, content, text = text.partition(turn["content"])
            if not content:
                return None
            parts.append(before)
        return [*parts, text]

    def make_error(self) -> ChatTemplateError:
        """Return the error of a template that cannot render a single question."""
        why = "" if self._failure is None else f": {type(self._failure).__name__}: {first_line(self._failure)}"
        return ChatTemplateError(
            f"the chat template of {self.tokenizer.name_or_path or 'this tokenizer'!r} cannot render a single "
            f"question{why}; fix it, or remove it: turns are then plain lines"
        )

    def pieces(self, text: str) -> list[str]:
        """Split a text into pieces that are never divided: control tokens, words, other characters."""
        return self._piece.findall(text)

    def common_start(self, first: str, second: str) -> str:
        """Return the common prefix of two texts, in whole pieces."""
        return "".join(_common_prefix(self.pieces(first), self.pieces(second)))

    def common_end(self, first: str, second: str) -> str:
        """Return the common suffix of two texts, in whole pieces."""
        return "".join(_common_prefix(self.pieces(first)[::-1], self.pieces(second)[::-1])[::-1])


def _with_parts(turn: Turn) -> Turn:
    """Return a turn with its text as the only part of its content."""
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


def _variables(options: Mapping[str, Any]) -> tuple[dict[str, Any], datetime | None]:
    """Return the variables of a template, and the day that it is to write as today."""
    for name in options:
        if not isinstance(name, str) or name in _OURS:
            raise InvalidRequestError(f"{name!r} is not a variable of the chat template that can be set")
    variables = {name: value for name, value in options.items() if name != DATE}
    if options.get(DATE) is None:
        return variables, None
    day = _day(options[DATE])
    # Some templates call a function for the date, others have a variable for the formatted date.
    return {"date_string": day.strftime(_LLAMA_DATE)} | variables, day


def _day(value: Any) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        day = value if isinstance(value, date) else date.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"date must be a day, such as '2026-01-31', not {value!r}") from None
    return datetime.combine(day, time())


def _common_prefix(first: Sequence[str], second: Sequence[str]) -> list[str]:
    pairs = zip(first, second, strict=False)
    return [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


_SIGN = "\u241f"
"""Delimiter of placeholders; escaped itself where it occurs in a value."""


class ControlEscaper:
    """An escaper of control tokens for one rendered text.

    Args:
        tokenizer: The tokenizer whose control tokens are escaped.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        controls = sorted(filter(str.strip, tokenizer.added_tokens_encoder), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, [*controls, _SIGN])))
        self._marks: dict[str, str] = {}
        """Placeholders by the text that they replace."""

    def escape(self, value: Any) -> Any:
        """Return a JSON-like value with placeholders for whatever looks like a control token, in keys too."""
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(value) for key, value in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        if not isinstance(value, str):
            return value
        return self._pattern.sub(lambda match: self.mark(match[0]), value)

    def mark(self, words: str) -> str:
        """Return the placeholder of a text."""
        return self._marks.setdefault(words, f"{_SIGN}{len(self._marks)}{_SIGN}")

    def restore(self, text: str) -> PromptText:
        """Return a rendered text with placeholders replaced by plain text; all else is special."""
        return PromptText.filled(text, {mark: words for words, mark in self._marks.items()})
