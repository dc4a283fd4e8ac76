"""Chat templates taken apart into turns: the embedded one, and what families' templates do."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from support.shipped import shipped_tokenizer
from support.templates import ALWAYS_ASKS, TEMPLATES, tokenizer_for, tokenizer_with

from choreo_agents.errors import ChatTemplateError, InvalidRequestError, UnsupportedModelError
from choreo_agents.models import ChatFormat
from choreo_agents.models.chat.template import Template
from choreo_agents.models.chat.template_analysis import chat_format

DAY = "2026-11-23"
CHATML, DEEPSEEK, OSS = "<|im_start|>assistant\n", "<｜Assistant｜>", "<|start|>assistant<|channel|>"
MINIMAX = "]~b]ai\n"


def format_of(family: str, **options: Any) -> ChatFormat:
    return chat_format(tokenizer_for(family), {"date": DAY} | options)


def said(role: str, words: str) -> dict[str, str]:
    return {"role": role, "content": words}


TALK = [
    said("user", "Who?"),
    said("assistant", "Me."),
    said("user", "Why?"),
    said("assistant", "So."),
    said("user", "?"),
]


def rendered(family: str, turns: list[dict[str, str]], *, answer: bool, **options: Any) -> str:
    """What the template itself writes."""
    text = Template(tokenizer_for(family), {"date": DAY} | options).render(turns, answer=answer)
    assert text is not None
    return text


def spans(chat: ChatFormat, turns: list[dict[str, str]], header: str) -> str:
    """What is shown turn by turn to a model that is to speak next."""
    first, rest = (turns[0]["content"], turns[1:]) if turns[0]["role"] == "system" else (None, turns)
    text = chat.bos
    if chat.leads and first is not None:
        opened = chat.user.plain + chat.system.around(first).text
        text += opened + chat.user.around(rest[0]["content"]).text.removeprefix(chat.user.plain)
        rest = rest[1:]
    else:
        text += chat.default_system if first is None else chat.turn("system", first).text
    return text + "".join(chat.turn(turn["role"], turn["content"]).text for turn in rest) + header


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("family", TEMPLATES)
def test_turns_joined_are_what_the_template_writes(family: str, system: str | None) -> None:
    if system is not None and family in ("Gemma 2", "Mistral 7B v0.3"):
        pytest.skip("it has no instructions, or writes them anew into the last turn")
    chat = format_of(family)
    turns = [*([] if system is None else [said("system", system)]), *TALK]
    header = chat.assistant.plain if chat.answer is None else chat.answer
    wanted = rendered(family, turns, answer=True)
    if header == chat.assistant.plain:
        wanted, header = wanted.rstrip(), header.rstrip()
    found = spans(chat, turns, header)
    assert found == wanted or found == wanted.rstrip()


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_template_is_taken_apart(family: str) -> None:
    chat = format_of(family)
    assert chat.turn("user", "u").text and chat.header(None).text and chat.header("Ann").text
    assert chat.turn("user", "\u241fx").text.count("\u241f") == 1, "no mark is left over"


def test_the_embedded_template_writes_names() -> None:
    chat = chat_format(shipped_tokenizer())
    assert chat.bos == "<s>" and chat.turn_end == "<|end|>"
    assert chat.root(None).text == "<s>"
    assert chat.root("Hear each other.").text == "<s><|system|> Hear each other.<|end|>"
    assert chat.turn("user", "What?").text == "<|user|> What?<|end|>"
    assert chat.turn("assistant", "Yes.", "Ann").text == "<|assistant|> Ann: Yes.<|end|>"
    assert chat.turn("user", "Yes.", "Ann").text == "<|user|> Ann: Yes.<|end|>"
    assert chat.header(None).text == "<|assistant|>"
    assert chat.header("Ann").text == "<|assistant|> Ann:"
    assert chat.thoughts is None and chat.merges is None and not chat.default_system
    assert chat.turn("system", "s", later=True) == chat.turn("system", "s")


def test_chatml() -> None:
    chat = format_of("Qwen 2.5")
    assert chat.root(None).text == ""
    assert chat.root("s").text == chat.turn("system", "s").text == "<|im_start|>system\ns<|im_end|>\n"
    assert chat.turn("user", "u").text == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.header(None).text == "<|im_start|>assistant\n"
    assert chat.turn_end == "<|im_end|>\n"


def test_a_template_without_names_gets_them_as_the_first_words() -> None:
    chat = format_of("Qwen 2.5")
    assert chat.turn("assistant", "Yes.", "Ann").text == "<|im_start|>assistant\nAnn: Yes.<|im_end|>\n"
    assert chat.header("Ann").text == "<|im_start|>assistant\nAnn:"


def test_default_instructions_stand_where_there_are_none() -> None:
    assert format_of("Qwen 2.5").default_system == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert "Today is 2026-11-23." in format_of("Mistral Small 3").default_system
    assert "November 23, 2026" in format_of("Granite 3.3").default_system
    assert format_of("Mistral Small 3").turn("system", "s").text == "[SYSTEM_PROMPT]s[/SYSTEM_PROMPT]"
    assert not format_of("Qwen 3").default_system


def test_dates_stand_before_the_first_instructions_only() -> None:
    chat = format_of("Llama 3.1")
    opened = "<|start_header_id|>system<|end_header_id|>\n\n"
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 23 Nov 2026\n\n"
    assert chat.root("s").text == f"<|begin_of_text|>{opened}{dates}s<|eot_id|>"
    assert chat.turn("system", "s", later=True).text == f"{opened}s<|eot_id|>"
    assert chat.default_system == f"{opened}{dates}<|eot_id|>"


def test_the_date_is_todays_unless_another_is_given() -> None:
    tokenizer = tokenizer_for("Mistral Small 3")
    assert date.today().isoformat() in chat_format(tokenizer).default_system
    assert "2001-02-03" in chat_format(tokenizer, {"date": date(2001, 2, 3)}).default_system
    assert "26 Jul 2024" in chat_format(tokenizer_for("Llama 3.1")).default_system
    assert "1 May" in chat_format(tokenizer_for("Llama 3.1"), {"date_string": "1 May"}).default_system


@pytest.mark.parametrize("options", [{"messages": []}, {"add_generation_prompt": True}, {"date": "monday"}, {1: 2}])
def test_what_is_no_variable_of_a_template_is_refused(options: dict[Any, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        chat_format(shipped_tokenizer(), options)


def test_instructions_may_stand_in_the_first_users_turn() -> None:
    chat = format_of("Gemma 3")
    assert chat.leads and chat.merges == "\n\n"
    assert chat.system.around("s").text == "s\n\n"
    assert chat.turn("system", "s").text == chat.turn("user", "s").text == "<start_of_turn>user\ns<end_of_turn>\n"
    assert chat.part("u").text == "u" and chat.part("u", "Ann").text == "Ann: u"
    assert format_of("Gemma 2").leads and format_of("Llama 2").system.around("s").text == "<<SYS>>\ns\n<</SYS>>\n\n"


def test_where_nothing_opens_an_answer_it_begins_with_what_closes_the_question() -> None:
    chat = format_of("Mistral Small 3")
    assert chat.turn("user", "u").text == "[INST]u" and chat.turn("assistant", "a").text == "[/INST]a</s>"
    assert chat.header(None).text == "[/INST]" and chat.header("Ann").text == "[/INST]Ann:"


def test_later_instructions_are_the_familys_developers_or_the_users() -> None:
    later = {family: format_of(family).turn("system", "s", later=True).text for family in TEMPLATES}
    assert later["gpt-oss"] == "<|start|>developer<|message|># Instructions\n\ns\n\n<|end|>"
    assert later["SmolLM3"] == "<|im_start|>user\ns<|im_end|>\n"
    assert later["DeepSeek R1 Distill"] == "<｜User｜>s"
    assert later["Qwen 3.5"] == "<|im_start|>user\ns<|im_end|>\n", "a second system turn raises"
    assert later["Qwen 3"] == "<|im_start|>system\ns<|im_end|>\n"


def test_hoisted_instructions_stand_right_behind_the_start() -> None:
    chat = format_of("DeepSeek R1 Distill")
    assert chat.root("s").text == "<｜begin▁of▁sentence｜>s"
    assert chat.turn("assistant", "a").text == "<｜Assistant｜>a<｜end▁of▁sentence｜>"


def test_what_follows_the_last_turn_alone_is_no_part_of_it() -> None:
    chat = format_of("Phi-3")
    assert chat.turn("user", "u").text == "<|user|>\nu<|end|>\n" and chat.turn_end == "<|end|>\n"
    assert format_of("gpt-oss").turn_end == "<|end|>"


def test_a_fixed_system_turn_belongs_to_the_start() -> None:
    chat = format_of("gpt-oss", reasoning_effort="high")
    assert chat.bos.startswith("<|start|>system") and "Reasoning: high" in chat.bos and DAY in chat.bos
    assert chat.root("s").text == f"{chat.bos}<|start|>developer<|message|># Instructions\n\ns\n\n<|end|>"


def test_a_turn_that_nothing_closes_ends_with_its_words() -> None:
    chat = format_of("GLM-4.5")
    assert chat.bos == "[gMASK]<sop>" and chat.turn_end == "" and chat.turn("user", "u").text == "<|user|>\nu"


def test_an_answer_that_is_always_asked_for_is_no_part_of_the_turn_before() -> None:
    chat = format_of("always asks")
    assert chat.turn("user", "u").text == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.turn("assistant", "a").text == "<|im_start|>assistant\na<|im_end|>\n"
    assert ALWAYS_ASKS.endswith("assistant\n")


def test_without_a_template_turns_are_plain_lines() -> None:
    chat = chat_format(tokenizer_with(None, "<s>", None))
    assert chat.root("s").text == "<s>System: s\n"
    assert chat.turn("user", "u", "Ann").text == "User: Ann: u\n"
    assert chat.header(None).text == "Assistant:"
    assert chat.turn_end == "\n"


def test_a_template_that_writes_only_the_last_words_is_served_as_well() -> None:
    strips = (
        "{% for message in messages %}[{{ message['role'] }}]{% if loop.last %}{{ message['content'] }}{% endif %}"
        "{% endfor %}"
    )
    chat = chat_format(tokenizer_with(strips, None, None))
    assert chat.turn("user", "u").text == "[user]u" and chat.turn("assistant", "a").text == "[assistant]a"


def test_words_may_be_asked_for_as_parts_of_a_content() -> None:
    """As templates of models do that also see."""
    template, *_ = TEMPLATES["Qwen 2.5"]
    words = "{{ message['content'] }}"
    parts = (
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    )
    assert words in template
    assert chat_format(tokenizer_with(template.replace(words, parts), None, "<|im_end|>")) == format_of("Qwen 2.5")


def test_of_several_templates_the_default_one_is_taken_with_its_date() -> None:
    tokenizer = tokenizer_for("Mistral Small 3")
    tokenizer.chat_template = {"default": str(tokenizer.chat_template), "tool_use": "{{ raise_exception('tools') }}"}
    assert chat_format(tokenizer, {"date": DAY}) == format_of("Mistral Small 3")


@pytest.mark.parametrize(
    "template", ["{{ messages[0]['content'].nothing() }}", "{{ raise_exception('no') }}", "nothing"]
)
def test_a_template_that_cannot_write_one_question_is_a_typed_error(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render a single question") as raised:
        chat_format(tokenizer_with(template, None, None))
    assert isinstance(raised.value, UnsupportedModelError)


def test_words_and_names_are_never_taken_for_template_code() -> None:
    chat = chat_format(shipped_tokenizer())
    assert (
        chat.turn("user", "{{ bos_token }}\u241f", "{% x %}").text == "<|user|> {% x %}: {{ bos_token }}\u241f<|end|>"
    )


def test_a_begin_token_that_the_template_does_not_write_is_no_part_of_the_root() -> None:
    """Such as Phi-3.5's: the tokenizer has one, chats never start with it."""
    assert format_of("Phi-3").root(None).text == ""


