"""Chat templates taken apart into turns: the embedded one and the shapes that other models use."""

import pytest
from transformers import PreTrainedTokenizerFast

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.lab.embedded.tokenizer import build_tokenizer
from choreo_agents.models.chat import ChatFormat

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<start_of_turn>{{ role }}\n{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
)
STRIPS_EARLIER = (
    "{% for message in messages %}[{{ message['role'] }}]{% if loop.last %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)
FOLDS_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {% if loop.first and system is defined %}<<SYS>>{{ system }}<</SYS>>{% endif %}"
    "{{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}</s>{% endif %}{% endfor %}"
)


LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set said = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set said = messages %}{% set system = false %}{% endif %}{% for message in said %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set folded = '<<SYS>>' + system + '<</SYS>>' if loop.first and system else '' %}"
    "{% set content = folded + message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Begins every user's turn with the begin-of-sequence token."""


def tokenizer_with(template: str | None, bos: str | None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.bos_token = bos
    return tokenizer


def format_of(template: str | None, bos: str | None = "<s>") -> ChatFormat:
    return ChatFormat.of(tokenizer_with(template, bos))


def test_the_embedded_template_writes_names() -> None:
    chat = ChatFormat.of(build_tokenizer())
    assert chat.bos == "<s>" and chat.turn_end == "<|end|>"
    assert chat.root(None).text == "<s>"
    assert chat.root("Hear each other.").text == "<s><|system|> Hear each other.<|end|>"
    assert chat.turn("user", "What?").text == "<|user|> What?<|end|>"
    assert chat.turn("assistant", "Yes.", "Ann").text == "<|assistant|> Ann: Yes.<|end|>"
    assert chat.turn("user", "Yes.", "Ann").text == "<|user|> Ann: Yes.<|end|>"
    assert chat.header(None).text == "<|assistant|>"
    assert chat.header("Ann").text == "<|assistant|> Ann:"


def test_chatml() -> None:
    chat = format_of(CHATML, bos=None)
    assert chat.root(None).text == ""
    assert chat.root("s").text == chat.turn("system", "s").text == "<|im_start|>system\ns<|im_end|>\n"
    assert chat.turn("user", "u").text == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.header(None).text == "<|im_start|>assistant\n"
    assert chat.turn_end == "<|im_end|>\n"


def test_a_template_without_names_gets_them_as_the_first_words() -> None:
    chat = format_of(CHATML, bos=None)
    assert chat.turn("assistant", "Yes.", "Ann").text == "<|im_start|>assistant\nAnn: Yes.<|im_end|>\n"
    assert chat.header("Ann").text == "<|im_start|>assistant\nAnn:"


def test_a_default_system_turn_belongs_to_no_other_turn() -> None:
    chat = format_of(CHATML_WITH_DEFAULT_SYSTEM, bos=None)
    assert chat.turn("user", "u").text == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.root("s").text == "<|im_start|>system\ns<|im_end|>\n"


def test_llama3() -> None:
    chat = format_of(LLAMA3, bos="<|begin_of_text|>")
    assert chat.root(None).text == "<|begin_of_text|>"
    assert chat.root("s").text == "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
    assert chat.turn("user", "u").text == "<|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"
    assert chat.header(None).text == "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert chat.header("Ann").text == "<|start_header_id|>assistant<|end_header_id|>\n\nAnn:"
    assert chat.turn_end == "<|eot_id|>"


@pytest.mark.parametrize(("bos", "root"), [("<|begin_of_text|>", "<|begin_of_text|>"), ("<|start_header_id|>", "")])
def test_what_a_template_puts_into_the_first_system_turn_only_is_left_out(bos: str, root: str) -> None:
    """Such as the dates of Llama 3.1."""
    words = "{{ message['content']"
    dated = LLAMA3.replace(words, "{% if loop.first %}Today is Monday.\n\n{% endif %}" + words)
    chat = format_of(dated if root else dated.replace("{{ bos_token }}", ""), bos)
    assert chat.root(None).text == root
    assert chat.root("s").text == f"{root}<|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
    assert chat.turn("user", "u").text == "<|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"


def test_where_system_turns_are_refused_instructions_come_as_the_users() -> None:
    chat = format_of(GEMMA, bos="<bos>")
    assert chat.root("s").text == "<bos><start_of_turn>user\ns<end_of_turn>\n"
    assert chat.turn("user", "u").text == "<start_of_turn>user\nu<end_of_turn>\n"
    assert chat.turn("assistant", "a").text == "<start_of_turn>model\na<end_of_turn>\n"
    assert chat.header(None).text == "<start_of_turn>model\n"


def test_without_a_template_turns_are_plain_lines() -> None:
    chat = format_of(None)
    assert chat.root("s").text == "<s>System: s\n"
    assert chat.turn("user", "u", "Ann").text == "User: Ann: u\n"
    assert chat.header(None).text == "Assistant:"
    assert chat.turn_end == "\n"


def test_a_template_that_rewrites_earlier_messages_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="rewrites earlier messages"):
        format_of(STRIPS_EARLIER)


def test_where_system_words_are_written_into_the_users_turn_they_come_as_a_turn_of_their_own() -> None:
    """Else what the template was probed with would stand in every user's turn."""
    chat = format_of(FOLDS_SYSTEM)
    assert chat.turn("user", "u").text == "[INST] u [/INST]"
    assert chat.root("s").text == "<s>[INST] s [/INST]"
    assert chat.turn("assistant", "a").text == " a</s>"


def test_words_and_names_are_never_taken_for_template_code() -> None:
    chat = ChatFormat.of(build_tokenizer())
    assert (
        chat.turn("user", "{{ bos_token }}\u241f", "{% x %}").text == "<|user|> {% x %}: {{ bos_token }}\u241f<|end|>"
    )


def test_a_begin_token_that_the_template_does_not_write_is_no_part_of_the_root() -> None:
    """Such as Phi-3.5's: the tokenizer has one, chats never start with it."""
    chat = format_of(CHATML, bos="<s>")
    assert chat.root("s").text == "<|im_start|>system\ns<|im_end|>\n"
    assert chat.root(None).text == ""


def test_a_begin_token_that_opens_every_turn_stays_with_the_turns() -> None:
    """Such as SmolLM2's, whose begin-of-sequence token is `<|im_start|>`."""
    chat = format_of(CHATML, bos="<|im_start|>")
    assert chat.turn("system", "s").text == "<|im_start|>system\ns<|im_end|>\n"
    assert chat.turn("user", "u").text == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.root("s").text == "<|im_start|>system\ns<|im_end|>\n"
    assert chat.root(None).text == ""


@pytest.mark.parametrize(
    ("template", "bos"),
    [(CHATML, None), (LLAMA3, "<|begin_of_text|>"), (GEMMA, "<bos>"), (FOLDS_SYSTEM, "<s>"), (LLAMA2, "<s>")],
    ids=["chatml", "llama3", "gemma", "folds-system", "llama2"],
)
def test_turns_joined_are_what_the_template_renders(template: str, bos: str | None) -> None:
    tokenizer = tokenizer_with(template, bos)
    chat = ChatFormat.of(tokenizer)
    messages = [
        {"role": role, "content": words}
        for role, words in (("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    ]
    joined = chat.root(None).text + "".join(chat.turn(message["role"], message["content"]).text for message in messages)
    assert joined == tokenizer.apply_chat_template(messages, tokenize=False)
