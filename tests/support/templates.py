"""Chat templates that behave as those of families that people host, written for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

_ASKED = "{% if add_generation_prompt %}"
_ALTERNATE = (
    "{% for message in talk %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}{% endfor %}"
)
_SPLIT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = none %}{% set talk = messages %}{% endif %}"
)

QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    f"{_ASKED}<|im_start|>assistant\n{{% endif %}}"
)
"""A default system turn."""

QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% set said = message['content'] %}{% set thought = message['reasoning_content'] or '' %}"
    "{% if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ said.lstrip('\n') }}{% else %}{{ said }}{% endif %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    f"{_ASKED}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Thinks unless told not to; shows thoughts after the last question only, and an empty block where there were none."""

QWEN3_THINKING = QWEN3.partition(_ASKED)[0] + f"{_ASKED}<|im_start|>assistant\n<think>\n{{% endif %}}"
"""Always thinks: its generation prompt opens the thoughts."""

RECALLS = QWEN3.replace("loop.index0 > ns.last and (loop.last or thought)", "thought")
"""Shows a model what it has thought in all earlier turns."""

LLAMA31 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    f"{_SPLIT_SYSTEM}"
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: {{ date_string }}\n\n{{ (system or '') | trim }}<|eot_id|>"
    "{% for message in talk %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    f"{_ASKED}<|start_header_id|>assistant<|end_header_id|>\n\n{{% endif %}}"
)
"""Dates in the first system turn, which is always there."""

GEMMA3 = (
    f"{{{{ bos_token }}}}{_SPLIT_SYSTEM}{_ALTERNATE}"
    "{% for message in talk %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}{{ message['content'] | trim }}<end_of_turn>\n"
    f"{{% endfor %}}{_ASKED}<start_of_turn>model\n{{% endif %}}"
)
"""Instructions stand in the first user's turn; users and model take turns."""

GEMMA2 = GEMMA3.replace(
    _SPLIT_SYSTEM,
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% set talk = messages %}{% set system = none %}",
)
"""The same without any instructions."""

PHI3 = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    f"{_ASKED}<|assistant|>\n{{% else %}}{{{{ eos_token }}}}{{% endif %}}"
)
"""An end of sequence behind the last turn, unless an answer is asked for."""

