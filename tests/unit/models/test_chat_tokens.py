"""Turns encoded one by one are, token by token, the chat that the model's own template and tokenizer would write."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.safe_tokenization import safe_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Of the first instructed Mistral: a space before an answer, the end-of-sequence token after it."""
STYLES = {
    "chatml": (CHATML, None, "<|im_end|>", ["<|im_start|>"]),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": (MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"]),
    "mistral, marks of plain text": (MISTRAL, "<s>", "</s>", []),
    "gemma": (GEMMA, "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
}
TEXT = [
    "The harbour gate opens at nine, and the council meets in the old hall: who keeps the key?",
    "user assistant system model You are helpful. What is 17 + 25? It's 42. [INST] [/INST]\n\nNo, I don't agree.\n",
]
CHAT = [
    ("user", "Who keeps the key?"),
    ("assistant", "The harbour council.\nIt's in the old hall, I think."),
    ("user", "17 + 25?\n\nPlease, be brief: don't explain."),
    ("assistant", "42"),
]


def byte_level() -> Tokenizer:
    """As Llama 3's, Qwen's and GPT's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As those made of SentencePiece models: a mark stands for each space, and opens a text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "normalizer":
        marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(marks)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "metaspace, never": lambda: metaspace("never"),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, normalizer": lambda: metaspace("normalizer"),
}


def trained(style: str, kind: str) -> PreTrainedTokenizerFast:
    template, bos, eos, marks = STYLES[style]
    special = [token for token in ("<unk>", bos, eos, *marks) if token]
    tokenizer = KINDS[kind]()
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)] if kind != "byte-level" else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*special, *byte_pieces], show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, unk_token="<unk>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_turns_encoded_one_by_one_are_the_tokens_of_the_whole_chat(style: str, kind: str) -> None:
    tokenizer = trained(style, kind)
    chat = chat_format(tokenizer)
    spans = [chat.root(None).text, *(chat.turn(role, words).text for role, words in CHAT)]
    pieces = [tokenizer.encode(span, add_special_tokens=False) for span in spans if span]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": words} for role, words in CHAT], tokenize=True, return_dict=False
    )
    joined = [token for piece in pieces for token in piece]
    if style == "mistral, marks of plain text":
        # Nothing special stands between its turns: such a tokenizer may join what ends one with what opens the next,
        # and spaces fall otherwise. The words are the same.
        bare = str.maketrans("", "", " ▁")
        assert tokenizer.decode(joined).translate(bare) == tokenizer.decode(whole).translate(bare)
        return
    assert joined == whole
    spelling = safe_tokenizer(tokenizer)
    framed = [chat.root(None), *(chat.turn(role, words) for role, words in CHAT)]
    assert [token for span in framed for token in spelling.encode(span)] == whole


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_begins_where_its_header_ends(style: str) -> None:
    """Header, words and turn end, encoded apart, read back as the turn."""
    tokenizer = trained(style, "byte-level")
    chat = chat_format(tokenizer)
    role, words = "assistant", " 42"
    header = tokenizer.encode(chat.header(None).text, add_special_tokens=False)
    rest = tokenizer.encode(words + chat.turn_end, add_special_tokens=False)
    text = tokenizer.decode([*header, *rest], skip_special_tokens=False)
    assert text.replace(" ", "") == chat.turn(role, "42").text.replace(" ", "")
