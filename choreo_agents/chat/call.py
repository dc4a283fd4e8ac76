"""A call of a chat model: find or encode its view, decode, return a message.

`ChatCall.asked` is a generator of engine requests, so that `streamed` and `astreamed` share it and only wait.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage

from choreo_agents.chat.asking import ChatRequest, answer_header, thinking_before, thinks, with_budget
from choreo_agents.chat.encodings import Encodings, view_anywhere
from choreo_agents.chat.output_stream import OutputStream, answer_tokens, before_stop, logprobs_of
from choreo_agents.chat.prompt import ChatSpan, Piece, PromptCutter, spans_of, whole_prompt
from choreo_agents.chat.turns import message_turn
from choreo_agents.engine import Decode, Engine, EphemeralRun, Prefill, StreamedToken
from choreo_agents.errors import ContextLengthError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText

Steps = Generator[list[Prefill], list[MessageHandle], Decode]
"""Generator that yields prefills, is sent their handles, and returns the decode."""
_MARGIN = 64
"""Positions left for the tokens that close thoughts and answers."""
_LONG = 1 << 14
"""Characters of messages and tools from which encoding them would block an event loop for too long."""


class ChatCall:
    """A call of a chat model on one engine.

    Args:
        engine: Encodes and decodes.
        messages: The conversation.
        request: Options of the call.
        thread: Leases the KV; None: only until it is evicted.
        sign: Adds a signed reference to the answer's handle; its last argument: whether that encodes just the answer.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        request: ChatRequest,
        thread: str | EphemeralRun | None = None,
        sign: Callable[[AIMessage, MessageHandle, bool], AIMessage] | None = None,
    ) -> None:
        self.engine, self.request, self._messages, self._sign = engine, request, messages, sign
        self.thread = EphemeralRun() if thread is None else thread
        chat, tools = engine.chat, request.tools
        self._thinks = thinks(chat, request.thinking, request.agent)
        self._header = answer_header(chat, None, thinks=self._thinks, calls=bool(tools))
        self._key = uuid.uuid4().hex if self._thinks else None
        self._encodings: Encodings | None = None
        self.decode: Decode | None = None
        """The decode, once it was sent to the engine."""
        self.message: AIMessage | None = None
        """The answer, once it is complete, ..."""
        self.handle: MessageHandle | None = None
        """... its handle, ..."""
        self.queued_s: float | None = None
        """... and the seconds for which it was queued."""

    @property
    def is_long(self) -> bool:
        """True if tokenizing the messages and tools takes too long for an event loop."""
        parts = (*(message.content for message in self._messages), *self.request.tools)
        return sum(len(str(part)) for part in parts) > _LONG

    @property
    def is_led(self) -> bool:
        """True if a grammar has to be compiled."""
        return bool(self.request.required) or self.request.sampling.constraint is not None

    def prompt(self) -> list[int]:
        """Return all tokens before the answer, of a call without parents.

        Raises:
            InvalidRequestError: A message holds more than text, or `effort` changes nothing.
        """
        model, tools, effort = self.engine.model, self.request.tools, self.request.effort
        return whole_prompt(model, self._messages, tools, self._header, thinks=self._thinks, effort=effort)

    def asked(self, noted: dict[str, Any]) -> Steps:
        """Yield the prefills of the view, and return the decode.

        Args:
            noted: Data that the engine keeps with the thread.
        """
        engine, request, view = self.engine, self.request, list[MessageHandle]()
        if request.reuse == "anywhere":
            has_thread = isinstance(self.thread, str)
            # Without a thread it is unknown who may read what foreign messages have influenced.
            encodings = noted.setdefault(__name__, Encodings()) if has_thread else engine.kv.get_or_create(Encodings)
            self._encodings, inherits = encodings, request.inherits if has_thread else ()
            view = yield from view_anywhere(engine, self._spans(), request, encodings, inherits)
            return self._decode(engine.model.encode(self._header), view)
        *pieces, header = self._pieces()
        for piece in pieces:
            if isinstance(piece, MessageHandle):
                view.append(piece)
                continue
            call = Prefill(piece, [*view], author=f"{request.agent}.prompt", adapter=request.adapter, lazy=True)
            view += yield [call]
        assert not isinstance(header, MessageHandle), "it comes last"
        return self._decode(header, view)

    def _pieces(self) -> list[Piece | MessageHandle]:
        """Return the prompt in pieces; the answer's header comes last."""
        model, cutter, text = self.engine.model, PromptCutter(self.engine.model), PromptText()
        header, pieces = model.encode(self._header), list[Piece | MessageHandle]()
        if not self.request.parents:
            prompt, limit = self.prompt(), model.adapter.max_positions
            if len(prompt) > limit:  # before it is cut, which takes longer than to encode it
                raise ContextLengthError(
                    f"the messages and tools have {len(prompt)} tokens, but the model's context is {limit}: pass fewer "
                    "or shorter ones"
                )
            return [*cutter.cut(prompt, header)]
        for span in self._spans():
            text += span.text
            if span.handle is not None:
                pieces += [*cutter.pieces(model.encode(text)), span.handle]
                text = PromptText()
        return [*pieces, *cutter.cut(model.encode(text + self._header), header)]

    def _spans(self) -> list[ChatSpan]:
        return spans_of(self._messages, self.request.tools, self.engine.chat, self.request.parents)

    def _decode(self, header: Sequence[int], view: Sequence[MessageHandle]) -> Decode:
        engine, request = self.engine, self.request
        tokens_read = sum(parent.length for parent in view) + len(header)
        sampling, free = request.sampling, engine.model.adapter.max_positions - tokens_read - _MARGIN
        self._counts = request.counts_thoughts and "max_tokens" in request.sampling.model_fields_set
        free_positions = free - (0 if self._counts else sampling.within(free // 2).longest)
        thinking, calls = None, bool(request.tools)
        if self._thinks:
            thinking = replace(thinking_before(engine.chat, None, calls=calls), counts=self._counts)
            thinking = with_budget(thinking, request.thinking, free_positions)
        self._read = tokens_read - len(header)
        self._output = OutputStream(
            engine,
            header,
            thinking,
            sampling,
            request.tools,
            request.required,
            # Two identical calls must not share the ids of their tool calls.
            request.message_id or uuid.uuid4().hex,
            message_id=request.message_id,
            stop=sampling.stop,
            may_be_cut=request.may_be_cut,
        )
        self.opened = self._output.opened
        self.decode = Decode(
            header,
            view,
            author=f"{request.agent}.assistant",
            adapter=request.adapter,
            priority=request.priority,
            timeout_s=request.timeout_s,
            idempotency_key=self._key,
            **self._output.decode_args,
        )
        return self.decode

    def chunks(self, item: StreamedToken | MessageHandle) -> Iterator[AIMessageChunk]:
        """Yield the chunks of a token or, at the end, of the whole message."""
        if not isinstance(item, MessageHandle):
            yield from self._output.add(item)
            return
        yield from self._output.end()
        self.engine.threads.hold([item])
        self.handle, self.message = item, self._build_reply(item)
        self.queued_s = self.engine.usage(item).queued_s
        yield from self._output.last(self.message)

    def _build_reply(self, handle: MessageHandle) -> AIMessage:
        engine, request = self.engine, self.request
        whole = self._output.parse(handle)
        parsed = whole._replace(words=before_stop(whole.words, request.sampling.stop).strip())
        thought = next(iter(engine.inspect.thoughts(handle, idempotency_key=self._key)), None) if self._thinks else None
        metadata: dict[str, Any] = {}
        if request.sampling.logprobs is not None:
            metadata["logprobs"] = logprobs_of(engine.model, answer_tokens(engine, handle))
        most = request.sampling.max_tokens if self._counts else None
        message = self._output.reply(handle, parsed, thought, tokens_read=self._read, limit=most, metadata=metadata)
        is_whole = whole == parsed  # else its handle encodes the stop text, too
        if self._encodings is not None and is_whole:
            content = request.adapter, message_turn(message, engine.chat).text
            self._encodings.note(handle, content, f"{request.agent}.assistant")
        return message if self._sign is None else self._sign(message, handle, is_whole)


def count_tokens(engine: Engine, messages: Sequence[BaseMessage], request: ChatRequest) -> int:
    """Return the number of prompt tokens of a call. Raises what `ChatCall.prompt` raises."""
    parents = (parent.length for parent in request.parents if isinstance(parent, MessageHandle))
    return len(ChatCall(engine, messages, request).prompt()) + sum(parents)


def streamed(call: ChatCall, *, tokens: bool = True) -> Generator[AIMessageChunk]:
    """Yield the chunks of a call's message, the last with its usage; then `call.message` is set.

    Closing the generator early cancels the call. Without `tokens`, chunks come when the message is complete.
    """
    engine = call.engine
    with engine.threads.used(call.thread) as leases:
        # The scope is a context variable that a generator shares with its caller: it ends before the first yield.
        with engine.threads.speaking(call.thread), closing(call.asked(leases.noted)) as steps:
            step = _next(steps)
            while not isinstance(step, Decode):
                step = _next(steps, engine.prefill(step))
            items = engine.stream(**vars(step), tokens=tokens)
        with closing(items):
            for item in items:
                yield from call.chunks(item)


async def astreamed(call: ChatCall, *, tokens: bool = True) -> AsyncGenerator[AIMessageChunk]:
    """Yield as `streamed` does. Cancelling the task that awaits it cancels the call."""
    engine = call.engine
    with engine.threads.used(call.thread) as leases:
        with engine.threads.speaking(call.thread), closing(call.asked(leases.noted)) as steps:
            step = await _next_in_thread(steps) if call.is_long else _next(steps)
            while not isinstance(step, Decode):
                handles = await engine.aprefill(step)
                step = await _next_in_thread(steps, handles) if call.is_led else _next(steps, handles)
            items = engine.astream(**vars(step), tokens=tokens)
        async with aclosing(items):
            async for item in items:
                for chunk in call.chunks(item):
                    yield chunk


def _next(steps: Steps, handles: list[MessageHandle] | None = None) -> list[Prefill] | Decode:
    """Send the handles of the last prefills, and return the next ones or, at the end, the decode."""
    try:
        return next(steps) if handles is None else steps.send(handles)
    except StopIteration as done:
        decode: Decode = done.value
        return decode


async def _next_in_thread(steps: Steps, handles: list[MessageHandle] | None = None) -> list[Prefill] | Decode:
    """Run `_next` in a thread: rendering and tokenizing a prompt or compiling a grammar would block the event loop."""
    running = asyncio.ensure_future(asyncio.to_thread(_next, steps, handles))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])  # a cancelled caller must not close the generator while the thread runs it
