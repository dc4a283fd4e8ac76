"""What an answer must be as a whole, in words that JSON can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

Kind = Literal["json_schema", "regex", "grammar"]


class Grammar(BaseModel):
    """What all of an answer must be: given, and written, as `{"json_schema": {...}}`, `{"regex": "..."}` or, in Lark's
    notation, `{"grammar": "..."}`.

    Of a schema the order of properties counts: it is that in which they are said.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    text: str = Field(min_length=1)
    """A schema's in JSON."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or set(given) == {"kind", "text"}:
            return given
        [kind, *others] = given or [None]
        if others or kind not in get_args(Kind):
            raise ValueError(
                f"a constraint is described by one of json_schema, regex and grammar, as in {{'regex': 'yes|no'}}, "
                f"not by {list(given)!r}"
            )
        text = given[kind]
        if kind == "json_schema" and not isinstance(text, str):
            try:
                text = json.dumps(text, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"the schema cannot be written as JSON: {error}") from error
        return {"kind": kind, "text": text}

    @model_serializer
    def plain(self) -> dict[str, Any]:
        """As it is given."""
        return {self.kind: json.loads(self.text) if self.kind == "json_schema" else self.text}
