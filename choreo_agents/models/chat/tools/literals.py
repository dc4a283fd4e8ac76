"""Parses and writes values in JSON, and finds the end of a streamed one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

_HALVES = re.compile("[\ud800-\udfff]")


def from_json(text: str) -> Any:
    """Parse a JSON value; raw newlines in strings are accepted, as models write them.

    Raises:
        ValueError: It is no JSON, has a key twice, a number that is not finite, or half of a surrogate pair.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite, object_pairs_hook=unique)
        if "\\" in text and _HALVES.search(json.dumps(value, ensure_ascii=False)):
            raise ValueError("it contains half of a surrogate pair, which is not text")
        return value
    except RecursionError:
        raise ValueError("its arguments are nested too deeply") from None


def to_json(value: Any) -> str:
    """Write a value as chat templates do, with half surrogate pairs, which no tokenizer accepts, escaped."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; raise `ValueError` if a key occurs twice."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"it has the key {key!r} twice")
        values[key] = value
    return values


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is not valid JSON")
    return value
