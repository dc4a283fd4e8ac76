"""What a caller asks of a chat model, beside its messages: what its answer must be, how it starts, and what is thought
before it."""

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
"""Keywords whose values are no schemas."""

_BESIDE = {"name", "description", "strict"}
"""Keys that may stand beside a schema."""


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, unless it says itself what others may be."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {keyword: value if keyword in _DATA else closed(value) for keyword, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def schema_of_type(schema: Any) -> dict[str, Any]:
    """A type's schema as it leads answers, which the type checks: closed, without what tokens cannot be held to."""
    return {**closed(schema), "x-guidance": {"lenient": True}}


def answer_format(asked: Any) -> Grammar | None:
    """What leads an answer of a format; None: it may be anything.

    Args:
        asked: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": ...}`, where
            the schema stands by itself or, as OpenAI has it, as `schema` beside a name; or a description of a
            constraint.

    Raises:
        InvalidRequestError: It is none of these.
    """
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if asked is None or asked == {"type": "text"}:
        return None
    if asked == {"type": "json_object"}:
        return Grammar.model_validate({"json_schema": {"type": "object"}})
    if kind == "json_schema":
        said = asked.get("json_schema")
        schema = said.get("schema", said if said.keys() - _BESIDE else None) if isinstance(said, Mapping) else None
        if not isinstance(schema, Mapping) or len(asked) > 2:
            raise InvalidRequestError(
                'response_format has no schema: {"type": "json_schema", "json_schema": {"name": "...", "schema": '
                f"{{...}}}}}}, not {asked!r}"
            )
        return Grammar.model_validate({"json_schema": schema})
    if isinstance(asked, Mapping) and kind is None and len(asked) == 1:
        return Grammar.model_validate(asked)
    raise InvalidRequestError(
        'response_format must be {"type": "json_object"}, {"type": "json_schema", "json_schema": {...}} or a '
        f'constraint, such as {{"regex": "yes|no"}}, not {asked!r}'
    )


def answer_header(chat: ChatFormat, name: str | None, *, thinks: bool, calls: bool) -> PromptText:
    """What the decode of an answer starts with.

    Args:
        chat: The model's.
        name: Who speaks. Not written before thoughts, nor by who may call: calls stand right behind the header.
        thinks: Whether thoughts come first.
        calls: Whether it may call tools.
    """
    if thinks:
        return chat.header(None, thinking=True)
    if calls:
        return PromptText.special(_calling(chat)) if _calling(chat) else chat.header(None)
    return chat.header(name)


def thinking_before(chat: ChatFormat, name: str | None, budget: int, *, calls: bool) -> Thinking:
    """How a model thinks before such an answer; see `answer_header`.

    Args:
        budget: Tokens of thoughts at most.
    """
    if not calls:
        return Thinking.of(chat, name, budget)
    # Where a header says whether a call follows, or an answer, it is the model's to write.
    usual, opening = Thinking.of(chat, None, budget), PromptText.special(_calling(chat))
    if not opening or chat.thoughts is None:
        return usual
    end = chat.thoughts.close.partition(opening.text)[0].strip()
    return replace(usual, end=end, before="", after=opening, answer=opening)


def _calling(chat: ChatFormat) -> str:
    """What a turn starts with where its header says whether it calls; empty where headers say nothing of it."""
    how = tools_format(chat)
    return how.opening if how.is_headed else ""


Reuse = Literal["prefix", "anywhere"]
"""Of encodings: those of the longest prefix that is known, as exact as if all was encoded anew; or also those of
messages that stand elsewhere, as graphs have them."""


@dataclass(frozen=True)
class ChatRequest:
    """Of one call."""

    tools: Described = ()
    """What may be called."""
    required: tuple[str, ...] = ()
    """Tools one of which must be called; none: it is the model's to say."""
    sampling: Sampling = Sampling()
    """Its `stop` is no part of the answer here."""
    thinking: bool | int | None = None
    """Whether it thinks before it answers, or for how many tokens at most; None: as its template has it."""
    effort: str | None = None
    """The `reasoning_effort` that the model's chat template is told; None: none."""
    counts_thoughts: bool = False
    """If true, the sampling's `max_tokens` bounds thoughts and answer together."""
    may_be_cut: bool = False
    """If true, an answer that its sampling's `constraint` or a required tool leads, and that `max_tokens` cuts, is told
    with the finish reason `"length"`; else it is a `ConstraintError`."""
    reuse: Reuse = "prefix"
    inherits: tuple[str, ...] = ()
    """Names of messages of the same thread that are not in this call, and that what is reused may have attended to:
    `"parent.system"`."""
    parents: tuple[MessageHandle | BaseMessage, ...] = ()
    """Messages of the same tenant that are read as they were encoded, and others in their words: behind the call's
    instructions, before all else. No template knows of them, so that turns are put together by our format of it."""
    agent: str = "agent"
    """Who speaks: its messages are named by it."""
    adapter: str | None = None
    """See `Decode`."""
    priority: int = 0
    """See `Decode`."""
    timeout_s: float | None = None
    """See `Decode`."""
    message_id: str | None = field(default=None, compare=False)
    """Of the answer."""

    def __post_init__(self) -> None:
        if self.reuse not in ("prefix", "anywhere"):
            raise InvalidRequestError(f'reuse must be "prefix" or "anywhere", not {self.reuse!r}')
        if isinstance(self.inherits, str) or not all(isinstance(name, str) for name in self.inherits):
            raise InvalidRequestError(
                f'inherits must be names in a list, as in ("parent.system",), not {self.inherits!r}'
            )
        if self.inherits and self.reuse == "prefix":
            raise InvalidRequestError(
                'what is inherited has another prefix: use reuse="anywhere", or leave inherits out'
            )

        if self.effort is not None and (self.parents or self.reuse == "anywhere"):
            raise InvalidRequestError(
                f"reasoning_effort={self.effort!r} is told with whole prompts alone: leave it out, or parents and "
                'reuse="anywhere"'
            )

    def thinks(self, chat: ChatFormat) -> bool:
        """Whether a model thinks before it answers.

        Raises:
            InvalidRequestError: It is to, and its template knows of no thoughts.
        """
        if chat.thoughts is None and self.thinking:
            raise InvalidRequestError("the chat template of the model knows of no thoughts: leave thinking out")
        if self.thinking is None:
            return chat.thoughts is not None and chat.thoughts.usual
        return bool(self.thinking)

    def budget(self, room: int) -> int:
        """Tokens of thoughts at most: the usual number is lowered to the room that there is."""
        asked = self.thinking if isinstance(self.thinking, int) and not isinstance(self.thinking, bool) else None
        return max(1, min(Thinking.budget, room)) if asked is None else asked
