"""What models write of tools' calls is read as it was written, wherever it is cut."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.templates import tokenizer_for
from support.tool_templates import TOOL_TEMPLATES, tool_tokenizer

from choreo_agents.models import ChatFormat, PromptText
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.chat.tool_prompt import tools_format
from choreo_agents.models.chat.tools.grammar import BrokenCall, CallPart, TextPart, ToolCall
from choreo_agents.models.chat.tools.reading import ToolCallReader

FAMILIES = [*TOOL_TEMPLATES, "ours"]
Piece = tuple[str, bool]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        '"}]',
        "{'a': [",
        "</tool_call>",
        "<|call|>",
        "\\",
        '\\"',
        "\n```",
        "[TOOL_CALLS]",
        "\ue000x\ue001",
        "a\u2028b",
        "it's",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda key: not keyword.iskeyword(key))
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)
NAMES = st.sampled_from(["find", "look_up", "add2"])
CALLS = st.lists(st.builds(ToolCall, NAMES, ARGUMENTS), min_size=1, max_size=3)


@cache
def chat_of(family: str) -> tuple[ChatFormat, tuple[str, ...]]:
    if family == "ours":
        return chat_format(tokenizer_for("Gemma 3")), ()
    tokenizer = tool_tokenizer(family)
    return chat_format(tokenizer), tuple(tokenizer.added_tokens_encoder)


def schema_of(call: ToolCall) -> dict[str, Any]:
    fields = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in call.arguments.items()}
    return {"function": {"name": call.name, "parameters": {"properties": fields}}}


def reader_of(family: str, calls: Sequence[ToolCall] = ()) -> ToolCallReader:
    chat, controls = chat_of(family)
    known = [schema_of(call) for call in calls] or [{"name": name} for name in ("find", "look_up", "add2")]
    return tools_format(chat).reader(known, controls)


def pieces(text: PromptText, controls: Sequence[str]) -> Iterator[Piece]:
    """A text as a tokenizer takes it apart, in letters between its control tokens."""
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or "(?!)")
    for run, is_control in text.runs(pattern):
        if is_control:
            yield run, True
        else:
            yield from ((letter, False) for letter in run)


def cut(text: PromptText, controls: Sequence[str], cuts: Sequence[int]) -> Iterator[Piece]:
    """The same in longer pieces."""
    sizes, held = iter([*cuts, *[3] * 10_000]), ""
    size = next(sizes)
    for piece, is_control in pieces(text, controls):
        if is_control or len(held) >= size:
            if held:
                yield held, False
            held, size = "", next(sizes)
        if is_control:
            yield piece, True
        else:
            held += piece
    if held:
        yield held, False


def heard(reader: ToolCallReader, given: Iterator[Piece]) -> list[TextPart | CallPart]:
    said = [each for text, is_control in given for each in reader.add(text, is_control=is_control)]
    return said + reader.end()


def distinct(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """One schema for each name: pairs know texts by it."""
    return list({call.name: call for call in calls}.values())


@pytest.mark.parametrize("family", FAMILIES)
@given(calls=CALLS, cuts=st.lists(st.integers(1, 20), max_size=8), words=st.sampled_from(["", "Let me see."]))
def test_what_is_written_is_read(family: str, calls: list[ToolCall], cuts: list[int], words: str) -> None:
    calls, (chat, controls) = distinct(calls), chat_of(family)
    how = tools_format(chat)
    words = "" if how.grammar.is_bare else words
    turn = how.turn(words, calls)
    reader = reader_of(family, calls)
    said = heard(reader, cut(_behind(turn, how.opening, how.call_end), controls, cuts))
    assert reader.calls == calls
    assert reader.words.strip() == words
    for number, call in enumerate(calls):
        parts = [part for part in said if isinstance(part, CallPart) and part.number == number]
        assert [part.name for part in parts if part.name is not None] == [call.name]
        assert json.loads("".join(part.arguments for part in parts)) == call.arguments
    assert "".join(part.text for part in said if isinstance(part, TextPart)).strip() == words
    assert how.turn(words, [call for call in reader.calls if isinstance(call, ToolCall)]).text == turn.text


def _behind(turn: PromptText, opening: str, end: str) -> PromptText:
    """A turn as a model says it."""
    first, *rest = turn.parts
    parts = [(first[0].removeprefix(opening), first[1]), *rest]
    parts[-1] = (parts[-1][0].removesuffix(end), parts[-1][1])
    return PromptText(tuple(part for part in parts if part[0]))


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS | st.text("<{[(\"'/tool_call>|}])\n find:", max_size=40), every=st.integers(1, 5))
def test_words_alone_stay_words_and_nothing_is_lost(family: str, text: str, every: int) -> None:
    """Whatever it looks like: control tokens are none of it."""
    if family == "gpt-oss":
        return  # what it says stands behind a header
    reader = reader_of(family)
    said = heard(reader, iter([(text[at : at + every], False) for at in range(0, len(text), every)]))
    if not reader.calls:
        assert reader.words == text
    else:
        assert (family in ("Hermes", "ours") and "<tool_call>" in text) or family == "Llama 3.1"
    assert reader.words == "".join(each.text for each in said if isinstance(each, TextPart))


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), call=st.builds(ToolCall, NAMES, ARGUMENTS))
def test_a_cut_call_is_broken_or_words_and_never_another_call(family: str, data: Any, call: ToolCall) -> None:
    chat, controls = chat_of(family)
    how = tools_format(chat)
    whole = list(pieces(_behind(how.turn("", [call]), how.opening, how.call_end), controls))
    kept = data.draw(st.integers(0, len(whole)))
    reader = reader_of(family, [call])
    heard(reader, iter(whole[:kept]))
    assert len(reader.calls) <= 1
    for found in reader.calls:
        assert isinstance(found, BrokenCall) or found == call


@pytest.mark.parametrize("family", FAMILIES)
@given(
    pieces=st.lists(TEXTS | st.sampled_from(["{", "}", '"name"', ":", '"find"', "[", "find(", ")", "\n"]), max_size=10)
)
def test_anything_can_be_said(family: str, pieces: list[str]) -> None:
    """It is cut anywhere, and mixed with control tokens: it is read the same in letters, and never fails."""
    _, controls = chat_of(family)
    mixed = [(piece, piece in controls) for piece in [*pieces, *controls[-3:], *pieces]]
    whole, letters = reader_of(family), reader_of(family)
    heard(whole, iter(mixed))
    heard(letters, iter([(part, c) for text, c in mixed for part in ([text] if c else text)]))
    assert (whole.words.rstrip(), whole.calls) == (letters.words.rstrip(), letters.calls)
