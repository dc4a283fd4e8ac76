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
from langchain_choreo.engines import KeptEngines
from langchain_choreo.merging import ChatBinding, Merging
from langchain_choreo.place import CallPlace, Tenant
from langchain_choreo.structured import METHODS, Method, parser_of, response_format, tool_name, with_raw

ENVIRONMENT = "CHOREO_MODEL"
"""Names the model where nothing else does."""
_LIMITS = ("max_input_tokens", "max_output_tokens")


class ChatChoreo(Merging, BaseChatModel):
    """A chat model whose calls find what was read before, and share the steps of one engine with all others.

        ChatChoreo(model="path/to/a/model").invoke("Hello")

    A call's prompt is what the model's chat template writes of its messages. By default (`reuse="prefix"`) the longest
    prefix of it that is known is not read again. With `reuse="anywhere"` messages are also found behind other
    messages than those that they stand behind here: see `inherits`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

    model: str = ""
    """A folder in Hugging Face's layout, a hub name, or `"embedded"`; by default what `CHOREO_MODEL` says. Loaded when
    it is first used, once for all chat models of a process that name it alike."""
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    """An engine that is there already, for calls of the model that it has."""
    load_options: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of `Engine.load`."""

    reuse: Reuse = "prefix"
    """Which encodings are found: `"prefix"` or `"anywhere"`."""
    inherits: tuple[str, ...] = ()
    """With `"anywhere"`: names of messages of the same thread that what is found may have attended to, though they are
    not in the call, as `agent.role`: `("parent.system",)`."""
    agent: str = "agent"
    """Who speaks: its calls' messages are named by it."""
    tenant: Tenant | None = Field(default=None, exclude=True, repr=False)
    """Whom calls are for, by a secret or a function of a call's config: nothing is found across tenants."""

    temperature: float | None = None
    """None, here and below: as the model's checkpoint says, or as `Sampling` does."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    """Texts with which an answer ends, and which are no part of it."""
    logprobs: bool = False
    """Whether answers come with log-probabilities, in `response_metadata`, ..."""
    top_logprobs: int | None = None
    """... and with those of so many of the likeliest tokens."""
    thinking: bool | int | None = None
    """Whether the model thinks before it answers, or for how many tokens at most; None: as its template has it."""
    timeout: float | None = None
    """Seconds after which a call fails."""
    adapter: str | None = None
    """The name of an adapter of the engine's."""
    priority: int = 0
    """Calls with a higher one come first."""
    streaming: bool = False
    """Whether `invoke` streams to callbacks."""
    engines: KeptEngines = Field(default_factory=KeptEngines, exclude=True, repr=False)
    """Those that were loaded: copies of this chat model share them."""

    @model_validator(mode="before")
    @classmethod
    def _knows(cls, given: Any) -> Any:
        if isinstance(given, dict):
            inside = {each: f'load_options={{"{each}": ...}}' for each in parameters_of(Engine.load)}
            # LangChain gives the last two to models of all kinds: here nobody asks for a key, and nothing is lost.
            require_known(cls.__name__, given, {*cls.model_fields, "api_key", "max_retries"}, inside)
        return given

    @model_validator(mode="after")
    def _has_a_model(self) -> ChatChoreo:
        if not self.model:
            self.model = os.environ.get(ENVIRONMENT, "") if self.engine is None else self.engine.model.name
        if not self.model:
            raise ValueError(f"name a model, as in ChatChoreo(model=...), set {ENVIRONMENT}, or give an engine")
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
        """The engine over a model, which is kept for as long as this chat model is."""
        if self.engine is not None and model == self.engine.model.name:
            return self.engine
        return self.engines.over(model, self.load_options)

    def _resolve_model_profile(self) -> ModelProfile | None:
        adapter = None if self.engine is None else self.engine.model.adapter
        context = context_of(self.model or os.environ[ENVIRONMENT]) if adapter is None else adapter.max_positions
        # Nothing of structured output: LangChain's agents would ask for it beside tools.
        can = ("text_inputs", "text_outputs", "tool_calling", "tool_choice", "temperature", "open_weights")
        cannot = ("image_inputs", "audio_inputs", "video_inputs", "pdf_inputs")
        known = {**dict.fromkeys(can, True), **dict.fromkeys(cannot, False)}
        return cast(ModelProfile, known | ({} if context is None else dict.fromkeys(_LIMITS, context)))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatChoreo:
        """A copy on the same engine."""
        return super().__deepcopy__({id(self.engine): self.engine} | (memo or {}))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self.stop, **kwargs)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # Also of what is not invoked, and has no place yet: answers are a tenant's own.
        place = self._placed(None, kwargs)["place"]
        # The same prompt has the same answer in each of a tenant's threads.
        kwargs["place"] = place.tenant if (kwargs.get("reuse") or self.reuse) == "prefix" else place
        return super()._get_llm_string(stop=stop, **kwargs)

    def _placed(self, config: RunnableConfig | None, said: dict[str, Any]) -> dict[str, Any]:
        """What a call says, and where it is made: only here its config is known."""
        return said if "place" in said else {**said, "place": CallPlace.of(config, self.tenant)}

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **self._placed(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **self._placed(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        yield from super().stream(input, config, stop=stop, **self._placed(config, kwargs))

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        pieces: Any = super().astream(input, config, stop=stop, **self._placed(config, kwargs))
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().stream_events(input, config, **self._placed(config, kwargs))

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().astream_events(input, config, **self._placed(config, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        for _ in streamed(call):
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
        async with aclosing(astreamed(call)) as pieces:
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
        said: dict[str, Any],
    ) -> ChatCall:
        """One call. Loads the model, if it is the first: on a thread where an event loop is running."""
        place = said.get("place") or CallPlace.of(None, self.tenant)
        engine = self._engine_of(said.get("model") or self.model)
        # Where LangChain streams, it tells no run; and what is signed has its id already.
        message_id = f"{LC_ID_PREFIX}-{uuid.uuid4() if run is None else run.run_id}"
        engine, answers = place.engine(engine), place.answers
        if (merges := said.get("merges")) and engine.branches.maps(said.get("adapter") or self.adapter):
            raise InvalidRequestError(
                "the adapter has a cache mapper, which a Synthesizer and engine.branches.merge use"
            )
        parents = answers.merged(engine, merges or ())
        request = request_of(self, stop, said, message_id, parents)
        return ChatCall(engine, messages, request, place.thread or answers.thread, partial(answers.signed, engine))

    def bind(self, **kwargs: Any) -> ChatBinding:  # type: ignore[override]
        """The model with arguments of its calls, which it merges with, too."""
        require_known("ChatChoreo.bind", kwargs, BOUND)
        return ChatBinding(bound=self, kwargs=kwargs, config={})

    def scope(self, config: RunnableConfig | None = None) -> AbstractContextManager[object]:
        """Keep what is answered in the block, also where no thread does, until the block ends.

        Else what is answered without a thread is kept for a while, and is then read in its words where it is merged.

        Args:
            config: Of the calls: tells for whom they are.
        """
        return CallPlace.of(config, self.tenant).engine(self._engine_of(self.model)).scope()

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        Args:
            tools: As LangChain has them.
            tool_choice: `"auto"`, the default; `"any"`: it has to call one; a name: this one; `"none"`: none.
            kwargs: What its calls say otherwise.

        Raises:
            InvalidRequestError: There is no such tool.
        """
        described: list[dict[str, Any]] = []
        described += [each for each in map(convert_to_openai_tool, tools) if each not in described]
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
        """The model, whose answers have the form of a schema: it can write no others.

        Args:
            schema: A pydantic model or TypedDict, a JSON schema, or a tool's description.
            method: `"json_schema"`: by a constraint; `"function_calling"`: by a call of a tool; `"json_mode"`: by a
                constraint to any object, which is then parsed.
            include_raw: Whether to return the message, too, and what it is parsed to or why it cannot be.
            strict: As OpenAI has it: answers keep to the schema in any case.
            kwargs: What its calls say otherwise.

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
            asked = response_format(schema, method)
            model = self.bind(response_format=asked, ls_structured_output_format=noted, **kwargs)
        parser = parser_of(schema, method)
        return with_raw(model, parser) if include_raw else model | parser

    def get_token_ids(self, text: str) -> list[int]:
        return self._engine_of(self.model).model.encode(PromptText.plain(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens that a call with these messages reads, the header of its answer among them."""
        return count_tokens(self._engine_of(self.model), messages, request_of(self, None, {"tools": tools}))


def _result(call: ChatCall) -> ChatResult:
    message = call.message
    assert message is not None, "it was heard to its end"
    noted = message.response_metadata
    said = ChatGeneration(message=message, generation_info={"finish_reason": noted["finish_reason"]})
    return ChatResult(generations=[said], llm_output={"model_name": noted["model_name"]})