MISTRAL_SMALL = (
    "{% set persona = 'You are a model of 24 billion parameters. Today is ' + strftime_now('%Y-%m-%d') + '.' %}"
    f"{_SPLIT_SYSTEM}{_ALTERNATE}"
    "{{ bos_token }}[SYSTEM_PROMPT]{{ persona if system is none else system }}[/SYSTEM_PROMPT]"
    "{% for message in talk %}{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""A persona with today's date where nobody gives instructions; nothing opens an answer."""

MISTRAL_V3 = (
    f"{_SPLIT_SYSTEM}{_ALTERNATE}{{{{ bos_token }}}}"
    "{% for message in talk %}{% if message['role'] == 'user' %}{% if loop.last and system %}"
    "[INST] {{ system + '\n\n' + message['content'] }}[/INST]"
    "{% else %}[INST] {{ message['content'] }}[/INST]{% endif %}"
    "{% else %} {{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Instructions stand in the last user's turn."""

DEEPSEEK_R1 = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set ns.system = message['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{% set said = message['content'] %}{% if '</think>' in said %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}<｜Assistant｜>{{ said }}<｜end▁of▁sentence｜>{% endif %}"
    f"{{% endfor %}}{_ASKED}<｜Assistant｜><think>\n{{% endif %}}"
)
"""Instructions come first, wherever they were given, and the last of them alone; always thinks."""

GPT_OSS = (
    "<|start|>system<|message|>You are a large language model.\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n\n"
    "Reasoning: {{ reasoning_effort | default('medium') }}\n\n# Valid channels: analysis, commentary, final.<|end|>"
    "{% if messages[0]['role'] in ['system', 'developer'] %}{% set talk = messages[1:] %}"
    "<|start|>developer<|message|># Instructions\n\n{{ messages[0]['content'] }}\n\n<|end|>"
    "{% else %}{% set talk = messages %}{% endif %}"
    "{% for message in talk %}{% if message['role'] == 'user' %}<|start|>user<|message|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'assistant' %}{% if loop.last and not add_generation_prompt %}{% if message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message['content'] }}<|return|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message['content'] }}<|end|>{% endif %}{% endif %}{% endfor %}"
    f"{_ASKED}<|start|>assistant{{% endif %}}"
)
"""A fixed system turn, instructions as the developer's and dropped if they come later, and channels."""

SMOLLM3 = (
    "{% set mode = '/no_think' if enable_thinking is defined and not enable_thinking else '/think' %}"
    f"{_SPLIT_SYSTEM}"
    "<|im_start|>system\n## Metadata\n\nReasoning Mode: {{ mode }}\n\n## Custom Instructions\n\n"
    "{{ system if system else 'You are a helpful assistant named SmolLM.' }}\n\n<|im_end|>\n"
    "{% for message in talk %}{% if message['role'] == 'user' %}<|im_start|>user\n{{ message['content'] }}<|im_end|>\n"
    "{% elif message['role'] == 'assistant' %}<|im_start|>assistant\n{% if mode == '/no_think' %}<think>\n\n</think>\n"
    "{% endif %}{{ message['content'].lstrip('\n') }}<|im_end|>\n{% endif %}{% endfor %}"
    f"{_ASKED}<|im_start|>assistant\n{{% if mode == '/no_think' %}}<think>\n\n</think>\n{{% endif %}}{{% endif %}}"
)
"""Later system turns are dropped; what it is told about thinking stands in the first."""

GLM45 = (
    "[gMASK]<sop>{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>\n{{ message['content'] }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>"
    "{% if loop.index0 > ns.last and message['reasoning_content'] %}"
    "{{ '\n<think>' + message['reasoning_content'].strip() + '</think>' }}"
    "{% else %}{{ '\n<think></think>' }}{% endif %}"
    "{{ '\n' + message['content'].strip() }}{% elif message['role'] == 'system' %}<|system|>\n{{ message['content'] }}"
    f"{{% endif %}}{{% endfor %}}{_ASKED}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)
"""Nothing closes a turn; an empty block of thoughts in every earlier answer."""

GRANITE33 = (
    f"{_SPLIT_SYSTEM}"
    "<|start_of_role|>system<|end_of_role|>{% if system %}{{ system }}{% else %}Knowledge Cutoff Date: April 2024.\n"
    "Today's Date: {{ strftime_now('%B %d, %Y') }}.\nYou are Granite."
    "{% if thinking %} Think first.{% endif %}{% endif %}"
    "<|end_of_text|>\n{% for message in talk %}<|start_of_role|>{{ message['role'] }}<|end_of_role|>"
    "{{ message['content'] }}<|end_of_text|>\n{% endfor %}"
    f"{_ASKED}<|start_of_role|>assistant<|end_of_role|>{{% endif %}}"
)
"""Default instructions with dates."""

GRANITE_ASKED = GRANITE33.replace("Think first.", "Write your thoughts between <think></think>.")
"""Thinks on request, which stands in its default instructions alone: an answer's header is the same."""

MAGISTRAL = MISTRAL_SMALL.replace(_ALTERNATE, "").replace(
    "{{ message['content'] + eos_token }}",
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'] }}[/SYSTEM_PROMPT]{% continue %}"
    "{% endif %}"
    "{% if message['reasoning_content'] %}[THINK]{{ message['reasoning_content'] }}[/THINK]{% endif %}"
    "{{ message['content'] + eos_token }}",
)
"""Thinks in marks of its own, right behind what closes a question; turns may be in any order."""

MAGISTRAL_THINKS = MAGISTRAL.replace(
    "'You are a model of 24 billion parameters. Today is ' + strftime_now('%Y-%m-%d') + '.'",
    "'Draft what you think first.\n\nYour draft: [THINK]Thoughts or a sketch.[/THINK]Then answer for your reader.'",
)
"""The same, whose default instructions make it think."""

PHI4_REASONING = (
    f"{_SPLIT_SYSTEM}"
    "<|im_start|>system<|im_sep|>{% if system %}{{ system }}{% else %}You are a model that reasons step by step. Your "
    "answer has two parts: <think> Thoughts </think> Solution.{% endif %}<|im_end|>"
    "{% for message in talk %}<|im_start|>{{ message['role'] }}<|im_sep|>"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>{% endfor %}"
    f"{_ASKED}<|im_start|>assistant<|im_sep|>{{% endif %}}"
)
"""Thinks since its default instructions say so; nothing else does."""

DEEPSEEK31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% set ns = namespace(system='', asked=false) %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set ns.system = ns.system + ('\n\n' if ns.system else '') + message['content'] %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.asked = true %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{% set said = message['content'] %}"
    "{% if ns.asked %}<｜Assistant｜></think>{% endif %}"
    "{% set ns.asked = false %}{% if '</think>' in said %}{% set said = said.split('</think>', 1)[1] %}{% endif %}"
    "{{ said }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.asked %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
"""Every answer stands behind a closing mark that nothing opened; thinks on request, in marks without lines around."""

NEMOTRON_NANO2 = (
    "{% set ns = namespace(thinks=true) %}{% for message in messages %}"
    "{% if message['role'] in ['system', 'user'] %}{% set said = message['content'].replace('</think>', '') %}"
    "{% if '/think' in said %}{% set ns.thinks = true %}{% elif '/no_think' in said %}{% set ns.thinks = false %}"
    "{% endif %}{% endif %}{% endfor %}"
    "{% macro bare(said) %}{{ said.replace('</think>', '<_end>').replace('/think', '').replace('/no_think', '')"
    ".replace('<_end>', '</think>').strip() }}{% endmacro %}"
    "{{ bos_token }}<SPECIAL_10>System\n{% if messages[0]['role'] == 'system' %}{{ bare(messages[0]['content']) }}"
    "{% set talk = messages[1:] %}{% else %}{% set talk = messages %}{% endif %}{{ '\n' }}"
    "{% set begun = '' %}{% if talk[-1]['role'] == 'assistant' %}{% set begun = talk[-1]['content'].strip() %}"
    "{% set talk = talk[:-1] %}{% endif %}"
    "{% for message in talk %}{% if message['role'] == 'user' %}<SPECIAL_11>User\n{{ bare(message['content']) }}\n"
    "{% elif message['role'] == 'assistant' %}<SPECIAL_11>Assistant\n"
    "{{ message['content'].split('</think>')[-1].strip() }}\n<SPECIAL_12>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt or begun %}<SPECIAL_11>Assistant\n"
    "{{ '<think>\n' if ns.thinks else '<think></think>' }}{{ begun }}"
    "{% if not add_generation_prompt %}{{ '\n<SPECIAL_12>\n' }}{% endif %}{% endif %}"
)
"""Thinks unless words of the system's or the user's say `/no_think`; an answer that nothing follows stands behind the
generation prompt, to be gone on with; later instructions are dropped."""

MINIMAX_M2 = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set rest = 1 %}"
    "{% else %}{% set system = 'You are a helpful assistant.' %}{% set rest = 0 %}{% endif %}"
    "]~!b[]~b]system\n{{ system }}[e~[\n"
    "{% for message in messages %}{% if loop.index0 < rest %}{% continue %}{% endif %}"
    "{% if message['role'] == 'user' %}]~b]user\n{{ message['content'] }}[e~[\n"
    "{% elif message['role'] == 'assistant' %}]~b]ai\n{% set thought = message['reasoning_content'] or '' %}"
    "{% set said = message['content'] %}{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].strip('\n').split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].strip('\n') %}{% endif %}"
    "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}[e~[\n"
    "{% endif %}{% endfor %}"
    f"{_ASKED}]~b]ai\n<think>\n{{% endif %}}"
)
"""Always thinks, between its generation prompt's mark and lines of its own; what was thought stands behind the last
question alone. Later instructions are dropped."""

DEEPSEEK_JOINS = DEEPSEEK_R1.replace(
    "{% set ns.system = message['content'] %}",
    "{% set ns.system = ns.system + '\n\n' + message['content'] if ns.system else message['content'] %}",
)
"""All instructions come first, as one."""

COMMAND_A = (
    "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' and not ns.system %}{% set ns.system = message['content'] %}{% endif %}"
    "{% endfor %}{{ bos_token }}<|turn|><|system|>Be kind.{{ '\n' + ns.system if ns.system else '' }}<|end|>"
    "{% for message in messages %}{% if not (loop.first and message['role'] == 'system') %}"
    "<|turn|><|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    f"{_ASKED}<|turn|><|assistant|>{{% endif %}}"
)
"""Takes the earliest instructions into its own system turn, wherever they are given; later ones have a turn each."""

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set talk = messages[1:] %}{% set system = messages[0]['content'] %}"
    f"{{% else %}}{{% set talk = messages %}}{{% set system = none %}}{{% endif %}}{_ALTERNATE}"
    "{% for message in talk %}"
    "{% set folded = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '' %}"
    "{% set content = folded + message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Begins every user's turn with the begin-of-sequence token."""

