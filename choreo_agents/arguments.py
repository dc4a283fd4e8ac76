"""Refuses arguments that there are not, and settings that cannot be, and says what was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from choreo_agents.errors import InvalidRequestError, UnknownArgumentError

Named = TypeVar("Named", bound=Callable[..., Any])
_ELSEWHERE = {"instructions": "system", "stop_sequences": "stop", "do_sample": "temperature"}
"""Our names by those of other libraries, where the nearest name would be another."""
_KINDS: dict[str, type[Options]] = {}
"""Options by the argument that takes them: `memory` takes a `Memory`."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant, if one is near."""
    close = get_close_matches(_ELSEWHERE.get(name, name), sorted(known), 1, cutoff=0.6)
    return close[0] if close else None


def require_known(
    whose: str, given: Iterable[str], known: Iterable[str], inside: Mapping[str, str] | None = None
) -> None:
    """Raise `UnknownArgumentError` for the first name that is given and not known; says which is nearest.

    Args:
        whose: The function.
        given: Names.
        known: Those that it has.
        inside: How others are given that it takes: `{"device": 'load_options={"device": ...}'}`.
    """
    names = sorted({name for name in known if not name.startswith("_")})
    for name in given:
        if name in names:
            continue
        # Settings stand in objects of their own: Agent(temperature=...).
        kinds = {each: kind for each in names if (kind := _KINDS.get(each))}
        spelt = {
            each: f"{taken}={kind.__name__}({each}=...)" for taken, kind in kinds.items() for each in kind.model_fields
        }
        spelt |= {**(inside or {}), **{each: f"{each}=..." for each in names}}
        if (found := nearest(name, spelt)) is not None:
            raise UnknownArgumentError(f"{whose} has no argument {name!r}: did you mean {spelt[found]}?")
        there = f"it takes {', '.join(names)}" if names else "it takes none by name"
        raise UnknownArgumentError(f"{whose} has no argument {name!r}: {there}")


def refuses_unknown(*beside: Any) -> Callable[[Named], Named]:
    """Let a function or class refuse arguments that it does not have by `require_known`.

    Args:
        beside: What its `**options` are for: a function, or a TypedDict.
    """

    def refusing(function: Named) -> Named:
        if isinstance(function, type):
            made: Any = function
            made.__init__ = refusing(made.__init__)
            return cast(Named, function)
        known = {name for each in (function, *beside) for name in parameters_of(each)}
        whose = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def called(*args: Any, **given: Any) -> Any:
            if not given.keys() <= known:
                require_known(whose, given, known - {"self", "cls"})
            return function(*args, **given)

        return cast(Named, called)

    return refusing


def parameters_of(function: Any) -> list[str]:
    """Names by which arguments can be given."""
    if isinstance(function, type) and issubclass(function, dict):
        return [*function.__annotations__]
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


class Options(BaseModel):
    """Settings that belong together: frozen, and refused with an `InvalidRequestError` that names ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    told_as: ClassVar[str] = ""
    """The name that errors give it; by default its own."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        _KINDS[cls.__name__.lower()] = cls

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __init__(self, *args: Any, **given: Any) -> None:
            whose = self.told_as or type(self).__name__
            if args:
                first = next(iter(type(self).model_fields))
                raise UnknownArgumentError(f"{whose} takes settings by name: {first}=..., not {args[0]!r} alone")
            require_known(whose, given, type(self).model_fields)
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise InvalidRequestError(refusal_of(whose, error)) from error


def refusal_of(whose: str, error: ValidationError) -> str:
    """The first thing that is wrong with some settings, in a line: the field, its value, and what it must be."""
    first = error.errors()[0]
    cause, field, value = first.get("ctx", {}).get("error"), ".".join(map(str, first["loc"])), first["input"]
    if cause is not None:  # a validator of ours, which names the value itself
        return str(cause) if isinstance(cause, InvalidRequestError) else f"{whose}: {cause}"
    message = first["msg"].removeprefix("Input ")
    if first["type"] == "tuple_type":
        message += f", as in ({value!r},)"
    return f"{whose}({field}={value!r}): it {message}"
