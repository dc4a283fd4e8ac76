"""Random JSON schemas, and how long what they allow can be."""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]
_DEEPEST = 3
_ESCAPED = 12
"""Bytes of a character at most: two escapes of six."""
_PATTERNS = (("^[a-z]{1,8}$", 8), ("^[A-Z]{2}-[0-9]{3}$", 6), ("^(yes|no|maybe)$", 5))
_FORMATS = (("date", 10), ("uuid", 36), ("time", 32))
_WORDS = ("red", "blue", "green", "Ann", "Bob", "two words", "Zoë", 'a "quote"')


def random_schemas(count: int, seed: int = 0) -> list[Schema]:
    """The same ones for the same seed."""
    return [random_schema(random.Random(f"{seed} {number}")) for number in range(count)]


def random_schema(draw: random.Random) -> Schema:
    """A schema of an object, of what llguidance can express, some of it without bound."""
    shared: Schema = {}
    schema = _object(draw, 0, shared)
    return {**schema, "$defs": shared} if shared else schema


def longest(schema: Schema) -> int | None:
    """Bytes of the longest output, and so more tokens than it can have, blanks in front included; None: no bound."""
    found = _longest(schema, schema.get("$defs", {}))
    return None if found is None else found + 1


def _any(draw: random.Random, depth: int, shared: Schema) -> Schema:
    plain = (_string, _integer, _number, _literal, _string, _integer)
    deep = (_object, _array, _either, _reference)
    kinds = plain if depth >= _DEEPEST else (*plain, *deep)
    return draw.choice(kinds)(draw, depth, shared)


def _object(draw: random.Random, depth: int, shared: Schema) -> Schema:
    names = draw.sample(string.ascii_lowercase, draw.randint(1, 4))
    properties = {name * draw.randint(1, 3): _any(draw, depth + 1, shared) for name in names}
    required = [name for name in properties if draw.random() < 0.75]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int, shared: Schema) -> Schema:
    least = draw.randint(0, 2)
    bounds: Schema = {"minItems": least}
    if draw.random() < 0.9:
        bounds["maxItems"] = least + draw.randint(0, 2)
    return {"type": "array", "items": _any(draw, depth + 1, shared), **bounds}


def _either(draw: random.Random, depth: int, shared: Schema) -> Schema:
    return {"anyOf": [_any(draw, depth + 1, shared) for _ in range(draw.randint(2, 3))]}


def _reference(draw: random.Random, depth: int, shared: Schema) -> Schema:
    name = f"d{len(shared)}"
    shared[name] = {}  # nothing below it may take the name
    shared[name] = _any(draw, depth + 1, shared)
    return {"$ref": f"#/$defs/{name}"}


def _string(draw: random.Random, _: int, __: Schema) -> Schema:
    chance = draw.random()
    if chance < 0.2:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)[0]}
    if chance < 0.35:
        return {"type": "string", "format": draw.choice(_FORMATS)[0]}
    if chance < 0.4:
        return {"type": "string"}
    least = draw.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(1, 8)}


def _integer(draw: random.Random, _: int, __: Schema) -> Schema:
    if draw.random() < 0.1:
        return {"type": "integer"}
    low = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}


def _number(draw: random.Random, _: int, __: Schema) -> Schema:
    low = draw.randint(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 500)}


def _literal(draw: random.Random, _: int, __: Schema) -> Schema:
    kind = draw.randint(0, 3)
    if kind == 0:
        return {"type": draw.choice(("boolean", "null"))}
    if kind == 1:
        return {"const": draw.choice((*_WORDS, 7, None))}
    return {"enum": draw.sample((*_WORDS, 1, 2.5, True, None), draw.randint(1, 5))}


def _longest(schema: Schema, shared: Schema) -> int | None:  # noqa: PLR0911 - one for each kind of schema
    if "$ref" in schema:
        return _longest(shared[schema["$ref"].rpartition("/")[2]], shared)
    if "anyOf" in schema:
        return _most(_longest(each, shared) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return max(_ESCAPED * len(str(value)) + 2 for value in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        parts = [(len(name), _longest(each, shared)) for name, each in schema["properties"].items()]
        known = [name + 6 + each for name, each in parts if each is not None]
        return 2 + sum(known) if len(known) == len(parts) else None
    if kind == "array":
        item, most = _longest(schema["items"], shared), schema.get("maxItems")
        return None if item is None or most is None else 2 + most * (item + 2)
    if kind == "string":
        lengths = {"pattern": dict(_PATTERNS), "format": dict(_FORMATS)}
        known_as = next((word for word in lengths if word in schema), None)
        most = lengths[known_as][schema[known_as]] if known_as else schema.get("maxLength")
        return None if most is None else _ESCAPED * most + 2
    if kind == "integer":
        bounds = [schema.get("minimum"), schema.get("maximum")]
        return None if None in bounds else max(len(str(bound)) for bound in bounds)
    return None if kind == "number" else len("false")


def _most(lengths: Any) -> int | None:
    found = list(lengths)
    return None if None in found else max(found)
