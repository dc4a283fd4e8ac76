"""Response formats and choices of agents, and the channel that their answers are written to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from choreo_agents.chat import schema_of_type
from choreo_agents.errors import ConstraintError, InvalidRequestError
from choreo_agents.models import require_grammar
from choreo_agents.sampling import Grammar
from choreo_agents.sampling.constraints import Kind

PARSED = "parsed"
"""Key of a message's parsed JSON in `additional_kwargs`, as in LangChain's structured output."""
OWN_CHANNELS = ("handles", "messages")


@dataclass(frozen=True)
class Output:
    """Response format of an agent's messages.

    Args:
        speaker: Name of the agent.
        grammar: Grammar that constrains the messages.
        adapter: Adapter of the type that their JSON is validated by, if the format is a type.
    """

    speaker: str
    grammar: Grammar
    adapter: TypeAdapter[Any] | None = None

    def parse(self, text: str) -> dict[str, Any]:
        """Return additional fields of a message: its parsed JSON as plain values, if the format is JSON.

        Raises:
            ConstraintError: The type rejects the text, or it has numbers that a checkpoint cannot hold.
        """
        if self.grammar.kind != "json_schema":
            return {}
        try:
            value = json.loads(text) if self.adapter is None else self.adapter.validate_json(text)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the answer of {self.speaker!r} does not match its format: {error}", text) from error
        if self.adapter is not None:
            # Round trip: under the schema's aliases, and without computed fields.
            value = self.adapter.dump_python(value, mode="json", by_alias=True, round_trip=True)
        large = next(_too_large(value), None)
        if large is not None:
            raise ConstraintError(
                f"the answer of {self.speaker!r} contains {large!r}, a number that checkpoints cannot store: limit it "
                "in the schema",
                text,
            )
        return {PARSED: value}


def output_of(name: str, spec: Any) -> Output | None:
    """Return the response format of an agent; None: free text.

    Args:
        name: Name of the agent.
        spec: A type for pydantic, a JSON schema, a compiled regular expression, or a constraint, `{"regex": "..."}`.

    Raises:
        GrammarError: It cannot be compiled.
        InvalidRequestError: It is none of these, or the extra `guided` is not installed.
    """
    if spec is None:
        return None
    adapter = None
    try:
        if isinstance(spec, Grammar):
            grammar = spec
        elif isinstance(spec, re.Pattern):
            grammar = _regex(name, spec)
        elif isinstance(spec, Mapping):
            is_description = len(spec) == 1 and set(spec) <= set(get_args(Kind))
            grammar = Grammar.model_validate(spec if is_description else {"json_schema": dict(spec)})
        elif isinstance(spec, str):
            raise InvalidRequestError(
                f"the output of {name!r} is a string, {spec!r}: pass {{'regex': ...}}, or {{'grammar': ...}} for a "
                "Lark grammar"
            )
        else:
            adapter = TypeAdapter(spec)
            grammar = Grammar.model_validate({"json_schema": schema_of_type(adapter.json_schema())})
    except (PydanticUserError, ValidationError) as error:
        raise InvalidRequestError(
            f"the output of {name!r} must be a pydantic model, a JSON schema, {{'regex': ...}} or {{'grammar': ...}}, "
            f"not {spec!r}: {error}"
        ) from error
    require_grammar(grammar)
    return Output(name, grammar, adapter)


def _too_large(value: Any) -> Iterator[int | float]:
    """Yield numbers that Python's JSON parser accepts, and that msgpack or strict JSON cannot represent."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _too_large(item)
    elif (isinstance(value, int) and not -(1 << 63) <= value < 1 << 64) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield value


def _regex(name: str, pattern: re.Pattern[Any]) -> Grammar:
    if not isinstance(pattern.pattern, str) or pattern.flags & ~re.UNICODE:
        raise InvalidRequestError(
            f"the output of {name!r} is a regular expression of bytes or with flags, {pattern!r}: pass a string, with "
            "flags inside, such as '(?i)yes|no'"
        )
    return Grammar(kind="regex", text=pattern.pattern)
