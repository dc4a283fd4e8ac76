"""Grammar of a whole answer, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

Kind = Literal["json_schema", "regex", "grammar"]


class Grammar(BaseModel):
    """Grammar of a whole answer, given and serialized as a dict with one of three keys.

    `{"json_schema": {...}}`, whose properties are generated in the order of the schema; `{"regex": "..."}`; or
    `{"grammar": "..."}`, in Lark's notation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    text: str = Field(min_length=1)
    """The regex or grammar, or a schema as JSON."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or set(data) == {"kind", "text"}:
            return data
        [kind, *more] = data or [None]
        if more or kind not in get_args(Kind):
            raise ValueError(
                f"a constraint must have one of json_schema, regex and grammar, such as {{'regex': 'yes|no'}}, not "
                f"{list(data)!r}"
            )
        text = data[kind]
        if kind == "json_schema" and not isinstance(text, str):
            try:
                text = json.dumps(text, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"the schema cannot be written as JSON: {error}") from error
        return {"kind": kind, "text": text}

    @model_serializer
    def plain(self) -> dict[str, Any]:
        """Return the dict in which it is given."""
        return {self.kind: json.loads(self.text) if self.kind == "json_schema" else self.text}
