"""Reject unknown arguments and invalid settings with messages that suggest what was probably meant."""

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
"""Our names by those of other libraries, where the nearest spelling would be another one."""
_KINDS: dict[str, type[Options]] = {}
"""Options by the argument that takes them: `memory` takes a `Memory`."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the name that was probably meant, or None if none is close."""
    close = get_close_matches(_ELSEWHERE.get(name, name), sorted(candidates), 1, cutoff=0.6)
    return close[0] if close else None


def require_known(
    owner: str, arguments: Iterable[str], accepted: Iterable[str], inside: Mapping[str, str] | None = None
) -> None:
    """Raise `UnknownArgumentError` for the first argument that is not accepted, naming the nearest accepted one.

    Args:
        owner: Name of the function or class.
        arguments: Names that were passed.
        accepted: Names that it takes.
        inside: How to pass others that it takes indirectly: `{"device": 'load_options={"device": ...}'}`.
    """
    names = sorted({name for name in accepted if not name.startswith("_")})
    for name in arguments:
        if name in names:
            continue
        # A setting may belong to an options object: Agent(temperature=...) is one of Sampling's.
        kinds = {argument: kind for argument in names if (kind := _KINDS.get(argument))}
        spelt = {
            key: f"{taken}={kind.__name__}({key}=...)" for taken, kind in kinds.items() for key in kind.model_fields
        }
        spelt |= {**(inside or {}), **{argument: f"{argument}=..." for argument in names}}
        if (match := nearest(name, spelt)) is not None:
            raise UnknownArgumentError(f"{owner} has no argument {name!r}: did you mean {spelt[match]}?")
        hint = f"it takes {', '.join(names)}" if names else "it takes no keyword arguments"
        raise UnknownArgumentError(f"{owner} has no argument {name!r}: {hint}")


def refuses_unknown(*beside: Any) -> Callable[[Named], Named]:
    """Let a function or class reject unknown arguments with `require_known`.

    Args:
        beside: What its `**options` go to: a function, or a TypedDict.
    """

    def refusing(function: Named) -> Named:
        if isinstance(function, type):
            cls: Any = function
            cls.__init__ = refusing(cls.__init__)
            return cast(Named, function)
        accepted = {name for source in (function, *beside) for name in parameters_of(source)}
        owner = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            if not options.keys() <= accepted:
                require_known(owner, options, accepted - {"self", "cls"})
            return function(*args, **options)

        return cast(Named, called)

    return refusing


def parameters_of(function: Any) -> list[str]:
    """Return the names by which arguments can be passed."""
    if isinstance(function, type) and issubclass(function, dict):
        return [*function.__annotations__]
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


class Options(BaseModel):
    """Base of settings that belong together: frozen, and rejecting invalid ones with an `InvalidRequestError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    error_name: ClassVar[str] = ""
    """Name that errors give it; by default the class's own."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        _KINDS[cls.__name__.lower()] = cls

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __init__(self, *args: Any, **settings: Any) -> None:
            owner = self.error_name or type(self).__name__
            if args:
                first = next(iter(type(self).model_fields))
                raise UnknownArgumentError(f"{owner} takes keyword arguments only: pass {first}=..., not {args[0]!r}")
            require_known(owner, settings, type(self).model_fields)
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise InvalidRequestError(refusal_of(owner, error)) from error


def refusal_of(owner: str, error: ValidationError) -> str:
    """Describe the first invalid setting in one line: the field, its value, and what it must be."""
    first = error.errors()[0]
    cause, field, value = first.get("ctx", {}).get("error"), ".".join(map(str, first["loc"])), first["input"]
    if cause is not None:  # a validator of ours, whose message names the value itself
        return str(cause) if isinstance(cause, InvalidRequestError) else f"{owner}: {cause}"
    message = first["msg"].removeprefix("Input ")
    if first["type"] == "tuple_type":
        message += f", as in ({value!r},)"
    return f"{owner}({field}={value!r}): it {message}"
