"""Descriptions of guides as llguidance reads them."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from choreo_agents.errors import GrammarError, InvalidRequestError
from choreo_agents.sampling import Grammar

EXTRA = "choreo-agents[guided]"
JSON_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes it: where a model may add blanks it may do so for ever."""
_KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def llguidance() -> ModuleType:
    """The library.

    Raises:
        InvalidRequestError: It is not installed.
    """
    try:
        import llguidance as library  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidRequestError(f"a guide needs llguidance: pip install '{EXTRA}'") from error
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
        # By itself first: within a grammar, errors tell places of that.
        own = matcher.grammar_from_json_schema(json.dumps(schema))
        _require_valid(matcher, own, grammar)
        return _valid(
            matcher, matcher.grammar_from_lark(f'start: " "? json\njson: %json {json.dumps(schema)}'), grammar
        )
    if grammar.kind == "regex":
        _require_valid(matcher, matcher.grammar_from_regex(grammar.text), grammar)
        return _valid(matcher, matcher.grammar_from_regex(f" ?(?:{grammar.text})"), grammar)
    return _valid(matcher, matcher.grammar_from_lark(grammar.text), grammar)


def _schema(grammar: Grammar) -> Any:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, not {schema!r}")
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**JSON_BLANKS, **(own if isinstance(own, dict) else {})}}


def _valid(matcher: Any, source: str, grammar: Grammar) -> str:
    _require_valid(matcher, source, grammar)
    return source


def _require_valid(matcher: Any, source: str, grammar: Grammar) -> None:
    said = str(matcher.validate_grammar(source, limits=limits())).strip()
    if not said or said.startswith("WARNING"):
        return
    if grammar.kind == "regex":
        # What is between is a drawing of where, in a text of the library's own.
        said = f"{grammar.text!r}: {said.rpartition('error: ')[2].partition(chr(10))[0]}"
    hints = {
        "regex": "; it is the whole answer that must match, without ^ and $",
        "json_schema": "; leave out what cannot be held to while tokens are chosen, and check it afterwards",
    }
    raise GrammarError(f"no answer can be led by this {_KINDS[grammar.kind]}: {said}{hints.get(grammar.kind, '')}")