LATE_SYSTEM_RAISES = QWEN25.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}",
)
"""A second system turn raises, as Qwen3.5's does."""

VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    f"{_ASKED}ASSISTANT:{{% endif %}}"
)
"""No control tokens between turns."""

ALWAYS_ASKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""Opens an answer whether or not it is asked for one."""

TEMPLATES: Mapping[str, tuple[str, str | None, str, tuple[str, ...]]] = {
    "Qwen 2.5": (QWEN25, None, "<|im_end|>", ("<|im_start|>",)),
    "Qwen 3": (QWEN3, None, "<|im_end|>", ("<|im_start|>", "<think>", "</think>")),
    "Qwen 3 Thinking": (QWEN3_THINKING, None, "<|im_end|>", ("<|im_start|>", "<think>", "</think>")),
    "recalls": (RECALLS, None, "<|im_end|>", ("<|im_start|>", "<think>", "</think>")),
    "Llama 3.1": (
        LLAMA31, "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
    ),
    "Gemma 3": (GEMMA3, "<bos>", "<end_of_turn>", ("<start_of_turn>", "<eos>")),
    "Gemma 2": (GEMMA2, "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "Phi-3": (PHI3, "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "Mistral Small 3": (
        MISTRAL_SMALL, "<s>", "</s>", ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "Mistral 7B v0.3": (MISTRAL_V3, "<s>", "</s>", ("[INST]", "[/INST]")),
    "DeepSeek R1 Distill": (
        DEEPSEEK_R1, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "gpt-oss": (
        GPT_OSS, "<|startoftext|>", "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|endoftext|>"),
    ),
    "SmolLM3": (SMOLLM3, None, "<|im_end|>", ("<|im_start|>", "<think>", "</think>")),
    "GLM-4.5": (
        GLM45, None, "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
    ),
    "Granite 3.3": (GRANITE33, "<|end_of_text|>", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
    "Granite 3.3 on request": (
        GRANITE_ASKED, "<|end_of_text|>", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>"),
    ),
    "Magistral": (
        MAGISTRAL, "<s>", "</s>", ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
    ),
    "Magistral 2506": (
        MAGISTRAL_THINKS, "<s>", "</s>",
        ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
    ),
    "Phi-4-reasoning": (
        PHI4_REASONING, "<|endoftext|>", "<|im_end|>", ("<|im_start|>", "<|im_sep|>", "<think>", "</think>"),
    ),
    "DeepSeek V3.1": (
        DEEPSEEK31, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "Nemotron Nano 2": (NEMOTRON_NANO2, "<s>", "<SPECIAL_12>", ("<SPECIAL_10>", "<SPECIAL_11>")),
    "MiniMax-M2": (MINIMAX_M2, "]~!b[", "[e~[", ("]~b]", "<think>", "</think>")),
    "DeepSeek R1 0528 Distill": (
        DEEPSEEK_JOINS, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "Command A": (COMMAND_A, "<BOS>", "<|end|>", ("<|turn|>", "<|system|>", "<|user|>", "<|assistant|>")),
    "Llama 2": (LLAMA2, "<s>", "</s>", ()),
    "Qwen 3.5": (LATE_SYSTEM_RAISES, None, "<|im_end|>", ("<|im_start|>",)),
    "Vicuna": (VICUNA, "<s>", "</s>", ()),
    "always asks": (ALWAYS_ASKS, None, "<|im_end|>", ("<|im_start|>",)),
}  # fmt: skip
"""Template, first and last token, and the control tokens besides, by family."""


def tokenizer_with(
    template: str | None,
    bos: str | None,
    eos: str | None,
    marks: tuple[str, ...] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and of these control tokens, and of pairs of tokens that are one."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters |= {one + other: len(letters) + number for number, (one, other) in enumerate(merges)}
    base = Tokenizer(BPE(vocab=letters, merges=[*merges]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base, bos_token=bos, eos_token=eos, additional_special_tokens=[*marks]
    )
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_for(family: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """The same for one family."""
    return tokenizer_with(*TEMPLATES[family], merges)
