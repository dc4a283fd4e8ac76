"""Builds an engine request from a chat model's settings and a call's arguments, which override them."""

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
"""Arguments that `bind` accepts."""


class Settings(Protocol):
    """Settings of a chat model that a request needs; see `ChatChoreo`."""

    logprobs: bool
    top_logprobs: int | None
    stop: list[str] | None
    timeout: float | None


def request_of(
    model: Settings,
    stop: Sequence[str] | None,
    overrides: Mapping[str, Any],
    message_id: str | None = None,
    parents: Sequence[MessageHandle | BaseMessage] = (),
) -> ChatRequest:
    """Return the engine request of a call.

    Args:
        model: Settings, for arguments that the call leaves out.
        stop: Stop texts of the call; None: the model's.
        overrides: Arguments of the call.
        message_id: Id of the answer.
        parents: Answers that the call merges.

    Raises:
        InvalidRequestError: An argument is unknown or invalid.
    """
    require_known("a call of ChatChoreo", overrides, (*SAMPLING, *CALL, *_OTHERS))

    def value(name: str) -> Any:
        return overrides[name] if overrides.get(name) is not None else getattr(model, name)

    tools = described_tools("the model", overrides.get("tools"), "auto")
    tools, required = required_tools(tools, overrides.get("tool_choice"))
    constraint = answer_format(overrides.get("response_format"))
    sampling: dict[str, Any] = {name: value(name) for name in SAMPLING if value(name) is not None}
    stops = [stop] if isinstance(stop, str) else model.stop if stop is None else stop
    sampling |= {"stop": tuple(stops)} if stops else {}
    sampling |= {"constraint": constraint} if constraint is not None else {}
    if value("logprobs"):
        sampling["logprobs"] = value("top_logprobs") or 0
    call: dict[str, Any] = {name: tuple(value(name)) if isinstance(value(name), list) else value(name) for name in CALL}
    return ChatRequest(
        tools=tools,
        required=required,
        sampling=Sampling(**sampling),
        timeout_s=value("timeout"),
        message_id=message_id,
        parents=tuple(parents),
        **call,
    )
