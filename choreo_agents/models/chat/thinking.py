"""Derives the format of thoughts from a model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from choreo_agents.models.chat.format import ChatFormat, ThoughtsFormat

if TYPE_CHECKING:
    from choreo_agents.models.chat.template import Template

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that switch thinking."""
SPOKEN = ("/think", "/no_think")
"""Words in instructions that switch thinking, for other templates."""
FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message in which templates look for its thoughts."""
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_THOUGHTS = "\u241fthoughts\u241f"
_QUESTION = {"role": "user", "content": "\u241fquestion\u241f"}
_ANSWER = {"role": "assistant", "content": "\u241fanswer\u241f"}
_NEXT = {"role": "user", "content": "\u241fnext\u241f"}


def thoughts_of(template: Template, chat: ChatFormat) -> ThoughtsFormat | None:
    """Derive the format of thoughts; None if the template has no thinking.

    Args:
        template: The model's chat template.
        chat: The format of its turns.
    """
    user_end = chat.user.after  # without the part that opens answers, where that is also what closes questions
    switch, on, off = find_switch(template)
    plain = chat.assistant.plain
    usual_header = _answer_header(template, user_end)
    thinking = usual_header if on is None else _answer_header(on, user_end)
    framed = _find_frames(on or template, user_end)
    if framed is None:
        framed = _guess_frames(template, plain, thinking)
    if framed is None:
        return None
    header, close = framed
    begins = _find_opener(header, close)
    # The header of an answer may include the opening mark of thoughts, or only what precedes it.
    if begins and begins in thinking:
        header = thinking[: thinking.rindex(begins)] + header[header.index(begins) :]
    closed = close.strip()
    usual = closed not in usual_header and (
        (begins in usual_header or begins in _question_prefix(template) if begins else False)
        or (on is not None and _render_question(on) == _render_question(template))
        or (switch is None and usual_header != plain and header.startswith(usual_header))
    )
    if off is not None:
        unthinking = _answer_header(off, user_end)
    elif begins and begins in usual_header and closed not in usual_header:
        unthinking = header + close
    elif switch is None and usual:
        unthinking = plain
    else:
        unthinking = usual_header
    return ThoughtsFormat(header, close, unthinking, usual, _keeps_thoughts(template))


def find_switch(template: Template) -> tuple[str | None, Template | None, Template | None]:
    """Find the switch of thinking, a variable or a word in instructions, and the template with it on and off."""
    for name in _SWITCHES:
        on, off = template.with_options(**{name: True}), template.with_options(**{name: False})
        prompt_on, prompt_off = _render_question(on), _render_question(off)
        if prompt_on is not None and prompt_off is not None and prompt_on != prompt_off:
            return name, on, off
    on, off = (template.with_instructions(words) for words in SPOKEN)
    if on.render([_QUESTION]) is not None and _answer_header(on, "") != _answer_header(off, ""):
        return SPOKEN[1], on, off
    return None, None, None


def _render_question(template: Template) -> str | None:
    """Render a question up to its answer, with any text about thinking."""
    return template.render([_QUESTION], answer=True)


def _question_prefix(template: Template) -> str:
    """Return the text before a question without instructions: a default system prompt may ask for thinking."""
    return (template.around([_QUESTION]) or [""])[0]


def _answer_header(template: Template, user_end: str) -> str:
    """Return the header of an answer; "" if the template renders none."""
    parts, shown = template.around([_QUESTION], answer=True), template.around([_QUESTION])
    if parts is None:
        return ""
    # Text about thinking may also follow the question.
    end = shown[1] if shown is not None and shown[1] != parts[1] and parts[1].startswith(shown[1]) else user_end
    return parts[1].removeprefix(end)


def _find_frames(template: Template, user_end: str) -> tuple[str, str] | None:
    """Return the texts before a message's thoughts, and between them and the answer; None if it renders none."""
    answer = _ANSWER | dict.fromkeys(FIELDS, _THOUGHTS)
    text = template.render([_QUESTION, answer])
    if text is None or text.count(_THOUGHTS) != 1 or _ANSWER["content"] not in text:
        return None
    behind = text.partition(_QUESTION["content"])[2].removeprefix(user_end)
    header, _, tail = behind.partition(_THOUGHTS)
    close, content, _ = tail.partition(_ANSWER["content"])
    return (header, close) if content and close.strip() else None


def _guess_frames(template: Template, plain: str, answer_header: str) -> tuple[str, str] | None:
    """Return the same from known marks, if the template's source contains them."""
    source = str(template.tokenizer.chat_template)
    for begin, end in _MARKS:
        if end in source:
            opened = plain if end in answer_header else answer_header
            if opened.endswith(begin):
                return opened, end  # no lines around it before, and so none behind
            header = opened if begin in opened else f"{opened}{begin}\n"
            return header, f"\n{end}\n\n"
    return None


def _find_opener(header: str, close: str) -> str:
    """Return the known mark that opens the thoughts; "" if there is none."""
    return next((begin for begin, end in _MARKS if begin in header and end in close), "")


def _keeps_thoughts(template: Template) -> bool:
    """Return whether the template shows the thoughts of earlier turns."""
    answer = _ANSWER | dict.fromkeys(FIELDS, _THOUGHTS)
    shown = template.render([_QUESTION, answer, _NEXT])
    return shown is not None and _THOUGHTS in shown
