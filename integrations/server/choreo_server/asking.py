"""Parses requests for chat completions, with OpenAI's fields and ours, and converts them to calls of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from choreo_agents import Engine, Sampling
from choreo_agents.chat import ChatCall, ChatRequest, Reuse, answer_format, described_tools, required_tools
from choreo_server.errors import RefusedError
from choreo_server.fields import Fields, Harmless, Instead
from choreo_server.handles import unseal_handle
from choreo_server.limits import Limits
from choreo_server.messages import MessageIn, chat_messages

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES, "seed")
_THOUGHTS = (
    'set `reasoning_effort: "none"`, or `choreo.thinking` to whether it thinks, or to the most tokens of its thoughts: '
    '`"choreo": {"thinking": false}`'
)
_FORM = '`response_format` constrains answers: `json_schema`, or a constraint such as `{"regex": "yes|no"}`'
Name = Annotated[str, Field(min_length=1, max_length=256)]


class ChoreoFields(Fields):
    """Fields of the `choreo` object, which extend OpenAI's protocol."""

    parents: Annotated[list[str], Field(max_length=1024)] | None = None
    """Handles of earlier answers, whose KV is read after the system messages."""
    reuse: Reuse | None = None
    inherits: list[str] | None = None
    thread: Name | None = None
    """Thread that leases KV and so keeps its handles valid; without one they are valid only for a while."""
    agent: Name | None = None
    thinking: bool | int | None = None
    """True or False lets the model think before it answers, or not; a number bounds the tokens of its thoughts."""
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    """whether a stream ends with its usage; answers that are not streamed always have it"""
    include_obfuscation: Annotated[Any, Harmless("answers are not padded")] = None


