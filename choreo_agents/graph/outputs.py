"""Response formats and choices of agents, and the channel that their answers are written to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from langchain_core.messages import AIMessage
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from choreo_agents.chat import (
    CompiledConstraints,
    Described,
    ToolChoice,
    required_call,
    required_tools,
    schema_of_type,
)
from choreo_agents.errors import ConstraintError, InvalidRequestError
from choreo_agents.models import LoadedModel, require_grammar
from choreo_agents.sampling import Grammar, Sampling
from choreo_agents.sampling.constraints.grammar import Kind

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
            raise ConstraintError(f"what {self.speaker!r} said is not the output that it has: {error}", text) from error
        if self.adapter is not None:
            # Round trip: under the schema's aliases, and without computed fields.
            value = self.adapter.dump_python(value, mode="json", by_alias=True, round_trip=True)
        large = next(_too_large(value), None)
        if large is not None:
            raise ConstraintError(
                f"what {self.speaker!r} said holds {large!r}, which is no number that a checkpoint can carry: bound it "
                "in the schema",
                text,
            )
        return {PARSED: value}


class Writer(Protocol):
    """Agent with a response format, as this module needs it."""

    name: str
    choices: Sequence[str] | Callable[[Any], Sequence[str]] | None
    answer_prefix: str
    response_format: Output | None
    output_key: str | None
    writes_list: bool
    sampling: Sampling
    tools: Described
    tool_choice: ToolChoice


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
                f"the output of {name!r} is a text, {spec!r}: write {{'regex': ...}}, or {{'grammar': ...}} if it is "
                "one in Lark's notation"
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


def require_writer(agent: Writer) -> None:
    """Raise `InvalidRequestError` if an agent has two constraints, or writes a channel that it may not."""
    sources = {
        "choices": agent.choices is not None,
        "response_format": agent.response_format is not None,
        "a constraint of its sampling": agent.sampling.constraint is not None,
        "choices of its sampling": bool(agent.sampling.choices),
    }
    twice = [source for source, is_set in sources.items() if is_set]
    if agent.tools and (agent.choices is not None or agent.sampling.choices):
        raise InvalidRequestError(
            f"{agent.name!r} has tools, and choices for all that it may say: no call is among them. Write them as "
            "response_format={'regex': 'yes|no'}, which may stand beside tools, or leave one of them out"
        )
    if len(twice) > 1:
        raise InvalidRequestError(f"{agent.name!r} is told twice what it may say: leave out {' or '.join(twice)}")
    if (key := agent.output_key) is not None and (not isinstance(key, str) or key in ("", *OWN_CHANNELS)):
        raise InvalidRequestError(
            f"{agent.name!r} cannot write {key!r}: name a channel of your own in the graph's state"
        )


def sampling_of(agent: Writer, state: Any) -> Sampling:
    """Return an agent's sampling, with its response format or its choices for this state."""
    if agent.response_format is not None:
        return agent.sampling.model_copy(update={"constraint": agent.response_format.grammar})
    choices = agent.choices(state) if callable(agent.choices) else agent.choices
    if not choices:
        return agent.sampling
    if isinstance(choices, str) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise InvalidRequestError(
            f"the choices of {agent.name!r} must be texts that say something, in a list, not {choices!r}"
        )
    # Text in graph state is stripped, and routes compare it with the choices.
    stripped = tuple(dict.fromkeys(choice.strip() for choice in choices))
    return agent.sampling.model_copy(update={"choices": stripped, "answer_prefix": agent.answer_prefix})


def channel_update(agent: Writer, messages: Sequence[AIMessage]) -> dict[str, Any]:
    """Return the update of an agent's output channel: the parsed output or text of its message, or a list of them.

    Empty if it calls tools instead of answering in its response format.
    """
    if agent.output_key is None:
        return {}
    if agent.response_format is not None:
        messages = [message for message in messages if not (message.tool_calls or message.invalid_tool_calls)]
    values = [message.additional_kwargs.get(PARSED, str(message.text)) for message in messages]
    if not values:
        return {}
    return {agent.output_key: values if agent.writes_list else values[0]}


def require_served(node: str, agent: Writer, model: LoadedModel, channels: Iterable[str]) -> None:
    """Raise unless a model can be constrained to an agent's response format and calls, and its channel exists.

    Raises:
        GrammarError: The format cannot be compiled for this model.
        InvalidRequestError: The model's tokens cannot be constrained, or the graph's state lacks the channel.
    """
    if agent.output_key is not None and agent.output_key not in channels:
        available = ", ".join(name for name in channels if name not in OWN_CHANNELS)
        raise InvalidRequestError(
            f"node {node!r} writes {agent.output_key!r}, which the graph's state has not: it has "
            f"{available or 'no channels of its own'}; add one to the state's schema"
        )
    if agent.response_format is not None:
        CompiledConstraints(model).of(agent.response_format.grammar, agent.tools)
    required_call(model, *required_tools(agent.tools, agent.tool_choice))


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
            f"the output of {name!r} is a regular expression of bytes or with flags, {pattern!r}: give one of text, "
            "and write flags into it, as in '(?i)yes|no'"
        )
    return Grammar(kind="regex", text=pattern.pattern)
