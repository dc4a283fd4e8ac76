"""Actors that outlive who has started them, by the name that they are found by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from choreo_agents.errors import InvalidRequestError

_THERE_S, _CLOSE_S = 5.0, 30.0
"""Seconds in which actors that have begun say so; and that their engines have to write what is to be kept."""


def require_name(name: str | None, namespace: str) -> None:
    """Raise `InvalidRequestError` for what no actors can be found by."""
    for what, value in (("name", name), ("namespace", namespace)):
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidRequestError(f"{what} must be a text that is not empty, not {value!r}")


def engine_name(name: str | None, number: int) -> str:
    """Of the engine in an actor with that name, or without one."""
    return f"{name or 'engine'}-{number}"


def found_or_made(
    kind: type, options: Mapping[str, Any], name: str | None, namespace: str, *arguments: Any
) -> tuple[Any, bool]:
    """The handle of an actor, and whether it was made here: one without a name always is.

    Args:
        kind: Its class.
        options: What it asks of Ray.
        name: It outlives this process, and others find it by that; None: it ends with this process. `namespace`: Ray's.
        arguments: Of one that is made.
    """
    lasting: dict[str, Any] = {}
    if name is not None:
        with suppress(ValueError):
            return ray.get_actor(name, namespace), False
        lasting = {"name": name, "namespace": namespace, "lifetime": "detached"}
    try:
        return ray.remote(kind).options(**options, **lasting).remote(*arguments), True
    except ray.exceptions.ActorAlreadyExistsError:  # somebody was faster
        return ray.get_actor(name, namespace), False
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"Ray refuses what an actor asks for ({dict(options)!r}): {error}") from error


def named(name: str, namespace: str) -> list[Any]:
    """The actors of that name that there are."""
    every = ray.util.list_named_actors(all_namespaces=True)
    known = (each["name"] for each in every if each["namespace"] == namespace)
    split = ((each, *each.rpartition("-")) for each in known)
    found: list[Any] = []
    for each, of, _, number in split:
        if of == name and number.isdigit():
            with suppress(ValueError):  # it has ended meanwhile
                found.append(ray.get_actor(each, namespace))
    return found


def ended(actors: Sequence[Any]) -> int:
    """End actors for good, those that have begun once they have written what is to be kept; how many they are."""
    asked = {each.there.remote(): each for each in actors}
    begun = _awaited([*asked], _THERE_S)
    _awaited([asked[each].close.remote() for each in begun], _CLOSE_S)
    for each in actors:
        ray.kill(each, no_restart=True)
    return len(actors)


def _awaited(references: list[Any], timeout_s: float) -> list[Any]:
    """Those that are done, at the latest after so many seconds."""
    if not references:
        return []
    done, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s)
    return list(done)
