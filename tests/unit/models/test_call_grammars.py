"""Grammars of calls that must be made: what they lead to is read as a call."""

from __future__ import annotations

from typing import Any

import pytest
from support.tool_templates import tool_tokenizer

from choreo_agents.models import tools_format
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.constraints.grammars import Grammars

YES = {"type": "boolean"}
REFERS = {
    "type": "object",
    "properties": {"node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "required": ["node"],
    "$defs": {"Node": {"type": "object", "properties": {"is_leaf": YES}}},
}


def compiled(family: str, name: str, parameters: dict[str, Any]) -> Any:
    tokenizer = tool_tokenizer(family)
    controls = {number: text for text, number in tokenizer.get_added_vocab().items()}
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return grammars.compile_call(tools_format(chat_format(tokenizer)), [tool], controls)


@pytest.mark.parametrize("family", ["Qwen 3", "listed", "GLM-4.5"])
def test_what_an_argument_refers_to_is_found(family: str) -> None:
    assert compiled(family, "find", REFERS)


BOX = {"type": "object", "properties": {"inside": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/box"}]}}}


@pytest.mark.parametrize("family", ["Qwen 3", "listed", "GLM-4.5"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"box": BOX}, "required": ["box"]},
        {"$id": "https://boxes.example/box", "properties": {"box": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
        {"properties": {"box": {"$ref": "#/definitions/Box"}}, "definitions": {"Box": BOX, "x": {"$ref": "#"}}},
        {"properties": {"of": {"type": "array", "uniqueItems": True}, "at": {"type": "string", "format": "path"}}},
        {"properties": {"of": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}}},
        {"properties": {"of": {"type": "object", "propertyNames": {"enum": ["a"]}}}, "unevaluatedProperties": False},
    ],
)
def test_arguments_are_led_as_far_as_tokens_can_be(family: str, schema: dict[str, Any]) -> None:
    assert compiled(family, "find", {"type": "object", **schema})


@pytest.mark.parametrize("family", ["Qwen 3", "listed", "GLM-4.5"])
def test_names_may_have_other_signs(family: str) -> None:
    for name, argument in (("find-it", "thing"), ("find", "from"), ("find", "a thing"), ("find it", "filter[of]")):
        assert compiled(family, name, {"type": "object", "properties": {argument: YES}})
