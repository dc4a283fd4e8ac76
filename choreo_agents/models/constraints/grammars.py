"""Compiles grammars of answers and of tool calls over one model's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from choreo_agents.errors import GrammarError, InvalidRequestError
from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.constraints.masks import ByteConstraint, GrammarConstraint, GrammarMasks, llguidance
from choreo_agents.models.safe_tokenization import is_control_text
from choreo_agents.sampling import Grammar, TokenConstraint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


JSON_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Blanks as `json.dumps` writes them: free ones would let a model write blanks for ever."""
LENIENT = {"lenient": True}
"""Option to leave out what cannot be enforced; the caller then checks the answer."""
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


_ID = "/[a-zA-Z0-9]{9}/"
_CONSTRAIN = "<|constrain|>"
"""A control token that models may write before the format of arguments, in headers of calls."""


def call_grammar(
    how: ToolsFormat,
    tools: Sequence[Mapping[str, Any]],
    controls: Mapping[str, int],
    *,
    several: bool = False,
    answers: bool = False,
) -> str:
    """Write a grammar, in Lark's notation, of one call of one of these tools.

    Args:
        how: The model's format of calls.
        tools: Descriptions of the tools.
        controls: Ids of control tokens, by text.
        several: Whether several calls may follow each other.
        answers: Whether an answer may take the place of calls, by the grammar named `answer`.
    """
    writing = _GrammarWriter(how, controls)
    calls = [writing.call(number, function_of(tool)) for number, tool in enumerate(tools)]
    return "\n".join([writing.start(f"({' | '.join(calls)})", several=several, answers=answers), *writing.rules])


