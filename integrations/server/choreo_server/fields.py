"""What stands in a request: fields that are honoured, harmless, or refused with what to say in their place."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError, core_schema


@dataclass(frozen=True)
class Harmless:
    """Marks a field that may be there, and changes nothing."""

    why: str


@dataclass(frozen=True)
class Instead:
    """Marks a field that is refused."""

    say: str
    """What to do in its place."""
    unless: tuple[Any, ...] = ()
    """Values that ask for what is done in any case."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._required, core_schema.any_schema())

    def _required(self, value: Any) -> None:
        if value is not None and value not in self.unless:
            raise PydanticCustomError("instead", "it is not known here: {say}", {"say": self.say})


class Fields(BaseModel):
    """Fields of one object: their docstrings and marks say what they do. None, of an optional one, is left out.

    All others are refused: they could not be kept.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _has_no_others(self) -> Self:
        for name in self.model_extra or ():
            near = get_close_matches(name[:64], honoured := self.honoured(), 1)
            says = f"the nearest is {honoured[near[0]]}" if near else f"there are {', '.join(honoured.values())}"
            raise PydanticCustomError(
                "unknown", "there is no such field: leave it out; {says}", {"says": says, "field": name[:64]}
            )
        return self

    @classmethod
    def honoured(cls) -> dict[str, str]:
        """Names of fields that do anything, also of those in an object of ours, and where each stands."""
        own = {name: field for name, field in cls.model_fields.items() if not marks(field)}
        inner = {
            below: f"{name}.{below}"
            for name, field in own.items()
            if isinstance(field.default, Fields)
            for below in field.default.honoured()
        }
        return {name: name for name in own} | {name: where for name, where in inner.items() if name not in own}


def marks(field: Any) -> list[Harmless | Instead]:
    """What a declared field is marked by, unless it is honoured."""
    return [mark for mark in field.metadata if isinstance(mark, Harmless | Instead)]
