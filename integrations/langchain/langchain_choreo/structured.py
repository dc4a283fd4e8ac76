"""Output of a given form."""

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

from choreo_agents.chat import closed, schema_of_type

Method = Literal["json_schema", "function_calling", "json_mode"]
"""By a constraint to JSON of the schema, the default; by a call of a tool with it; by a constraint to any JSON
object."""
METHODS = ("json_schema", "function_calling", "json_mode")


def response_format(schema: Any, method: Method) -> dict[str, Any]:
    """What the model is led to."""
    if method == "json_mode":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": _held_to(schema)}


def _held_to(schema: Any) -> dict[str, Any]:
    """A schema as it is; of a type, one whose objects have no other properties."""
    if isinstance(schema, Mapping) and "function" in schema:
        return dict(schema["function"].get("parameters") or {"type": "object"})
    if isinstance(schema, Mapping):
        return dict(schema.get("parameters", schema.get("input_schema", schema)))
    found = convert_to_json_schema(schema)
    # Only a model is read by what checks it.
    return schema_of_type(found) if is_basemodel_subclass(schema) else dict(closed(found))


class _Called(BaseOutputParser[Any]):
    """A parser of answers, to which one that calls tools is None."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        said = getattr(result[0], "message", None)
        if getattr(said, "tool_calls", None):
            return None
        return super().parse_result(result, partial=partial)


class _Answer(_Called, JsonOutputParser):
    pass


class _AnswerOfModel(_Called, PydanticOutputParser[TBaseModel]):
    pass


def parser_of(schema: Any, method: Method) -> BaseOutputParser[Any]:
    """Reads what the model says."""
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if is_model:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        return JsonOutputKeyToolsParser(key_name=tool_name(schema), first_tool_only=True)
    return _AnswerOfModel(pydantic_object=schema) if is_model else _Answer()


def tool_name(schema: Any) -> str:
    """Of the tool that a schema is, where it is called."""
    return str(convert_to_openai_tool(schema)["function"]["name"])


def with_raw(model: Runnable[Any, Any], parser: BaseOutputParser[Any]) -> Runnable[Any, dict[str, Any]]:
    """What the model says, what it is parsed to, and the error if it cannot be."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
