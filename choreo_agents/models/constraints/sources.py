"""Descriptions of constraints as llguidance reads them."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from choreo_agents.errors import GrammarError, InvalidRequestError
from choreo_agents.sampling import Grammar

EXTRA = "choreo-agents[guided]"
JSON_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes it: where a model may add blanks it may do so for ever."""
LENIENT = {"lenient": True}
"""What a constraint cannot enforce is left out of it: whoever asks so checks what is said."""
LOG = logging.getLogger(__name__)
_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are no schemas."""
_ANYTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems", "dependentSchemas"), (True, {})),
    "dependentRequired": ({},),
}
"""Keywords that the library refuses, and their values that forbid nothing."""
_KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def llguidance() -> ModuleType:
    """The library.

    Raises:
        InvalidRequestError: It is not installed.
    """
    try:
        import llguidance as library  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidRequestError(f"a constraint needs llguidance: pip install '{EXTRA}'") from error
    found: ModuleType = library
    return found


def limits() -> Any:
    """Within which grammars are compiled and followed: the library's own, and errors that hold nothing of either."""
    return llguidance().LLParserLimits(verbose_errors=False)


def require_grammar(grammar: Grammar) -> None:
    """Raise unless answers can be led by this.

    Raises:
        GrammarError: They cannot; names what is in the way: a keyword of a schema, a place in a grammar.
        InvalidRequestError: llguidance is not installed.
    """
    source_of(grammar)


def source_of(grammar: Grammar) -> str:
    """What the library's matcher takes; raises as `require_grammar` does."""
    matcher = llguidance().LLMatcher
    if grammar.kind == "json_schema":
        schema = _schema(grammar)
        # By itself: within a grammar, errors tell places of that.
        _valid(matcher, matcher.grammar_from_json_schema(json.dumps(schema)), grammar)
        if schema["x-guidance"].get("lenient"):
            strict = {**schema, "x-guidance": JSON_BLANKS}
            log_unenforced(
                matcher.grammar_from_json_schema(json.dumps(strict)), f"an answer of {schema.get('title')!r}"
            )
        source: str = matcher.grammar_from_lark(f'start: " "? json\njson: %json {json.dumps(schema)}')
        return source
    if grammar.kind == "regex":
        _valid(matcher, matcher.grammar_from_regex(grammar.text), grammar)
        return _valid(matcher, matcher.grammar_from_regex(f" ?(?:{grammar.text})"), grammar)
    return _valid(matcher, matcher.grammar_from_lark(grammar.text), grammar)


def beside(lark: str, grammar: Grammar) -> str:
    """A grammar in Lark's notation that may name another `@answer`; raises as `require_grammar` does."""
    source = source_of(grammar)
    [answer] = json.loads(source)["grammars"] if grammar.kind == "regex" else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})


def _schema(grammar: Grammar) -> Any:
    try:
        schema = without_annotations(json.loads(grammar.text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, not {schema!r}")
    require_an_end(schema, "an answer")
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**JSON_BLANKS, **(own if isinstance(own, dict) else {})}}


def without_annotations(schema: Any) -> Any:
    """Leave out of a schema what forbids no value and the library refuses: formats of others, dialects, no-ops."""
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: value if keyword in _DATA else without_annotations(value)
        for keyword, value in schema.items()
        if value not in _ANYTHING.get(keyword, ())
        and not (keyword == "format" and isinstance(value, str) and not _is_known(value))
        and not (keyword == "$schema" and "json-schema.org" not in str(value))
    }


@lru_cache(1024)
def _is_known(name: str) -> bool:
    """Tell whether the library can hold texts to a format."""
    matcher = llguidance().LLMatcher
    text = json.dumps({"type": "string", "format": name})
    return not matcher.validate_grammar(matcher.grammar_from_json_schema(text), limits=limits())


def log_unenforced(strict: str, what: str) -> bool:
    """Tell whether a constraint can enforce a grammar as a whole; log what it cannot."""
    if said := str(llguidance().LLMatcher.validate_grammar(strict, limits=limits())).strip():
        LOG.info("a constraint to %s leaves out what is checked afterwards: %s", what, said.splitlines()[0])
    return bool(said)


def _valid(matcher: Any, source: str, grammar: Grammar) -> str:
    """The same, if the library takes it; raises `GrammarError` if not."""
    said = str(matcher.validate_grammar(source, limits=limits())).strip()
    if not said or said.startswith("WARNING"):
        return source
    if grammar.kind == "regex":
        # What is between is a drawing of where, in a text of the library's own.
        said = f"{grammar.text!r}: {said.rpartition('error: ')[2].partition(chr(10))[0]}"
    hints = {
        "regex": "; it is the whole answer that must match, without ^ and $",
        "json_schema": "; leave it out of the schema and check it afterwards, as is done where a type is given",
    }
    said = said.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Write anyOf")
    raise GrammarError(f"no answer can be led by this {_KINDS[grammar.kind]}: {said}{hints.get(grammar.kind, '')}")


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
