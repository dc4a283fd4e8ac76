"""How a model thinks, as its chat template has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from choreo_agents.models.chat.format import ChatFormat, ThoughtsFormat

if TYPE_CHECKING:
    from choreo_agents.models.chat.template import Template

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether a model is to think."""
SPOKEN = ("/think", "/no_think")
"""Words of instructions by which others are."""
FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Of an assistant's message, where templates look for its thoughts."""
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_THOUGHTS = "\u241fthoughts\u241f"
_QUESTION = {"role": "user", "content": "\u241fquestion\u241f"}
_ANSWER = {"role": "assistant", "content": "\u241fanswer\u241f"}
_NEXT = {"role": "user", "content": "\u241fnext\u241f"}


def thoughts_of(template: Template, chat: ChatFormat) -> ThoughtsFormat | None:
    """How a model thinks; None if its template knows nothing of it.

    Args:
        template: Of the model.
        chat: Its turns.
    """
    user_end = chat.user.after  # without what opens answers, where the same closes questions
    switch, on, off = switched(template)
    plain = chat.assistant.plain
    asked = _header(template, user_end)
    thinking = asked if on is None else _header(on, user_end)
    framed = _framed(on or template, user_end)
    if framed is None:
        framed = _marked(template, plain, thinking)
    if framed is None:
        return None
    header, close = framed
    begins = _opener(header, close)
    # An answer's header may hold where thoughts begin, or only what stands before.
    if begins and begins in thinking:
        header = thinking[: thinking.rindex(begins)] + header[header.index(begins) :]
    closed = close.strip()
    usual = closed not in asked and (
        (begins in asked or begins in _before(template) if begins else False)
        or (on is not None and _asked(on) == _asked(template))
        or (switch is None and asked != plain and header.startswith(asked))
    )
    if off is not None:
        unthinking = _header(off, user_end)
    elif begins and begins in asked and closed not in asked:
        unthinking = header + close
    elif switch is None and usual:
        unthinking = plain
    else:
        unthinking = asked
    return ThoughtsFormat(header, close, unthinking, usual, _keeps(template))


def switched(template: Template) -> tuple[str | None, Template | None, Template | None]:
    """What turns thinking on and off, a variable or words of instructions, and the template with either."""
    for name in _SWITCHES:
        on, off = template.with_options(**{name: True}), template.with_options(**{name: False})
        one, other = _asked(on), _asked(off)
        if one is not None and other is not None and one != other:
            return name, on, off
    on, off = (template.with_instructions(words) for words in SPOKEN)
    if on.render([_QUESTION]) is not None and _header(on, "") != _header(off, ""):
        return SPOKEN[1], on, off
    return None, None, None


def _asked(template: Template) -> str | None:
    """All that is before an answer, what it is told about thinking included."""
    return template.render([_QUESTION], answer=True)


def _before(template: Template) -> str:
    """What stands before a question where nobody gives instructions: default ones may tell the model to think."""
    return (template.around([_QUESTION]) or [""])[0]


def _header(template: Template, user_end: str) -> str:
    """What an answer starts with."""
    found, shown = template.around([_QUESTION], answer=True), template.around([_QUESTION])
    if found is None:
        return ""
    # What it is told about thinking may stand behind the question as well.
    end = shown[1] if shown is not None and shown[1] != found[1] and found[1].startswith(shown[1]) else user_end
    return found[1].removeprefix(end)


def _framed(template: Template, user_end: str) -> tuple[str, str] | None:
    """What a template writes before a message's thoughts, and between them and its answer."""
    answer = _ANSWER | dict.fromkeys(FIELDS, _THOUGHTS)
    text = template.render([_QUESTION, answer])
    if text is None or text.count(_THOUGHTS) != 1 or _ANSWER["content"] not in text:
        return None
    behind = text.partition(_QUESTION["content"])[2].removeprefix(user_end)
    header, _, rest = behind.partition(_THOUGHTS)
    close, found, _ = rest.partition(_ANSWER["content"])
    return (header, close) if found and close.strip() else None


def _marked(template: Template, plain: str, asked: str) -> tuple[str, str] | None:
    """The same by the marks that most models know, of a template that has them in it."""
    source = str(template.tokenizer.chat_template)
    for begin, end in _MARKS:
        if end in source:
            opened = plain if end in asked else asked
            if opened.endswith(begin):
                return opened, end  # no lines around it before, and so none behind
            header = opened if begin in opened else f"{opened}{begin}\n"
            return header, f"\n{end}\n\n"
    return None


def _opener(header: str, close: str) -> str:
    """The mark that thoughts begin with, if they do with a known one."""
    return next((begin for begin, end in _MARKS if begin in header and end in close), "")


def _keeps(template: Template) -> bool:
    """Whether earlier thoughts are shown again."""
    answer = _ANSWER | dict.fromkeys(FIELDS, _THOUGHTS)
    shown = template.render([_QUESTION, answer, _NEXT])
    return shown is not None and _THOUGHTS in shown
