"""Base class of request objects, whose fields are honoured, harmless, or rejected with a hint what to use instead."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError, core_schema


@dataclass(frozen=True)
class Harmless:
    """Marker of a field that is accepted and has no effect."""

    why: str


@dataclass(frozen=True)
class Instead:
    """Marker of a field that is rejected."""

    say: str
    """Hint what to do instead."""
    unless: tuple[Any, ...] = ()
    """Values that are accepted because they ask for the default behaviour."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._reject, core_schema.any_schema())

    def _reject(self, value: Any) -> None:
        if value is not None and value not in self.unless:
            raise PydanticCustomError("instead", "unsupported: {say}", {"say": self.say})


class Fields(BaseModel):
    """Object of a request. Docstrings and markers describe its fields; None means that an optional field is left out.

    Unknown fields are rejected, because ignoring them could change what the client asked for.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _reject_unknown(self) -> Self:
        for name in self.model_extra or ():
            near = get_close_matches(name[:64], honoured := self.honoured(), 1)
            says = f"the nearest is {honoured[near[0]]}" if near else f"there are {', '.join(honoured.values())}"
            raise PydanticCustomError(
                "unknown", "unknown field: leave it out; {says}", {"says": says, "field": name[:64]}
            )
        return self

    @classmethod
    def honoured(cls) -> dict[str, str]:
        """Return the names of fields that have an effect, including those of nested objects, with their paths."""
        own = {name: field for name, field in cls.model_fields.items() if not marks(field)}
        parts = [(name, field.default) for name, field in own.items() if isinstance(field.default, Fields)]
        inner = {below: f"{name}.{below}" for name, part in parts for below in part.honoured()}
        return {name: name for name in own} | {name: where for name, where in inner.items() if name not in own}


def marks(field: Any) -> list[Harmless | Instead]:
    """Return the markers of a declared field; an honoured field has none."""
    return [mark for mark in field.metadata if isinstance(mark, Harmless | Instead)]
