"""What an agent's messages must be, and what of them goes into channels of the graph's state."""

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
"""In a message's `additional_kwargs`, where LangChain's structured output is: what its JSON says."""
OWN_CHANNELS = ("handles", "messages")


@dataclass(frozen=True)
class Output:
    """What each message of an agent must be.

    Args:
        speaker: Whose they are.
        grammar: Leads them.
        adapter: Of the type that their JSON is of, if a type says what they must be.
    """

    speaker: str
    grammar: Grammar
    adapter: TypeAdapter[Any] | None = None

    def noted(self, words: str) -> dict[str, Any]:
        """What is noted beside a message's words: its JSON, as plain values.

        Raises:
            ConstraintError: It is not what the type asks for beyond what a schema can say, or holds numbers that state
                cannot.
        """
        if self.grammar.kind != "json_schema":
            return {}
        try:
            said = json.loads(words) if self.adapter is None else self.adapter.validate_json(words)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(
                f"what {self.speaker!r} said is not the output that it has: {error}", words
            ) from error
        if self.adapter is not None:
            # As it can be read in again: under the names that the schema has, and without what is computed of others.
            said = self.adapter.dump_python(said, mode="json", by_alias=True, round_trip=True)
        large = next(_too_large(said), None)
        if large is not None:
            raise ConstraintError(
                f"what {self.speaker!r} said holds {large!r}, which is no number that a checkpoint can carry: bound it "
                "in the schema",
                words,
            )
        return {PARSED: said}


class Writer(Protocol):
    """What is asked of an agent about its answers."""

    name: str
    choices: Sequence[str] | Callable[[Any], Sequence[str]] | None
    answer_prefix: str
    response_format: Output | None
    output_key: str | None
    writes_list: bool
    sampling: Sampling
    tools: Described
    tool_choice: ToolChoice


def output_of(name: str, given: Any) -> Output | None:
    """What an agent's messages must be; None: anything.

    Args:
        name: The agent's.
        given: A type that pydantic knows, a JSON schema, a compiled regular expression, or a description.

    Raises:
        GrammarError: No message can be led by it.
        InvalidRequestError: It is none of these, or the extra `guided` is not installed.
    """
    if given is None:
        return None
    adapter = None
    try:
        if isinstance(given, Grammar):
            grammar = given
        elif isinstance(given, re.Pattern):
            grammar = _regex(name, given)
        elif isinstance(given, Mapping):
            is_description = len(given) == 1 and set(given) <= set(get_args(Kind))
            grammar = Grammar.model_validate(given if is_description else {"json_schema": dict(given)})
        elif isinstance(given, str):
            raise InvalidRequestError(
                f"the output of {name!r} is a text, {given!r}: write {{'regex': ...}}, or {{'grammar': ...}} if it is "
                "one in Lark's notation"
            )
        else:
            adapter = TypeAdapter(given)
            grammar = Grammar.model_validate({"json_schema": schema_of_type(adapter.json_schema())})
    except (PydanticUserError, ValidationError) as error:
        raise InvalidRequestError(
            f"the output of {name!r} must be a pydantic model, a JSON schema, {{'regex': ...}} or {{'grammar': ...}}, "
            f"not {given!r}: {error}"
        ) from error
    require_grammar(grammar)
    return Output(name, grammar, adapter)


def require_writer(agent: Writer) -> None:
    """Raise `InvalidRequestError` if an agent says twice what its messages are, or writes what is not its own."""
    asked = {
        "choices": agent.choices is not None,
        "response_format": agent.response_format is not None,
        "a constraint of its sampling": agent.sampling.constraint is not None,
        "choices of its sampling": bool(agent.sampling.choices),
    }
    twice = [what for what, is_there in asked.items() if is_there]
    if agent.tools and (agent.choices is not None or agent.sampling.choices):
        raise InvalidRequestError(
            f"{agent.name!r} has tools, and choices for all that it may say: no call is among them. Write them as "
            "response_format={'regex': 'yes|no'}, which may stand beside tools, or leave one of them out"
        )
    if len(twice) > 1:
        raise InvalidRequestError(f"{agent.name!r} is told twice what it may say: leave out {' or '.join(twice)}")
    if agent.output_key is not None and (
        not isinstance(agent.output_key, str) or agent.output_key in ("", *OWN_CHANNELS)
    ):
        raise InvalidRequestError(
            f"{agent.name!r} cannot write {agent.output_key!r}: name a channel of your own in the graph's state"
        )


def sampling_of(agent: Writer, state: Any) -> Sampling:
    """An agent's sampling, with what it may say now."""
    if agent.response_format is not None:
        return agent.sampling.model_copy(update={"constraint": agent.response_format.grammar})
    choices = agent.choices(state) if callable(agent.choices) else agent.choices
    if not choices:
        return agent.sampling
    if isinstance(choices, str) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise InvalidRequestError(
            f"the choices of {agent.name!r} must be texts that say something, in a list, not {choices!r}"
        )
    # Words in graph state have no spaces around them: what is chosen is compared with what is said.
    stripped = tuple(dict.fromkeys(choice.strip() for choice in choices))
    return agent.sampling.model_copy(update={"choices": stripped, "answer_prefix": agent.answer_prefix})


def written(agent: Writer, messages: Sequence[AIMessage]) -> dict[str, Any]:
    """What an agent writes into a channel of its own: what its message says, or a list of what its messages say.

    One that calls, and has an output for when it does not, writes nothing.
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
    """Raise unless a node's agent can be led to its output or its call by a model, and write it.

    Raises:
        GrammarError: Its output is none for this model.
        InvalidRequestError: The model's tokens cannot be guided; or its graph's state has no such channel.
    """
    if agent.output_key is not None and agent.output_key not in channels:
        there = ", ".join(name for name in channels if name not in OWN_CHANNELS)
        raise InvalidRequestError(
            f"node {node!r} writes {agent.output_key!r}, which the graph's state has not: it has "
            f"{there or 'no channels of its own'}; add one to the state's schema"
        )
    if agent.response_format is not None:
        CompiledConstraints(model).of(agent.response_format.grammar, agent.tools)
    required_call(model, *required_tools(agent.tools, agent.tool_choice))


def _too_large(said: Any) -> Iterator[int | float]:
    """Numbers that JSON can write, and msgpack or JSON cannot carry on."""
    if isinstance(said, dict | list):
        for each in said.values() if isinstance(said, dict) else said:
            yield from _too_large(each)
    elif (isinstance(said, int) and not -(1 << 63) <= said < 1 << 64) or (
        isinstance(said, float) and not math.isfinite(said)
    ):
        yield said


def _regex(name: str, pattern: re.Pattern[Any]) -> Grammar:
    if not isinstance(pattern.pattern, str) or pattern.flags & ~re.UNICODE:
        raise InvalidRequestError(
            f"the output of {name!r} is a regular expression of bytes or with flags, {pattern!r}: give one of text, "
            "and write flags into it, as in '(?i)yes|no'"
        )
    return Grammar(kind="regex", text=pattern.pattern)
