"""Values as JSON and as Python write them: where one ends that comes in pieces, what it is, and how it is written."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

_HALVES = re.compile("[\ud800-\udfff]")
_KEY = re.compile(r"\s*([^\s=,()\[\]{}'\"#](?:[^=,()\[\]{}'\"\n]*[^\s=,()\[\]{}'\"])?)\s*=(?!=)")
"""A keyword, and what it need not be: a name that Python takes."""
_PYTHON_NAMES = {"true": True, "false": False, "null": None}


class Extent:
    """Finds where a value that starts with a bracket ends, however its text is cut.

    Args:
        quotes: Signs that strings stand between.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._quote = ""
        self._escaped = False
        self.depth = 0
        """How many brackets are open."""
        self.begun = False

    @property
    def is_text(self) -> bool:
        """Whether what comes next stands within a string."""
        return bool(self._quote)

    def take(self, text: str) -> int | None:
        """The next piece; how much of it belongs to the value if that ends in it."""
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
    """A JSON value; raw line ends in strings are taken, as models write them.

    Raises:
        ValueError: It is none.
    """
    try:
        found = json.loads(text, strict=False, parse_constant=_finite, parse_float=_finite, object_pairs_hook=unique)
        _require_whole(found, text)
        return found
    except RecursionError:
        raise ValueError("its arguments are nested too deep") from None


def _require_whole(value: Any, text: str) -> None:
    """Raise `ValueError` if half of a pair of surrogates stands in a value, which was read of a text."""
    if "\\" in text and _HALVES.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a pair of surrogates stands in it, which is no text")


def to_json(value: Any) -> str:
    """As chat templates write it. Half of a pair of surrogates, which no tokenizer takes, is escaped."""
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object; raises `ValueError` if it says two things under one key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands in it twice")
        found[key] = value
    return found


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no JSON")
    return value


def from_python(text: str) -> dict[str, Any]:
    """Keyword arguments in parentheses, as Python writes them, under any keys.

    Raises:
        ValueError: They are none.
    """
    keys: dict[str | None, str] = {}
    written, done, extent = "_", 0, Extent("\"'")
    for at, sign in enumerate(text, start=1):
        extent.take(sign)
        if sign in "(," and extent.depth == 1 and not extent.is_text and (key := _KEY.match(text, at)):
            written += f"{text[done:at]}_{len(keys)}="
            keys[f"_{len(keys)}"], done = key[1], key.end()
    try:
        tree = ast.parse(written + text[done:], mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(each.arg not in keys for each in tree.keywords):
            raise ValueError("its arguments have no names")
        given = unique((keys[keyword.arg], _plain(keyword.value)) for keyword in tree.keywords)
        _require_whole(given, text)
        return given
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from error
    except (RecursionError, MemoryError):
        raise ValueError("its arguments are nested too deep") from None


def is_keyword(name: str) -> bool:
    """Tell whether an argument of this name can be written as Python writes them."""
    return (found := _KEY.fullmatch(f"{name}=")) is not None and found[1] == name


def _plain(node: ast.expr) -> Any:
    """A literal as JSON has it."""
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        if any(not isinstance(key, ast.Constant) or not isinstance(key.value, str) for key in node.keys):
            raise ValueError("an object has keys that are no texts")
        return unique((key.value, _plain(value)) for key, value in zip(node.keys, node.values, strict=True))  # type: ignore[union-attr]
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{type(value).__name__} is no JSON")
    return _finite(repr(value)) if isinstance(value, float) else value


def to_python(value: Any) -> str:
    """A JSON value as Python writes it; strings stand in double quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_json(str(key))}: {to_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_python, value)) + "]"
    return to_json(value) if isinstance(value, str) else repr(value)