class ChatBody(Fields):
    """A request for a chat completion."""

    messages: Annotated[list[MessageIn], FailFast(), Field(min_length=1)]
    """the conversation"""
    model: str | None = None
    """the one that is served; may be left out"""
    choreo: ChoreoFields | None = ChoreoFields()
    """[fields beyond OpenAI's](#fields-of-choreo)"""
    tools: list[dict[str, Any]] | None = None
    """functions that may be called"""
    tool_choice: str | dict[str, Any] | None = None
    """`"auto"`, `"none"`, `"required"`, or one of them"""
    parallel_tool_calls: bool | None = None
    """false: of several calls only the first is told"""
    response_format: dict[str, Any] | None = None
    """`json_object`, `json_schema` with a schema, `text`, or a constraint such as `{"regex": "yes|no"}`"""
    stream: bool | None = None
    """whether the answer is told as it comes"""
    stream_options: StreamOptions | None = None
    """how"""
    n: int | None = Field(None, ge=1)
    """how many answers, 16 at most"""
    logprobs: bool | None = None
    """log-probabilities of what is said"""
    top_logprobs: int | None = Field(None, ge=0, le=64)
    """with `logprobs`: also those of this many of the likeliest tokens, 64 at most"""
    stop: str | list[str] | None = None
    """texts that end the answer, and are no part of it"""
    max_tokens: int | None = None
    """tokens of thoughts and answer at most"""
    max_completion_tokens: int | None = None
    """the same; of both, the smaller"""
    seed: int | None = None
    """the same seed says the same"""
    temperature: float | None = None
    """how tokens are chosen; by default as the checkpoint's `generation_config.json` says, else greedily"""
    top_p: float | None = None
    """likewise"""
    top_k: int | None = None
    """likewise"""
    min_p: float | None = None
    """likewise"""
    repetition_penalty: float | None = None
    """likewise"""
    presence_penalty: float | None = None
    """likewise"""
    frequency_penalty: float | None = None
    """likewise"""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """`"none"`: no thoughts; others are told to a chat template that knows them, and refused where it does not"""

    user: Annotated[Any, Harmless("callers are identified by their keys")] = None
    safety_identifier: Annotated[Any, Harmless("likewise")] = None
    prompt_cache_key: Annotated[Any, Harmless("the cache is found by content")] = None
    prompt_cache_retention: Annotated[Any, Harmless("likewise")] = None
    prompt_cache_options: Annotated[Any, Harmless("likewise")] = None
    prediction: Annotated[Any, Harmless("it would only speed up the same answer")] = None
    store: Annotated[Any, Harmless("answers are not stored")] = None
    metadata: Annotated[Any, Harmless("likewise")] = None
    service_tier: Annotated[Any, Harmless("there is only one")] = None
    verbosity: Annotated[Any, Harmless("models do not read it; use instructions")] = None
    logit_bias: Annotated[Any, Instead(f"leave it out; {_FORM}", unless=({},))] = None
    functions: Annotated[Any, Instead("use `tools`")] = None
    function_call: Annotated[Any, Instead("use `tool_choice`")] = None
    modalities: Annotated[Any, Instead("leave it out: answers are text", unless=(["text"], []))] = None
    audio: Annotated[Any, Instead("leave it out: answers are text")] = None
    web_search_options: Annotated[Any, Instead("pass a search tool in `tools`")] = None
    moderation: Annotated[Any, Instead("leave it out, and check the answer yourself")] = None
    # Other servers' fields, for which OpenAI or this server has another.
    chat_template_kwargs: Annotated[Any, Instead(_THOUGHTS, unless=({},))] = None
    enable_thinking: Annotated[Any, Instead(_THOUGHTS)] = None
    thinking: Annotated[Any, Instead(_THOUGHTS)] = None
    think: Annotated[Any, Instead(_THOUGHTS)] = None
    thinking_budget: Annotated[Any, Instead(_THOUGHTS)] = None
    reasoning: Annotated[Any, Instead(_THOUGHTS)] = None
    include_reasoning: Annotated[Any, Instead(_THOUGHTS, unless=(True,))] = None
    guided_json: Annotated[Any, Instead(_FORM)] = None
    guided_regex: Annotated[Any, Instead(_FORM)] = None
    guided_choice: Annotated[Any, Instead(_FORM)] = None
    guided_grammar: Annotated[Any, Instead(_FORM)] = None
    structured_outputs: Annotated[Any, Instead(_FORM)] = None
    format: Annotated[Any, Instead(_FORM)] = None
    grammar: Annotated[Any, Instead(_FORM)] = None
    max_new_tokens: Annotated[Any, Instead("use `max_tokens`")] = None
    n_predict: Annotated[Any, Instead("use `max_tokens`")] = None
    continue_final_message: Annotated[Any, Instead("end with a message of another role", unless=(False,))] = None
    add_generation_prompt: Annotated[Any, Instead("leave it out: the model always answers next", unless=(True,))] = None
    extra_body: Annotated[Any, Instead("put its fields into the request itself", unless=({},))] = None

    def calls(self, engine: Engine, number: str, limits: Limits, adapter: str | None) -> list[ChatCall]:
        """Return a call for each answer.

        Args:
            engine: The tenant's engine.
            number: Id of the request.
            limits: Limits of the server.
            adapter: Name of the adapter; None: the model alone.

        Raises:
            InvalidRequestError: The request is invalid.
            HandleError: A parent is no handle of this tenant.
            RefusedError: The request asks for too many answers, or has too many tools.
        """
        answers = self.n or 1
        if answers > limits.choices:
            raise RefusedError(400, f"n: at most {limits.choices} answers to one request", param="n")
        if len(self.tools or ()) > limits.messages:
            raise RefusedError(413, f"tools: at most {limits.messages} (--max-messages)", param="tools")
        messages, request = chat_messages(self.messages), self._request(engine, limits, adapter)
        thread = None if self.choreo is None else self.choreo.thread
        return [ChatCall(engine, messages, _nth(request, at, f"{number}-{at}"), thread) for at in range(answers)]

    def _request(self, engine: Engine, limits: Limits, adapter: str | None) -> Mapping[str, Any]:
        tools, required = required_tools(described_tools("the model", self.tools, "auto"), self.tool_choice)
        constraint = answer_format(self.response_format)
        sampling = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        longest = [most for most in (self.max_tokens, self.max_completion_tokens) if most is not None]
        sampling |= {"max_tokens": min(longest)} if longest else {}
        sampling |= {} if constraint is None else {"constraint": constraint}
        sampling |= {"stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)} if self.stop else {}
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise RefusedError(400, "top_logprobs: set logprobs: true as well, or leave it out", param="top_logprobs")
        own, effort = self.choreo or ChoreoFields(), self.reasoning_effort
        if effort == "none" and own.thinking:
            raise RefusedError(
                400, 'reasoning_effort: "none" contradicts choreo.thinking: leave one out', param="reasoning_effort"
            )
        extra = {name: getattr(own, name) for name in ("reuse", "agent", "priority") if getattr(own, name) is not None}
        return {
            "tools": tools,
            "required": required,
            "sampling": Sampling(**sampling),
            "thinking": False if effort == "none" else own.thinking,
            "effort": None if effort == "none" else effort,
            "counts_thoughts": True,
            "may_be_cut": True,
            "adapter": adapter,
            "inherits": tuple(own.inherits or ()),
            "parents": tuple(unseal_handle(engine, word) for word in own.parents or ()),
            "timeout_s": limits.request_s,
            **extra,
        }


def _nth(request: Mapping[str, Any], place: int, number: str) -> ChatRequest:
    """Return the engine request of the answer at index `place`, with a seed of its own."""
    sampling: Sampling = request["sampling"]
    if place and sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sampling.seed + place})
    return ChatRequest(**{**request, "sampling": sampling}, message_id=number)
