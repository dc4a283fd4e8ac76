"""What a caller asks of a chat model, beside its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from langchain_core.messages import BaseMessage

from choreo_agents.chat.tools import Described
from choreo_agents.engine import Thinking
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat
from choreo_agents.sampling import Sampling

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
    """If true, an answer that its sampling's `guide` or a required tool leads, and that `max_tokens` cuts, is told with
    the finish reason `"length"`; else it is a `GuideError`."""
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
