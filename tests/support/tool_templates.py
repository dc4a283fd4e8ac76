"""Chat templates that tell of tools and write calls as those of families that people host, written for the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from support.checkpoints import FAMILIES, Family
from support.templates import tokenizer_with

_ASKED = "{% if add_generation_prompt %}"
_SPLIT = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = none %}{% set talk = messages %}{% endif %}"
)

HERMES = (
    f"{_SPLIT}{{% if tools %}}<|im_start|>system\n{{% if system %}}{{{{ system + '\n\n' }}}}{{% endif %}}"
    "# Tools\n\nSignatures stand between <tools></tools>:\n<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}"
    "{% endfor %}{{ '\n' }}</tools>\n\nFor each call, write a JSON object between <tool_call></tool_call>:\n"
    "<tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n'
    "{% elif system %}<|im_start|>system\n{{ system }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for message in talk %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in talk %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = message['reasoning_content'] or '' %}{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% if not loop.first or message['content'] %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif message['role'] == 'tool' %}{% if loop.first or talk[loop.index0 - 1]['role'] != 'tool' %}"
    "<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% if loop.last or talk[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    f"{_ASKED}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen's and Hermes': JSON in tags; tools behind the instructions; results in a user's turn, several in one."""

LISTED = (
    f"{{{{ bos_token }}}}{_SPLIT}{{% if system or tools %}}<|im_start|>system\n{{{{ system or '' }}}}"
    "{% if tools %}{{ '\n' if system else '' }}List of tools: <|tool_list_start|>[{% for tool in tools %}"
    "{{ tool['function'] | tojson }}{{ ', ' if not loop.last }}{% endfor %}]<|tool_list_end|>{% endif %}<|im_end|>\n"
    "{% endif %}{% for message in talk %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'tool' %}<|tool_response_start|>{{ message['content'] }}<|tool_response_end|>"
    "{% else %}{% if message['tool_calls'] %}<|tool_call_start|>[{% for call in message['tool_calls'] %}"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "{{ ', ' if not loop.last }}{% endfor %}]"
    "<|tool_call_end|>"
    "{% endif %}{{ message['content'] or '' }}{% endif %}<|im_end|>\n{% endfor %}"
    f"{_ASKED}<|im_start|>assistant\n{{% endif %}}"
)
"""A list of calls between control tokens, as Command R7B's; a role for results."""

HARMONY = (
    "<|start|>system<|message|>You are a large language model.\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final.{% if tools %}\nCalls to these tools must go to the commentary "
    "channel: 'functions'.{% endif %}<|end|>"
    "{% if messages[0]['role'] in ['system', 'developer'] %}{% set talk = messages[1:] %}"
    "{% set told = messages[0]['content'] %}"
    "{% else %}{% set talk = messages %}{% set told = none %}{% endif %}"
    "{% if told or tools %}<|start|>developer<|message|>{% if told %}# Instructions\n\n{{ told }}\n\n{% endif %}"
    "{% if tools %}# Tools\n\n## functions\n\nnamespace functions {\n\n{% for tool in tools %}"
    "// {{ tool['function']['description'] }}\ntype {{ tool['function']['name'] }} = (_: "
    "{{ tool['function']['parameters'] | tojson }}) => any;\n\n{% endfor %}} // namespace functions{% endif %}<|end|>"
    "{% endif %}"
    "{% set ns = namespace(called=none) %}{% for message in talk %}"
    "{% if message['role'] == 'user' %}<|start|>user<|message|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'tool' %}<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary"
    "<|message|>{{ message['content'] | tojson }}<|end|>"
    "{% elif message['tool_calls'] %}{% if message['content'] %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ message['content'] }}<|end|>{% endif %}{% set ns.called = message['tool_calls'][0]['function']['name'] %}"
    "<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>"
    "{{ message['tool_calls'][0]['function']['arguments'] | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}{% if message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message['content'] }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    f"{_ASKED}<|start|>assistant{{% endif %}}"
)
"""gpt-oss': channels; a call names its tool in the header of a turn, and is the only one in its message."""