class _GrammarWriter:
    """A writer of the rules of one grammar."""

    def __init__(self, how: ToolsFormat, controls: Mapping[str, int]) -> None:
        self._how, self._grammar = how, how.grammar
        longest = sorted(controls, key=len, reverse=True)
        self._piece = re.compile("(" + "|".join(map(re.escape, [*longest, ID])) + ")")
        self._terminals = {ID: _ID, **{control: f"<[{number}]>" for control, number in controls.items()}}
        self.rules: list[str] = []

    def start(self, call: str, *, several: bool, answers: bool) -> str:
        """Return the start rule: calls with the marks around them, or an answer."""
        grammar, lead = self._grammar, self._frame(self._how.lead)
        before, between, after = map(self._frame, (grammar.before, grammar.between, grammar.closing))
        more = f"({between} {call})*" if several else ""
        # A call in a header is a turn of its own; in other formats, an answer has no lead as its header is complete.
        calls, lead = (call, lead) if self._how.is_headed else (f"{before} {call} {more} {after}", "")
        # Headers end without the space before the first word, so a model may start with one.
        opened = [f"{self._frame(mark)} {calls}" for mark in grammar.may_open] if several else []
        return "start: " + " | ".join([f'" "? {calls}', *opened, *([f"{lead} @answer"] if answers else [])])

    def call(self, number: int, tool: Mapping[str, Any]) -> str:
        """Add the rule of a call of one tool, without the marks around calls; return the rule's name."""
        grammar, name = self._grammar, str(tool["name"])
        parameters = without_annotations(tool.get("parameters") or {"type": "object"})
        schema = {"additionalProperties": False, **parameters}
        rule = f"call_{number}"
        if grammar.pairs is not None:
            core = f"{_literal(name)} {self._pairs(rule, schema)}"
        elif grammar.is_bare and grammar.before_name.count("{") == 1:
            core = self._object(rule, name, schema)
        else:
            quoted = json.dumps(name, ensure_ascii=False)[1:-1] if grammar.kind == "object" else name
            frames = (grammar.before_name, grammar.before_arguments, grammar.end)
            opening, middle, end = map(self._frame, frames)
            header = self._header(quoted) if self._how.is_headed else f"{opening} {_literal(quoted)} {middle}"
            core = f"{header} {self._json(rule, schema)} {end}"
        self.rules.append(f"{rule}: {core}")
        return rule

    def _object(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        """Return the rule of a call that is only JSON, as a schema of the whole object."""
        grammar = self._grammar
        written = grammar.before_name + json.dumps(name)[1:-1] + grammar.before_arguments + "{}" + grammar.end
        keys = {key: {"const": value} for key, value in json.loads(written).items()}
        keys[grammar.arguments_key] = {"$ref": "#/$defs/whole"}
        call = {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}
        return self._json(rule, {**call, "$defs": {"whole": _as_definition(schema)}})

    def _header(self, name: str) -> str:
        """Return a header with the tool's name before its channel, as templates write it, or after it, as models do."""
        grammar = self._grammar
        channel, blank, form = grammar.before_arguments.removesuffix(grammar.content).rpartition(" ")
        to, channel = f"{self._frame(grammar.before)} {_literal(name)}", self._frame(channel)
        constrain = f"{self._frame(_CONSTRAIN)}?" if _CONSTRAIN in self._terminals else ""
        return f"({to} {channel} | {channel} {to}) {_literal(blank)} {constrain} {self._frame(form + grammar.content)}"

    def _frame(self, text: str) -> str:
        """Return template text as terminals, control tokens by their ids."""
        parts = (part for part in self._piece.split(text) if part)
        return " ".join(self._terminals.get(part) or _literal(part) for part in parts)

    def _json(self, rule: str, schema: Mapping[str, Any]) -> str:
        # What tokens cannot enforce is checked when the call is made, as for unconstrained calls.
        self.rules.append(f"{rule}_json: %json {json.dumps({**schema, 'x-guidance': {**JSON_BLANKS, **LENIENT}})}")
        return f"{rule}_json"

    def _write_list(self, rule: str, written: Sequence[tuple[str, bool]], between: str) -> str:
        """Write a separated list of optional and required items, in order."""
        listed = '""'
        for number in range(len(written), 0, -1):
            item, must = written[number - 1]
            then = f"{rule}_more_{number + 1}" if number < len(written) else '""'
            # `_more_N` continues a list that has an item already; `listed` is the list from item N on if it has none.
            self.rules.append(f"{rule}_more_{number}: {between} {item} {then}" + ("" if must else f" | {then}"))
            listed = f"{item} {then}" + ("" if must else f" | {listed}")
        return f"({listed})"

    def _pairs(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Write keys and values between marks."""
        marks = self._grammar.pairs
        assert marks is not None
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties:
            return self._frame(marks.empty)
        written = []
        for number, name in enumerate(properties):
            part = _standalone(properties[name], schema)
            is_text = isinstance(part, Mapping) and part.get("type") == "string"
            value = _bare_text(part) if is_text else self._json(f"{rule}_{number}", part)
            written.append((f"{_literal(name)} {self._frame(marks.inner)} {value}", name in required))
        listed = self._write_list(rule, written, self._frame(marks.next))
        some = f"{self._frame(marks.first)} {listed} {self._frame(marks.last)}"
        return some if any(must for _, must in written) else f"({some} | {self._frame(marks.empty)})"


def _standalone(part: Any, schema: Mapping[str, Any]) -> Any:
    """Return a part of a schema as a schema of its own, with the whole among its definitions for references."""
    if not isinstance(part, Mapping) or '"$ref"' not in json.dumps(part):
        return part
    return {**_redirect_refs(part), "$defs": {"whole": _as_definition(schema)}}


def _as_definition(schema: Mapping[str, Any]) -> Any:
    """Return a schema as it is put among the definitions of another."""
    return _redirect_refs({name: value for name, value in schema.items() if name != "$id"})


def _redirect_refs(schema: Any) -> Any:
    """Return a schema with references redirected to `#/$defs/whole`."""
    if isinstance(schema, list):
        return [_redirect_refs(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    to = schema.get("$ref")
    moved = {"$ref": f"#/$defs/whole{to[1:]}"} if isinstance(to, str) and (to == "#" or to.startswith("#/")) else {}
    return {**{name: _redirect_refs(value) for name, value in schema.items()}, **moved}


def _bare_text(schema: Mapping[str, Any]) -> str:
    """Write an unquoted string before a mark: one of the schema's constants, or any of its length."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if named:
        return "(" + " | ".join(_literal(value) for value in named if isinstance(value, str)) + ")"
    return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _literal(text: str) -> str:
    """Return a text as a literal of Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


MakeConstraint = Callable[[frozenset[int]], TokenConstraint]
"""Makes a constraint for one answer, from the tokens that may end it; text tokens among them do not."""


class Grammars:
    """A compiler of constraints over the tokens of one model.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: Width of its logits, in tokens.
        ends: Its end tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> None:
        self._ends = frozenset(ends)
        self._bytes_of: Callable[[int], bytes] | None = getattr(tokenizer, "bytes_of", None)
        self._tokens: Any = _byte_tokens() if self._bytes_of else _make_tokens(tokenizer, vocabulary, self._ends)
        self._filler = None if self._bytes_of else GrammarMasks(self._tokens, vocabulary, self._ends)

    def compile(self, grammar: Grammar) -> MakeConstraint:
        """Compile a grammar of answers. Takes milliseconds; the result is not cached.

        Raises:
            GrammarError: It cannot constrain this model's answers; says why.
        """
        return partial(self._constraint, self._matcher(source_of(grammar), grammar.plain()))

    def compile_call(
        self,
        how: ToolsFormat,
        tools: Sequence[Mapping[str, Any]],
        controls: Mapping[int, str],
        answer: Grammar | None = None,
        *,
        several: bool = False,
    ) -> MakeConstraint:
        """Compile a grammar of one call of one of these tools. The result is not cached.

        Args:
            how: The model's format of calls.
            tools: Descriptions of the tools.
            controls: The model's control tokens.
            answer: Grammar of an answer that may take the place of one or more calls.
            several: Whether several calls may be made; always, if there is `answer`.

        Raises:
            GrammarError: The schema of a tool cannot constrain its arguments; says why.
        """
        numbers = {text: number for number, text in controls.items()}
        description = "a call of " + ", ".join(function_of(tool)["name"] for tool in tools)
        answers = answer is not None
        source = call_grammar(how, tools, numbers, several=several or answers, answers=answers)
        # Control tokens of calls alone: an answer's own grammar never allows any.
        marks = frozenset(number for number in controls if f"<[{number}]>" in source)
        if answer is not None:
            source, description = with_answer(source, answer), f"{description} or {answer.plain()!r}"
        return partial(self._constraint, self._matcher(source, description), marks=marks)

    def _matcher(self, source: str, description: Any) -> Any:
        matcher = llguidance().LLMatcher(self._tokens, source, log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(f"cannot compile {description!r} for this model: {matcher.get_error().strip()}")
        return matcher

    def _constraint(self, compiled: Any, ends: frozenset[int], marks: frozenset[int] = frozenset()) -> TokenConstraint:
        matcher = compiled.deep_copy()
        if self._bytes_of is not None:
            return ByteConstraint(matcher, self._bytes_of, ends)
        assert self._filler is not None
        return GrammarConstraint(self._filler, matcher, self._filler.usable_ends(ends), marks - ends)


def _make_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> Any:
    """Return llguidance's view of a Hugging Face tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidRequestError(
            f"tokenizer {type(tokenizer).__name__} does not give the bytes of its tokens, so that answers cannot be "
            "constrained: save the model with a tokenizer.json"
        )
    settings = json.loads(backend.to_str())
    settings |= {"truncation": None, "padding": None}
    for token in settings["added_tokens"]:
        # Also control tokens that are not special, such as tags of thoughts and tool calls: plain text never has them.
        token["special"] = token["special"] or is_control_text(token["content"])
    added = max((token["id"] for token in settings["added_tokens"]), default=0) + 1
    size = max(vocabulary, added, len(tokenizer))
    # Only ids below `len(tokenizer)`, else llguidance chooses one: our constraints know the end tokens themselves.
    end = sorted(token for token in ends if token < len(tokenizer))
    try:
        return llguidance().LLTokenizer(json.dumps(settings), n_vocab=size, eos_token=end or None)
    except ValueError as error:
        raise InvalidRequestError(
            f"the tokens of {type(tokenizer).__name__} cannot be constrained: {error}; use a model with byte-level "
            "tokens"
        ) from error


def _byte_tokens() -> Any:
    """Return a vocabulary of all bytes and an end token."""
    library = llguidance()
    return library.LLTokenizer(library._tokenizer.TokenizerWrapper(_Bytes()))


class _Bytes:
    """A tokenizer of bytes, with the attributes that llguidance reads."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