def test_a_begin_token_that_opens_every_turn_stays_with_the_turns() -> None:
    """Such as SmolLM2's, whose begin-of-sequence token is `<|im_start|>`."""
    template, *_ = TEMPLATES["Qwen 2.5"]
    chat = chat_format(tokenizer_with(template, "<|im_start|>", "<|im_end|>"))
    assert chat.turn("system", "s").text == chat.root("s").text == "<|im_start|>system\ns<|im_end|>\n"
    assert chat.turn("user", "u").text == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.root(None).text == ""


@pytest.mark.parametrize(
    ("family", "header", "close", "unthinking"),
    [
        ("Qwen 3", f"{CHATML}<think>\n", "\n</think>\n\n", f"{CHATML}<think>\n\n</think>\n\n"),
        ("Qwen 3 Thinking", f"{CHATML}<think>\n", "\n</think>\n\n", f"{CHATML}<think>\n\n</think>\n\n"),
        ("DeepSeek R1 Distill", f"{DEEPSEEK}<think>\n", "\n</think>\n\n", f"{DEEPSEEK}<think>\n\n</think>\n\n"),
        ("gpt-oss", f"{OSS}analysis<|message|>", f"<|end|>{OSS}final<|message|>", f"{OSS}final<|message|>"),
        ("SmolLM3", f"{CHATML}<think>\n", "\n</think>\n\n", f"{CHATML}<think>\n\n</think>\n"),
        ("GLM-4.5", "<|assistant|>\n<think>", "</think>\n", "<|assistant|>\n<think></think>"),
        ("MiniMax-M2", f"{MINIMAX}<think>\n", "\n</think>\n\n", f"{MINIMAX}<think>\n\n</think>\n\n"),
    ],
)
def test_models_think_as_their_templates_have_it(family: str, header: str, close: str, unthinking: str) -> None:
    chat = format_of(family)
    thoughts = chat.thoughts
    assert thoughts is not None
    assert (thoughts.header, thoughts.close, thoughts.unthinking) == (header, close, unthinking)
    assert thoughts.usual and not thoughts.kept
    assert chat.header("Ann", thinking=True).text == header
    assert chat.header("Ann").text == chat.header("Ann", thinking=False).text == f"{unthinking}Ann:"
    if family in ("Qwen 3", "SmolLM3", "GLM-4.5"):
        off = format_of(family, enable_thinking=False)
        assert off.thoughts is not None and not off.thoughts.usual
        assert off.header(None).text == unthinking and off.header(None, thinking=True).text == header


