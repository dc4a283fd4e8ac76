"""Named actors, which outlive the process that started them: how to find, start and end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from choreo_agents.errors import InvalidRequestError

_THERE_S, _CLOSE_S = 5.0, 30.0
"""Seconds to wait for actors to respond; and for their engines to write what is to persist."""


def require_name(name: str | None, namespace: str) -> None:
    """Raise `InvalidRequestError` for a name or namespace that no actor can be found by."""
    for label, value in (("name", name), ("namespace", namespace)):
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidRequestError(f"{label} must be a non-empty string, not {value!r}")


def engine_name(name: str | None, number: int) -> str:
    """Return the name of an engine, by the name of its actors if they have one."""
    return f"{name or 'engine'}-{number}"


def get_or_start(
    kind: type, options: Mapping[str, Any], name: str | None, namespace: str, *arguments: Any
) -> tuple[Any, bool]:
    """Return the handle of an actor, and whether it was started here: one without a name always is.

    Args:
        kind: Class of the actor.
        options: Resources and limits that it asks of Ray.
        name: Name by which others find it, and it outlives this process; None: it ends with it. `namespace`: Ray's.
        arguments: Arguments of the class, if an actor is started.
    """
    lasting: dict[str, Any] = {}
    if name is not None:
        with suppress(ValueError):
            return ray.get_actor(name, namespace), False
        lasting = {"name": name, "namespace": namespace, "lifetime": "detached"}
    try:
        return ray.remote(kind).options(**options, **lasting).remote(*arguments), True
    except ray.exceptions.ActorAlreadyExistsError:  # another process was faster
        return ray.get_actor(name, namespace), False
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"Ray rejected the resources of an actor ({dict(options)!r}): {error}") from error


def actors_named(name: str, namespace: str) -> list[Any]:
    """Return the actors of a name that there are."""
    every = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in every if actor["namespace"] == namespace)
    split = ((full_name, *full_name.rpartition("-")) for full_name in names)
    actors: list[Any] = []
    for full_name, prefix, _, number in split:
        if prefix == name and number.isdigit():
            with suppress(ValueError):  # it has ended meanwhile
                actors.append(ray.get_actor(full_name, namespace))
    return actors


def end_actors(actors: Sequence[Any]) -> int:
    """End actors for good, those that respond only once they have written what is to persist; return their number."""
    references = {actor.there.remote(): actor for actor in actors}
    ready = _wait([*references], _THERE_S)
    _wait([references[reference].close.remote() for reference in ready], _CLOSE_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    return len(actors)


def _wait(references: list[Any], timeout_s: float) -> list[Any]:
    """Return the references that are done within some seconds."""
    if not references:
        return []
    ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s)
    return list(ready)
