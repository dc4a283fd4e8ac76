"""What a request asks: OpenAI's fields, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from choreo_agents import Engine, Sampling
from choreo_agents.chat import ChatCall, ChatRequest, Reuse, answer_format, described_tools, required_tools
from choreo_server.errors import RefusedError
from choreo_server.handles import unsealed
from choreo_server.limits import Limits
from choreo_server.messages import ToldMessage, chat_messages

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
Name = Annotated[str, Field(min_length=1, max_length=256)]


class ChoreoFields(BaseModel):
    """What no client of OpenAI's asks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parents: Annotated[list[str], Field(max_length=1024)] = []
    """Handles of earlier answers that are read as they were encoded, behind the instructions."""
    reuse: Reuse = "prefix"
    inherits: list[str] = []
    thread: Name | None = None
    """Keeps what is encoded, and so its handles good; without one they are for a while only."""
    agent: Name = "agent"
    thinking: bool | int | None = None
    """Whether it thinks before it answers, or for how many tokens at most."""
    priority: int = Field(0, ge=-100, le=100)


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    include_usage: bool | None = None


class ChatBody(BaseModel):
    """A request for a chat completion. What is in none of these fields is refused, as it could not be kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: Annotated[list[ToldMessage], FailFast(), Field(min_length=1)]
    model: str | None = None
    choreo: ChoreoFields = ChoreoFields()
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False: of several calls only the first is told."""
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    reasoning_effort: str | None = None
    """`"none"`: it does not think; else as its template has it, as there are no efforts."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    # Passed over: nothing here depends on them.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None

    def calls(self, engine: Engine, number: str, limits: Limits, adapter: str | None) -> list[ChatCall]:
        """One for each answer.

        Args:
            engine: Of the tenant who asks.
            number: Of the request.
            limits: Of the server.
            adapter: Which answers; None: the model alone.

        Raises:
            InvalidRequestError: It cannot be asked so. HandleError: A parent was not given to this tenant.
            RefusedError: It asks for too many answers, or names too many tools.
        """
        answers = self.n or 1
        if answers > limits.choices:
            raise RefusedError(400, f"n: at most {limits.choices} answers to one request", param="n")
        if len(self.tools or ()) > limits.messages:
            raise RefusedError(413, f"tools: at most {limits.messages} (--max-messages)", param="tools")
        messages, request = chat_messages(self.messages), self._request(engine, limits, adapter)
        return [
            ChatCall(engine, messages, _nth(request, place, f"{number}-{place}"), self.choreo.thread)
            for place in range(answers)
        ]

    def _request(self, engine: Engine, limits: Limits, adapter: str | None) -> Mapping[str, Any]:
        tools, required = required_tools(
            described_tools("the model", self.tools, "auto", is_free=True), self.tool_choice
        )
        guide = answer_format(self.response_format)
        if guide is not None and tools:
            raise RefusedError(400, "response_format: a call that has tools may say anything: leave one of them out")
        sampling = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        longest = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        sampling |= {} if longest is None else {"max_tokens": longest}
        sampling |= {} if guide is None else {"guide": guide}
        sampling |= {"stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)} if self.stop else {}
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        own = self.choreo
        thinking = False if self.reasoning_effort == "none" and own.thinking is None else own.thinking
        return {
            "tools": tools,
            "required": required,
            "sampling": Sampling.model_validate(sampling),
            "thinking": thinking,
            "counts_thoughts": True,
            "may_be_cut": True,
            "reuse": own.reuse,
            "inherits": tuple(own.inherits),
            "parents": tuple(unsealed(engine, word) for word in own.parents),
            "agent": own.agent,
            "adapter": adapter,
            "priority": own.priority,
            "timeout_s": limits.request_s,
        }


def _nth(request: Mapping[str, Any], place: int, number: str) -> ChatRequest:
    """What one of several answers is asked: each has random numbers of its own."""
    sampling: Sampling = request["sampling"]
    if place and sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sampling.seed + place})
    return ChatRequest(**{**request, "sampling": sampling}, message_id=number)