MISTRAL = (
    f"{_SPLIT}{{% set ns = namespace(last=-1) %}}{{% for message in talk %}}{{% if message['role'] == 'user' %}}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ bos_token }}"
    "{% for message in talk %}{% if message['role'] == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if loop.index0 == ns.last and system %}{{ system + '\n\n' }}{% endif %}{{ message['content'] }}[/INST]"
    "{% elif message['tool_calls'] %}[TOOL_CALLS] [{% for call in message['tool_calls'] %}"
    "{% if call['id'] | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}, "
    "\"id\": \"{{ call['id'] }}\"}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif message['role'] == 'tool' %}[TOOL_RESULTS] {\"content\": {{ message['content'] | tojson }}, "
    '"call_id": "{{ message[\'tool_call_id\'] }}"}[/TOOL_RESULTS]'
    "{% else %} {{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""Mistral's: a list of calls with ids of nine letters; results name them."""

LLAMA3 = (
    "{{ bos_token }}{% if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}"
    f"{_SPLIT}<|start_header_id|>system<|end_header_id|>\n\n{{% if tools %}}Environment: ipython\n{{% endif %}}"
    "Cutting Knowledge Date: December 2023\n\n{% if tools and not tools_in_user_message %}"
    'You have these functions. To call one, write {"name": ..., "parameters": ...}.\n\n'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ (system or '') | trim }}"
    "<|eot_id|>{% for message in talk %}{% if message['role'] == 'tool' %}<|start_header_id|>ipython"
    "<|end_header_id|>\n\n{{ message['content'] | tojson }}<|eot_id|>"
    "{% elif message['tool_calls'] %}{% if message['tool_calls'] | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = message['tool_calls'][0]['function'] %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call[\'name\'] }}", "parameters": {{ call[\'arguments\'] | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% if tools and tools_in_user_message and loop.first %}Given these functions:\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ message['content'] | trim }}"
    f"<|eot_id|>{{% endif %}}{{% endfor %}}{_ASKED}<|start_header_id|>assistant<|end_header_id|>\n\n{{% endif %}}"
)
"""Llama 3.1's: a bare JSON object, one at a time; tools in a person's words unless told otherwise."""

GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>\nWrite each call so:\n<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}"
    "</arg_value>\n</tool_call>{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>\n{{ message['content'] }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>"
    "{% if loop.index0 > ns.last and message['reasoning_content'] %}"
    "{{ '\n<think>' + message['reasoning_content'].strip() + '</think>' }}{% else %}{{ '\n<think></think>' }}"
    "{% endif %}{% if message['content'] %}{{ '\n' + message['content'].strip() }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n<tool_call>' + call['function']['name'] + '\n' }}"
    "{% for k, v in call['function']['arguments'].items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif message['role'] == 'tool' %}{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "<|observation|>{% endif %}{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% elif message['role'] == 'system' %}<|system|>\n{{ message['content'] }}"
    f"{{% endif %}}{{% endfor %}}{_ASKED}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)
"""GLM 4.5's: a name, and pairs of a key and a value, each between tags."""

TOOL_TEMPLATES: Mapping[str, tuple[str, str | None, str, tuple[str, ...]]] = {
    "Qwen 3": (HERMES, None, "<|im_end|>", ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")),
    "Hermes": (HERMES, None, "<|im_end|>", ("<|im_start|>",)),
    "listed": (
        LISTED, "<|startoftext|>", "<|im_end|>",
        ("<|im_start|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
         "<|tool_response_start|>", "<|tool_response_end|>"),
    ),
    "gpt-oss": (
        HARMONY, "<|startoftext|>", "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>", "<|endoftext|>"),
    ),
    "Mistral": (
        MISTRAL, "<s>", "</s>",
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
    ),
    "Llama 3.1": (
        LLAMA3, "<|begin_of_text|>", "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "GLM-4.5": (
        GLM, None, "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
         "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
}  # fmt: skip
"""Template, first and last token, and the control tokens besides, by family."""


def tool_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Single bytes, and the family's control tokens."""
    return tokenizer_with(*TOOL_TEMPLATES[family])


def _with(
    family: str, template: str, marks: Mapping[str, int], *, read: tuple[str, ...] = (), **changes: Any
) -> Family:
    known = FAMILIES[family]
    return replace(known, specials={**known.specials, **marks}, template=template, read=read, **changes)


TOOL_CHECKPOINTS: Mapping[str, Family] = {
    "Qwen 3": _with(
        "Qwen 3", HERMES, {"<tool_call>": 151657, "</tool_call>": 151658}, read=("<tool_call>", "</tool_call>")
    ),
    "listed": _with(
        "SmolLM2", LISTED,
        {"<|startoftext|>": 3, "<|tool_list_start|>": 8, "<|tool_list_end|>": 9, "<|tool_call_start|>": 10,
         "<|tool_call_end|>": 11, "<|tool_response_start|>": 12, "<|tool_response_end|>": 13},
        bos="<|startoftext|>",
    ),
    "gpt-oss": _with("gpt-oss", HARMONY, {}),
}  # fmt: skip
"""Checkpoints as people host them, whose templates tell of tools."""

TEXT_CHECKPOINTS: Mapping[str, Family] = {
    "Hermes": _with("SmolLM2", HERMES, {}),
    "Llama 3.1": _with("Llama 3.1", LLAMA3, {"<|python_tag|>": 128010}),
}
"""Those whose calls are ordinary text: no control token tells them from words."""
