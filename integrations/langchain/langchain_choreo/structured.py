"""Structured output: constraints and parsers for answers of a given schema."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal

from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import TBaseModel, is_basemodel_subclass

from choreo_agents.chat import close_schema, schema_of_type

Method = Literal["json_schema", "function_calling", "json_mode"]
"""How answers get their form: a constraint to JSON of the schema (the default); a tool call with the schema; or a
constraint to any JSON object."""
METHODS = ("json_schema", "function_calling", "json_mode")


def response_format(schema: Any, method: Method) -> dict[str, Any]:
    """Return the `response_format` that constrains the model's answers."""
    if method == "json_mode":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": _object_schema(schema)}


def _object_schema(schema: Any) -> dict[str, Any]:
    """Return a JSON schema as it is, or the schema of a type, with no additional properties."""
    if isinstance(schema, Mapping) and "function" in schema:
        return dict(schema["function"].get("parameters") or {"type": "object"})
    if isinstance(schema, Mapping):
        return dict(schema.get("parameters", schema.get("input_schema", schema)))
    json_schema = convert_to_json_schema(schema)
    # Pydantic validates answers for its models; for other types the schema alone must rule out other properties.
    return schema_of_type(json_schema) if is_basemodel_subclass(schema) else dict(close_schema(json_schema))


class _SkipsToolCalls(BaseOutputParser[Any]):
    """A parser that returns None for an answer that calls tools."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message = getattr(result[0], "message", None)
        if getattr(message, "tool_calls", None):
            return None
        return super().parse_result(result, partial=partial)


class _Answer(_SkipsToolCalls, JsonOutputParser):
    pass


class _AnswerOfModel(_SkipsToolCalls, PydanticOutputParser[TBaseModel]):
    pass


def parser_of(schema: Any, method: Method) -> BaseOutputParser[Any]:
    """Return the parser of the model's answers."""
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_model:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        return JsonOutputKeyToolsParser(key_name=tool_name(schema), first_tool_only=True)
    return _AnswerOfModel(pydantic_object=schema) if is_model else _Answer()


def tool_name(schema: Any) -> str:
    """Return the name of the tool that a schema describes."""
    return str(convert_to_openai_tool(schema)["function"]["name"])


def with_raw(model: Runnable[Any, Any], parser: BaseOutputParser[Any]) -> Runnable[Any, dict[str, Any]]:
    """Return a runnable with the model's message, the parsed value, and the error if parsing fails."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
