"""Schemas that refer to themselves in all that they demand, so that no answer could ever end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from choreo_agents.errors import GrammarError


def require_an_end(schema: Any, what: str) -> None:
    """Raise `GrammarError` if each value of a schema holds another of the same, and so on for ever.

    Args:
        schema: Of JSON; references that lead out of it are whoever resolves them's to refuse.
        what: It describes.
    """
    users, ended, looked = defaultdict[str, set[str]](set), set[str](), set[str]()
    left = ["#"]
    while left:
        place = left.pop()
        looked.add(place)
        waits = set[str]()
        if place not in ended and _ends(_found(schema, place), ended, waits):
            ended.add(place)
            left += users.pop(place, ())
        for other in waits - ended:
            users[other].add(place)
            left += () if other in looked else (other,)
    if "#" not in ended:
        raise GrammarError(
            f"the JSON schema of {what} describes nothing that ends: it demands itself within itself. Let what refers "
            'back be left out of "required", be null ("anyOf" with {"type": "null"}), or be an empty list'
        )


def _found(schema: Any, place: str) -> Any:
    """What stands at a place of a schema; a value that ends if nothing does."""
    for part in map(unquote, place.split("/")[1:]):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _ends(schema: Any, ended: set[str], waits: set[str]) -> bool:
    """Whether a schema has a finite value, given places that have; notes of which others it would have to be known."""
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True
    to = schema.get("$ref")
    if isinstance(to, str) and (to == "#" or to.startswith("#/")) and to not in ended:
        waits.add(to)
        return False
    for keyword in ("anyOf", "oneOf"):
        ways = schema.get(keyword)
        if isinstance(ways, list) and ways and not any(_ends(way, ended, waits) for way in ways):
            return False
    parts = schema.get("allOf")
    if isinstance(parts, list) and not all(_ends(part, ended, waits) for part in parts):
        return False
    kinds = schema.get("type")
    demands = {"object": _members, "array": _items}
    named = kinds if isinstance(kinds, list) else [kinds]
    return any(
        all(_ends(each, ended, waits) for each in (demands[kind](schema) if kind in demands else ()))
        for kind in named or [None]
    )


def _members(schema: Mapping[str, Any]) -> list[Any]:
    """What an object must have."""
    known, required = schema.get("properties"), schema.get("required")
    others = schema.get("additionalProperties")
    known = known if isinstance(known, Mapping) else {}
    return [known.get(str(name), others) for name in (required if isinstance(required, list) else ())]


def _items(schema: Mapping[str, Any]) -> list[Any]:
    """What an array must have."""
    first, least = schema.get("prefixItems"), schema.get("minItems")
    first, least = (first if isinstance(first, list) else []), (least if isinstance(least, int) else 0)
    return [*first[: max(0, least)], *([schema.get("items")] if least > len(first) else [])]
