"""Translates grammars to the form that llguidance compiles, and checks them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from choreo_agents.errors import GrammarError, InvalidRequestError
from choreo_agents.sampling import Grammar

EXTRA = "choreo-agents[guided]"
JSON_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Blanks as `json.dumps` writes them: free ones would let a model write blanks for ever."""
LENIENT = {"lenient": True}
"""Option to leave out what cannot be enforced; the caller then checks the answer."""
LOG = logging.getLogger(__name__)
_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are data, not schemas."""
_ANYTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems", "dependentSchemas"), (True, {})),
    "dependentRequired": ({},),
}
"""Keywords that llguidance refuses, with the values that forbid nothing."""
_KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def llguidance() -> ModuleType:
    """Import llguidance.

    Raises:
        InvalidRequestError: It is not installed.
    """
    try:
        import llguidance as library  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise InvalidRequestError(f"a constraint needs llguidance: pip install '{EXTRA}'") from error
    module: ModuleType = library
    return module


def limits() -> Any:
    """Return llguidance's default limits, with short errors that do not quote grammar or answer."""
    return llguidance().LLParserLimits(verbose_errors=False)


def require_grammar(grammar: Grammar) -> None:
    """Raise unless a grammar can constrain answers.

    Raises:
        GrammarError: It cannot; names the keyword of the schema, or the place in the grammar.
        InvalidRequestError: llguidance is not installed.
    """
    source_of(grammar)


def source_of(grammar: Grammar) -> str:
    """Return a grammar in the form that llguidance compiles; raise as `require_grammar` does."""
    matcher = llguidance().LLMatcher
    if grammar.kind == "json_schema":
        schema = _schema(grammar)
        # Validated by itself: within a Lark grammar, errors would give places of that one.
        _validate(matcher, matcher.grammar_from_json_schema(json.dumps(schema)), grammar)
        if schema["x-guidance"].get("lenient"):
            log_unenforced(json.dumps({**schema, "x-guidance": JSON_BLANKS}), f"an answer of {schema.get('title')!r}")
        source: str = matcher.grammar_from_lark(f'start: " "? json\njson: %json {json.dumps(schema)}')
        return source
    if grammar.kind == "regex":
        _validate(matcher, matcher.grammar_from_regex(grammar.text), grammar)
        return _validate(matcher, matcher.grammar_from_regex(f" ?(?:{grammar.text})"), grammar)
    return _validate(matcher, matcher.grammar_from_lark(grammar.text), grammar)


def with_answer(lark: str, grammar: Grammar) -> str:
    """Combine a Lark grammar with the one it names `@answer`; raise as `require_grammar` does."""
    source = source_of(grammar)
    [answer] = json.loads(source)["grammars"] if grammar.kind == "regex" else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}]})


def _schema(grammar: Grammar) -> Any:
    try:
        schema = without_annotations(json.loads(grammar.text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, not {schema!r}")
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**JSON_BLANKS, **(own if isinstance(own, dict) else {})}}


def without_annotations(schema: Any) -> Any:
    """Remove from a schema what forbids no value but llguidance refuses: unknown formats, dialects, no-ops."""
    if isinstance(schema, list):
        return [without_annotations(item) for item in schema]
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
    """Return whether llguidance can enforce a format of strings."""
    matcher = llguidance().LLMatcher
    text = json.dumps({"type": "string", "format": name})
    return not matcher.validate_grammar(matcher.grammar_from_json_schema(text), limits=limits())


@lru_cache(1024)
def log_unenforced(schema: str, subject: str) -> None:
    """Log, once for each schema, what a lenient constraint to it leaves out."""
    matcher = llguidance().LLMatcher
    if message := matcher.validate_grammar(matcher.grammar_from_json_schema(schema), limits=limits()).strip():
        reason = message.splitlines()[0]
        LOG.info("%s is checked only afterwards against this part of its schema: %s", subject, reason)


def _validate(matcher: Any, source: str, grammar: Grammar) -> str:
    """Return the source if llguidance accepts it; raise `GrammarError` if not."""
    message = str(matcher.validate_grammar(source, limits=limits())).strip()
    if not message or message.startswith("WARNING"):
        return source
    if grammar.kind == "regex":
        # Skip the drawing of the place in llguidance's own text.
        message = f"{grammar.text!r}: {message.rpartition('error: ')[2].partition(chr(10))[0]}"
    hints = {
        "regex": "; it must match the whole answer, without ^ and $",
        "json_schema": "; leave it out of the schema and check it afterwards, as for a pydantic model",
    }
    message = message.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Write anyOf")
    raise GrammarError(f"cannot compile this {_KINDS[grammar.kind]}: {message}{hints.get(grammar.kind, '')}")
