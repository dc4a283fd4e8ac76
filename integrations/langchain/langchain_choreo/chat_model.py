"""`ChatChoreo`: LangChain's chat model over a choreo-agents engine."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, closing
from functools import partial
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.utils import LC_ID_PREFIX
from pydantic import ConfigDict, Field, model_validator

from choreo_agents import Engine, PromptText
from choreo_agents.arguments import parameters_of, require_known
from choreo_agents.chat import ChatCall, Reuse, astreamed, context_of, count_tokens, required_tools, streamed
from choreo_agents.errors import InvalidRequestError
from langchain_choreo.asking import BOUND, CALL, SAMPLING, request_of
from langchain_choreo.engines import EngineCache
from langchain_choreo.merging import ChatBinding, Merging
from langchain_choreo.place import CallPlace, Tenant
from langchain_choreo.structured import METHODS, Method, parser_of, response_format, tool_name, with_raw

ENVIRONMENT = "CHOREO_MODEL"
"""Environment variable with the model, if no argument names one."""
_LIMITS = ("max_input_tokens", "max_output_tokens")


class ChatChoreo(Merging, BaseChatModel):
    """A chat model whose calls reuse KV of earlier calls, and are batched with all other calls of its engine.

        ChatChoreo(model="path/to/a/model").invoke("Hello")

    A call's prompt is its messages in the model's chat template. By default (`reuse="prefix"`) its longest cached
    prefix is reused. With `reuse="anywhere"`, cached messages are also reused after other messages than those after
    which they were encoded: see `inherits`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

    model: str = ""
    """A folder in Hugging Face's layout, a hub name, or `"embedded"`; by default the value of `CHOREO_MODEL`. Loaded on
    first use, once for all chat models of a process with the same name and options."""
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An engine that is loaded already, for calls of its model."""
    load_options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of `Engine.load`."""

    reuse: Reuse = "prefix"
    """Which cached KV is reused: `"prefix"` or `"anywhere"`."""
    inherits: tuple[str, ...] = ()
    """With `"anywhere"`: messages of the same thread that reused KV may have attended to although they are not in the
    call, as `agent.role`: `("parent.system",)`."""
    agent: str = "agent"
    """Name of the agent, which names the messages of its calls."""
    tenant: Tenant | None = Field(default=None, exclude=True, repr=False)
    """Secret salt of the tenant, or a function of a call's config that returns it: tenants share no KV."""

    temperature: float | None = None
    """None, here and below: the default of the model's checkpoint, else of `Sampling`."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    """Texts that end an answer and are no part of it."""
    logprobs: bool = False
    """Whether answers have log-probabilities in `response_metadata`."""
    top_logprobs: int | None = None
    """With `logprobs`: number of the likeliest tokens whose log-probabilities are included."""
    thinking: bool | int | None = None
    """Whether the model thinks before it answers, or the most tokens of its thoughts; None: the template's default."""
    timeout: float | None = None
    """Seconds after which a call fails."""
    adapter: str | None = None
    """Name of an adapter of the engine."""
    priority: int = 0
    """Priority: higher ones are scheduled first."""
    streaming: bool = False
    """Whether `invoke` streams to callbacks."""
    engines: EngineCache = Field(default_factory=EngineCache, exclude=True, repr=False)
    """Loaded engines, which copies of this chat model share."""

    @model_validator(mode="before")
    @classmethod
    def _require_known_fields(cls, values: Any) -> Any:
        if isinstance(values, dict):
            inside = {name: f'load_options={{"{name}": ...}}' for name in parameters_of(Engine.load)}
            # LangChain passes the last two to all chat models; they have no effect here.
            require_known(cls.__name__, values, {*cls.model_fields, "api_key", "max_retries"}, inside)
        return values

    @model_validator(mode="after")
    def _require_model(self) -> ChatChoreo:
        if not self.model:
            self.model = os.environ.get(ENVIRONMENT, "") if self.engine is None else self.engine.model.name
        if not self.model:
            raise ValueError(f"ChatChoreo has no model: pass model=... or engine=..., or set {ENVIRONMENT}")
        request_of(self, None, {})
        return self

    @property
    def _llm_type(self) -> str:
        return "choreo"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langchain_choreo", "chat_model"]

    @property
    def _identifying_params(self) -> dict[str, Any]:
        named = ("model", "load_options", "stop", "logprobs", "top_logprobs", *SAMPLING, *CALL)
        return {name: getattr(self, name) for name in named}

    def _engine_of(self, model: str) -> Engine:
        """Return the engine of a model, which lives at least as long as this chat model."""
        if self.engine is not None and model == self.engine.model.name:
            return self.engine
        return self.engines.get(model, self.load_options)

    def _resolve_model_profile(self) -> ModelProfile | None:
        adapter = None if self.engine is None else self.engine.model.adapter
        context = context_of(self.model or os.environ[ENVIRONMENT]) if adapter is None else adapter.max_positions
        # Structured output is not listed: LangChain's agents would then combine it with tools.
        can = ("text_inputs", "text_outputs", "tool_calling", "tool_choice", "temperature", "open_weights")
        cannot = ("image_inputs", "audio_inputs", "video_inputs", "pdf_inputs")
        profile = {**dict.fromkeys(can, True), **dict.fromkeys(cannot, False)}
        return cast(ModelProfile, profile | ({} if context is None else dict.fromkeys(_LIMITS, context)))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatChoreo:
        """Copy the chat model; the copy uses the same engine."""
        return super().__deepcopy__({id(self.engine): self.engine} | (memo or {}))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self.stop, **kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # The key of LangChain's cache: answers are never shared between tenants. A call may have no place yet.
        place = self._with_place(None, kwargs)["place"]
        # With prefix reuse, a prompt has the same answer in all threads of a tenant.
        kwargs["place"] = place.tenant if (kwargs.get("reuse") or self.reuse) == "prefix" else place
        return super()._get_llm_string(stop=stop, **kwargs)

    def _with_place(self, config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments with its place, since LangChain does not pass the config on to `_generate`."""
        return kwargs if "place" in kwargs else {**kwargs, "place": CallPlace.of(config, self.tenant)}

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **self._with_place(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **self._with_place(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        yield from super().stream(input, config, stop=stop, **self._with_place(config, kwargs))

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        pieces: Any = super().astream(input, config, stop=stop, **self._with_place(config, kwargs))
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().stream_events(input, config, **self._with_place(config, kwargs))

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().astream_events(input, config, **self._with_place(config, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        for _ in streamed(call, tokens=False):
            pass
        return _result(call)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await asyncio.to_thread(self._call, messages, stop, run_manager, kwargs)
        async with aclosing(astreamed(call, tokens=False)) as pieces:
            async for _ in pieces:
                pass
        return _result(call)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(streamed(self._call(messages, stop, run_manager, kwargs))) as pieces:
            for piece in pieces:
                yield ChatGenerationChunk(message=piece)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await asyncio.to_thread(self._call, messages, stop, run_manager, kwargs)
        async with aclosing(astreamed(call)) as pieces:
            async for piece in pieces:
                yield ChatGenerationChunk(message=piece)

    def _call(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        run: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        kwargs: dict[str, Any],
    ) -> ChatCall:
        """Return the engine call, loading the model on first use; run it on a thread if an event loop is running."""
        place = kwargs.get("place") or CallPlace.of(None, self.tenant)
        engine = self._engine_of(kwargs.get("model") or self.model)
        # LangChain passes no run to its own streams. The id is set here because the signature covers it.
        message_id = f"{LC_ID_PREFIX}-{uuid.uuid4() if run is None else run.run_id}"
        engine, answers = place.engine(engine), place.answers
        if (merges := kwargs.get("merges")) and engine.branches.maps(kwargs.get("adapter") or self.adapter):
            raise InvalidRequestError(
                "the adapter has a cache mapper, which only a Synthesizer and engine.branches.merge support"
            )
        parents = answers.merged(engine, merges or ())
        request = request_of(self, stop, kwargs, message_id, parents)
        return ChatCall(engine, messages, request, place.thread or answers.thread, partial(answers.signed, engine))

    def bind(self, **kwargs: Any) -> ChatBinding:  # type: ignore[override]
        """Return the model with bound arguments, which also apply to `merge`."""
        require_known("ChatChoreo.bind", kwargs, BOUND)
        return ChatBinding(bound=self, kwargs=kwargs, config={})

    def scope(self, config: RunnableConfig | None = None) -> AbstractContextManager[object]:
        """Lease the KV of all answers in the block until it ends, also without a thread.

        Otherwise the KV of an answer without a thread is kept only for a while; later merges encode its text again.

        Args:
            config: Config of the calls, from which their tenant is read.
        """
        return CallPlace.of(config, self.tenant).engine(self._engine_of(self.model)).scope()

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call.

        Args:
            tools: Tools in any of LangChain's forms.
            tool_choice: `"auto"`, the default; `"any"`: it has to call one; a name: this one; `"none"`: none.
            kwargs: Further arguments of `bind`.

        Raises:
            InvalidRequestError: There is no such tool.
        """
        described: list[dict[str, Any]] = []
        described += [tool for tool in map(convert_to_openai_tool, tools) if tool not in described]
        required_tools(tuple(described), tool_choice)
        return self.bind(tools=described, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers that are constrained to a schema and parsed.

        Args:
            schema: A pydantic model or TypedDict, a JSON schema, or a tool's description.
            method: `"json_schema"`: by a constraint; `"function_calling"`: by a call of a tool; `"json_mode"`: by a
                constraint to any object, which is then parsed.
            include_raw: Whether to return a dict with the message, the parsed value, and the error of parsing.
            strict: Accepted for compatibility: answers always match the schema.
            kwargs: Further arguments of `bind`.

        Raises:
            ValueError: There is no such method.
        """
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
        noted = {"kwargs": {"method": method, "strict": strict}, "schema": convert_to_json_schema(schema)}
        if method == "function_calling":
            model = self.bind_tools(
                [schema], tool_choice=tool_name(schema), ls_structured_output_format=noted, **kwargs
            )
        else:
            form = response_format(schema, method)
            model = self.bind(response_format=form, ls_structured_output_format=noted, **kwargs)
        parser = parser_of(schema, method)
        return with_raw(model, parser) if include_raw else model | parser

    def get_token_ids(self, text: str) -> list[int]:
        return self._engine_of(self.model).model.encode(PromptText.plain(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the number of tokens that a call with these messages reads, including the header of its answer."""
        return count_tokens(self._engine_of(self.model), messages, request_of(self, None, {"tools": tools}))


def _result(call: ChatCall) -> ChatResult:
    message = call.message
    assert message is not None, "it was heard to its end"
    metadata = message.response_metadata
    generation = ChatGeneration(message=message, generation_info={"finish_reason": metadata["finish_reason"]})
    return ChatResult(generations=[generation], llm_output={"model_name": metadata["model_name"]})
