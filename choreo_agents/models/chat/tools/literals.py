"""Parses and writes values in JSON and in Python's notation, and finds the end of a streamed one."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

_HALVES = re.compile("[\ud800-\udfff]")
_KEY = re.compile(r"\s*([^\s=,()\[\]{}'\"#](?:[^=,()\[\]{}'\"\n]*[^\s=,()\[\]{}'\"])?)\s*=(?!=)")
"""Pattern of a keyword argument, whose key need not be a Python identifier."""
_PYTHON_NAMES = {"true": True, "false": False, "null": None}


class Extent:
    """A finder of the end of a streamed value that starts with a bracket.

    Args:
        quotes: Characters that may quote a string.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._quote = ""
        self._escaped = False
        self.depth = 0
        """Number of open brackets."""
        self.begun = False

    @property
    def is_text(self) -> bool:
        """True if the next character is within a string."""
        return bool(self._quote)

    def take(self, text: str) -> int | None:
        """Add a piece; return how much of it belongs to the value if it ends here."""
        for at, sign in enumerate(text, start=1):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == self._quote:
                    self._quote = ""
            elif sign in self._quotes:
                self._quote = sign
            elif sign in "{[(":
                self.depth += 1
                self.begun = True
            elif sign in "}])":
                self.depth -= 1
            if self.begun and self.depth <= 0:
                return at
        return None


def from_json(text: str) -> Any:
    """Parse a JSON value; raw newlines in strings are accepted, as models write them.

    Raises:
        ValueError: It is no JSON, has a key twice, a number that is not finite, or half of a surrogate pair.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite, object_pairs_hook=unique)
        _require_whole(value, text)
        return value
    except RecursionError:
        raise ValueError("its arguments are nested too deep") from None


def _require_whole(value: Any, text: str) -> None:
    """Raise `ValueError` if a value, parsed from `text`, has half of a surrogate pair."""
    if "\\" in text and _HALVES.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a pair of surrogates stands in it, which is no text")


def to_json(value: Any) -> str:
    """Write a value as chat templates do, with half surrogate pairs, which no tokenizer accepts, escaped."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; raise `ValueError` if a key occurs twice."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key!r} stands in it twice")
        values[key] = value
    return values


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no JSON")
    return value


def from_python(text: str) -> dict[str, Any]:
    """Parse keyword arguments in parentheses, in Python's notation, with any keys.

    Raises:
        ValueError: They are no such arguments.
    """
    keys: dict[str | None, str] = {}
    written, copied, extent = "_", 0, Extent("\"'")
    for at, sign in enumerate(text, start=1):
        extent.take(sign)
        if sign in "(," and extent.depth == 1 and not extent.is_text and (key := _KEY.match(text, at)):
            written += f"{text[copied:at]}_{len(keys)}="
            keys[f"_{len(keys)}"], copied = key[1], key.end()
    try:
        tree = ast.parse(written + text[copied:], mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(keyword.arg not in keys for keyword in tree.keywords):
            raise ValueError("its arguments have no names")
        arguments = unique((keys[keyword.arg], _evaluate(keyword.value)) for keyword in tree.keywords)
        _require_whole(arguments, text)
        return arguments
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from error
    except (RecursionError, MemoryError):
        raise ValueError("its arguments are nested too deep") from None


def is_keyword(name: str) -> bool:
    """Return whether a parameter's name can be written as a keyword."""
    return (match := _KEY.fullmatch(f"{name}=")) is not None and match[1] == name


def _evaluate(node: ast.expr) -> Any:
    """Return a literal as a JSON value."""
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        if any(not isinstance(key, ast.Constant) or not isinstance(key.value, str) for key in node.keys):
            raise ValueError("an object has keys that are no texts")
        return unique((key.value, _evaluate(value)) for key, value in zip(node.keys, node.values, strict=True))  # type: ignore[union-attr]
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{type(value).__name__} is no JSON")
    return _finite(repr(value)) if isinstance(value, float) else value


def to_python(value: Any) -> str:
    """Write a JSON value in Python's notation, with strings in double quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_json(str(key))}: {to_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_python, value)) + "]"
    return to_json(value) if isinstance(value, str) else repr(value)