@pytest.mark.parametrize("family", ["Phi-4-reasoning", "Magistral 2506"])
def test_a_model_whose_default_instructions_make_it_think_usually_does(family: str) -> None:
    chat = format_of(family)
    assert chat.thoughts is not None and chat.thoughts.usual
    assert chat.thoughts.header.startswith(chat.assistant.plain) and chat.thoughts.unthinking == chat.assistant.plain
    assert chat.thoughts.end in chat.default_system


def test_marks_that_no_lines_stand_around_are_closed_without() -> None:
    """An answer without thoughts begins with the closing mark alone, and so does each earlier one."""
    for options, usual in ({}, False), ({"thinking": True}, True):
        chat = format_of("DeepSeek V3.1", **options)
        assert chat.thoughts is not None and chat.thoughts.usual is usual
        assert (chat.thoughts.header, chat.thoughts.close) == (f"{DEEPSEEK}<think>", "</think>")
        assert chat.thoughts.unthinking == chat.assistant.plain == f"{DEEPSEEK}</think>"
        assert chat.header("Ann", thinking=False).text == f"{DEEPSEEK}</think>Ann:"


def test_words_of_instructions_may_turn_thinking_off() -> None:
    chat = format_of("Nemotron Nano 2")
    assert chat.thoughts is not None and chat.thoughts.usual
    assert chat.header("Ann", thinking=True).text == "<SPECIAL_11>Assistant\n<think>\n"
    assert chat.header("Ann", thinking=False).text == "<SPECIAL_11>Assistant\n<think></think>Ann:"


def test_a_model_that_is_told_to_think_on_request_does_not_usually() -> None:
    """Only what it is told differs, not where its answer begins."""
    off, on = format_of("Granite 3.3 on request"), format_of("Granite 3.3 on request", thinking=True)
    assert off.thoughts is not None and not off.thoughts.usual and "<think>" not in off.header("Ann").text
    assert on.thoughts is not None and on.thoughts.usual and on.header("Ann", thinking=True).text.endswith("<think>\n")


def test_thoughts_begin_behind_what_closes_the_question() -> None:
    """Where that opens answers, too."""
    chat = format_of("Magistral")
    assert chat.thoughts is not None and not chat.thoughts.usual
    assert (chat.user.after, chat.assistant.plain) == ("", "[/INST]")
    assert (chat.thoughts.header, chat.thoughts.close) == ("[/INST][THINK]", "[/THINK]")
    assert chat.thoughts.unthinking == "[/INST]"


@pytest.mark.parametrize(
    "family", ["Qwen 2.5", "Llama 3.1", "Gemma 3", "Phi-3", "Mistral Small 3", "Granite 3.3", "Llama 2"]
)
def test_models_that_do_not_think_have_no_thoughts(family: str) -> None:
    assert format_of(family).thoughts is None
