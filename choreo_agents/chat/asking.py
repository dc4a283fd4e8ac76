"""Options of a chat-model call beside its messages: response format, answer header and thinking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from langchain_core.messages import BaseMessage

from choreo_agents.chat.tools import Described
from choreo_agents.engine import Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, PromptText, tools_format
from choreo_agents.sampling import Grammar, Sampling

_DATA = ("const", "default", "enum", "example", "examples")
"""JSON-schema keywords whose values are data, not schemas."""

_BESIDE = {"name", "description", "strict"}
"""Keys that OpenAI's `response_format` allows beside `schema`."""


def close_schema(schema: Any) -> Any:
    """Return a schema whose objects allow no other properties, unless it sets `additionalProperties` itself."""
    if isinstance(schema, list):
        return [close_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {keyword: value if keyword in _DATA else close_schema(value) for keyword, value in schema.items()}
    if isinstance(result.get("properties"), dict) and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def schema_of_type(schema: Any) -> dict[str, Any]:
    """Return the schema that constrains answers of a type: closed, and lenient where tokens cannot be constrained.

    The type validates the answer afterwards.
    """
    return {**close_schema(schema), "x-guidance": {"lenient": True}}


def answer_format(spec: Any) -> Grammar | None:
    """Return the grammar of a response format; None: any text is allowed.

    Args:
        spec: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": ...}` with the
            schema itself or, as OpenAI has it, `schema` beside a name; or a constraint such as `{"regex": ...}`.

    Raises:
        InvalidRequestError: `spec` is none of these.
    """
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    if spec is None or spec == {"type": "text"}:
        return None
    if spec == {"type": "json_object"}:
        return Grammar.model_validate({"json_schema": {"type": "object"}})
    if kind == "json_schema":
        body = spec.get("json_schema")
        schema = body.get("schema", body if body.keys() - _BESIDE else None) if isinstance(body, Mapping) else None
        if not isinstance(schema, Mapping) or len(spec) > 2:
            raise InvalidRequestError(
                'response_format has no schema: pass {"type": "json_schema", "json_schema": {"name": "...", "schema": '
                f"{{...}}}}}}, not {spec!r}"
            )
        return Grammar.model_validate({"json_schema": schema})
    if isinstance(spec, Mapping) and kind is None and len(spec) == 1:
        return Grammar.model_validate(spec)
    raise InvalidRequestError(
        'response_format must be {"type": "json_object"}, {"type": "json_schema", "json_schema": {...}} or a '
        f'constraint, such as {{"regex": "yes|no"}}, not {spec!r}'
    )


def answer_header(chat: ChatFormat, name: str | None, *, thinks: bool, calls: bool) -> PromptText:
    """Return the header that the decode of an answer starts with.

    Args:
        chat: Chat format of the model.
        name: Speaker. Left out before thoughts and where tools may be called: calls follow the header directly.
        thinks: Whether thoughts come first.
        calls: Whether tools may be called.
    """
    if thinks:
        return chat.header(None, thinking=True)
    if calls:
        return PromptText.special(_calling(chat)) if _calling(chat) else chat.header(None)
    return chat.header(name)


def thinking_before(chat: ChatFormat, name: str | None, *, calls: bool) -> Thinking:
    """Return how a model thinks before an answer. The arguments are those of `answer_header`."""
    if not calls:
        return Thinking.of(chat, name)
    # Where the header itself says whether a call or an answer follows, the model has to sample it.
    default, opening = Thinking.of(chat, None), PromptText.special(_calling(chat))
    if not opening or chat.thoughts is None:
        return default
    end = chat.thoughts.close.partition(opening.text)[0].strip()
    return replace(default, end=end, before="", after=opening, answer=opening)


def with_budget(thinking: Thinking, requested: Thinks, free_positions: int) -> Thinking:
    """Return the same with the maximum number of thought tokens: as requested, else the default cut to the free
    positions."""
    if isinstance(requested, int) and not isinstance(requested, bool):
        return replace(thinking, budget=requested)
    return replace(thinking, budget=max(1, min(Thinking.budget, free_positions)))


def thinks(chat: ChatFormat, requested: Thinks, agent: str) -> bool:
    """Return whether a model thinks before it answers.

    Raises:
        InvalidRequestError: Thinking is requested, and the model's template has no thoughts.
    """
    if chat.thoughts is None and requested:
        raise InvalidRequestError(
            f"{agent!r} has `thinking`, but the chat template of its model does not support it: leave it out"
        )
    if requested is None:
        return chat.thoughts is not None and chat.thoughts.usual
    return bool(requested)


def _calling(chat: ChatFormat) -> str:
    """Return the opening of a turn whose header announces calls; empty if headers do not distinguish them."""
    how = tools_format(chat)
    return how.opening if how.is_headed else ""


Thinks = bool | int | None
"""Whether a model thinks before it answers, or its maximum number of thought tokens; None: template's default."""
Reuse = Literal["prefix", "anywhere"]
"""Reuse of cached KV: `"prefix"` takes the longest cached prefix and is exact; `"anywhere"` also repositions messages
that stood elsewhere, as graphs do."""


@dataclass(frozen=True)
class ChatRequest:
    """Options of one chat-model call."""

    tools: Described = ()
    """Tools that the model may call."""
    required: tuple[str, ...] = ()
    """Names of tools of which one must be called; empty: the model decides."""
    sampling: Sampling = Sampling()
    """Sampling of the answer. Its `stop` texts are cut off the answer."""
    thinking: Thinks = None
    effort: str | None = None
    """`reasoning_effort` for the model's chat template; None: not passed."""
    counts_thoughts: bool = False
    """If true, the sampling's `max_tokens` bounds thoughts and answer together."""
    may_be_cut: bool = False
    """If true, a constrained answer or required call that `max_tokens` cuts has the finish reason `"length"`; else it
    raises `ConstraintError`."""
    reuse: Reuse = "prefix"
    inherits: tuple[str, ...] = ()
    """Names of messages of the same thread, such as `"parent.system"`, that are not in this call but that reused KV may
    have attended to."""
    parents: tuple[MessageHandle | BaseMessage, ...] = ()
    """Messages of the same tenant that follow the call's system prompt: handles as they were encoded, others as text.
    No chat template can render handles, so with parents our own format renders the turns."""
    agent: str = "agent"
    """Speaker: messages of the call are named after it."""
    adapter: str | None = None
    """See `Decode`."""
    priority: int = 0
    """See `Decode`."""
    timeout_s: float | None = None
    """See `Decode`."""
    message_id: str | None = field(default=None, compare=False)
    """Id of the answer."""

    def __post_init__(self) -> None:
        if self.reuse not in ("prefix", "anywhere"):
            raise InvalidRequestError(f'reuse must be "prefix" or "anywhere", not {self.reuse!r}')
        if isinstance(self.inherits, str) or not all(isinstance(name, str) for name in self.inherits):
            raise InvalidRequestError(
                f'inherits must be a list of names, such as ("parent.system",), not {self.inherits!r}'
            )
        if self.inherits and self.reuse == "prefix":
            raise InvalidRequestError(
                'inherited prompts start with another prefix: use reuse="anywhere", or leave inherits out'
            )

        if self.effort is not None and (self.parents or self.reuse == "anywhere"):
            raise InvalidRequestError(
                f"reasoning_effort={self.effort!r} works with whole prompts only: leave it out, or leave out parents "
                'and reuse="anywhere"'
            )
