"""What an answer must be, as chat APIs say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.sampling import Grammar

_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are no schemas."""

_BESIDE = {"name", "description", "strict"}
"""Keys that may stand beside a schema."""


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, unless it says itself what others may be."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {keyword: value if keyword in _DATA else closed(value) for keyword, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def schema_of_type(schema: Any) -> dict[str, Any]:
    """A type's schema as it leads answers, which the type checks: closed, without what tokens cannot be held to."""
    return {**closed(schema), "x-guidance": {"lenient": True}}


def answer_format(asked: Any) -> Grammar | None:
    """What leads an answer of a format; None: it may be anything.

    Args:
        asked: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": ...}`, where
            the schema stands by itself or, as OpenAI has it, as `schema` beside a name; or a description of a guide.

    Raises:
        InvalidRequestError: It is none of these.
    """
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if asked is None or asked == {"type": "text"}:
        return None
    if asked == {"type": "json_object"}:
        return Grammar.model_validate({"json_schema": {"type": "object"}})
    if kind == "json_schema":
        said = asked.get("json_schema")
        schema = said.get("schema", said if said.keys() - _BESIDE else None) if isinstance(said, Mapping) else None
        if not isinstance(schema, Mapping) or len(asked) > 2:
            raise InvalidRequestError(
                'response_format has no schema: {"type": "json_schema", "json_schema": {"name": "...", "schema": '
                f"{{...}}}}}}, not {asked!r}"
            )
        return Grammar.model_validate({"json_schema": schema})
    if isinstance(asked, Mapping) and kind is None and len(asked) == 1:
        return Grammar.model_validate(asked)
    raise InvalidRequestError(
        'response_format must be {"type": "json_object"}, {"type": "json_schema", "json_schema": {...}} or a guide, '
        f'such as {{"regex": "yes|no"}}, not {asked!r}'
    )
