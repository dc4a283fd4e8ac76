"""What a call asks, of what its model says and what the call says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from langchain_core.messages import BaseMessage

from choreo_agents import MessageHandle, Sampling
from choreo_agents.arguments import require_known
from choreo_agents.chat import ChatRequest, answer_format, described_tools, required_tools

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "seed",
)  # fmt: skip
CALL = ("thinking", "reuse", "inherits", "agent", "adapter", "priority")
_OTHERS = (
    "model", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "timeout", "strict", "stream",
    "place", "merges",
)  # fmt: skip


BOUND = (*SAMPLING, *CALL, *_OTHERS, "stop", "config", "ls_structured_output_format")
"""What may be bound."""


class Settings(Protocol):
    """What is asked of a chat model about its calls; see `ChatChoreo`."""

    logprobs: bool
    top_logprobs: int | None
    stop: list[str] | None
    timeout: float | None


def request_of(
    model: Settings,
    stop: Sequence[str] | None,
    said: Mapping[str, Any],
    message_id: str | None = None,
    parents: Sequence[MessageHandle | BaseMessage] = (),
) -> ChatRequest:
    """What a call of a chat model asks.

    Args:
        model: Says it where the call does not.
        stop: Texts to stop at, if the call says so.
        said: By the call.
        message_id: Of its answer.
        parents: What it merges.

    Raises:
        InvalidRequestError: It cannot be asked so.
    """
    require_known("a call of ChatChoreo", said, (*SAMPLING, *CALL, *_OTHERS))

    def found(name: str) -> Any:
        return said[name] if said.get(name) is not None else getattr(model, name)

    tools = described_tools("the model", said.get("tools"), "auto")
    tools, required = required_tools(tools, said.get("tool_choice"))
    constraint = answer_format(said.get("response_format"))
    sampling: dict[str, Any] = {name: found(name) for name in SAMPLING if found(name) is not None}
    stops = [stop] if isinstance(stop, str) else model.stop if stop is None else stop
    sampling |= {"stop": tuple(stops)} if stops else {}
    sampling |= {"constraint": constraint} if constraint is not None else {}
    if found("logprobs"):
        sampling["logprobs"] = found("top_logprobs") or 0
    call: dict[str, Any] = {name: tuple(found(name)) if isinstance(found(name), list) else found(name) for name in CALL}
    return ChatRequest(
        tools=tools,
        required=required,
        sampling=Sampling(**sampling),
        timeout_s=found("timeout"),
        message_id=message_id,
        parents=tuple(parents),
        **call,
    )
