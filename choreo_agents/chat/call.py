"""One call of a chat model: its view is found, it is decoded, and what comes is a message.

What is asked of the engine is yielded, so that it is written once: `streamed` and `astreamed` only wait.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage

from choreo_agents.chat.asking import ChatRequest, answer_header, thinking_before
from choreo_agents.chat.encodings import Encodings, view_anywhere
from choreo_agents.chat.output_stream import OutputStream, answer_tokens, before_stop, logprobs_of
from choreo_agents.chat.prompt import ChatSpan, Piece, PromptCutter, spans_of, whole_prompt
from choreo_agents.chat.turns import message_turn
from choreo_agents.engine import Decode, Engine, EphemeralRun, Prefill, StreamedToken
from choreo_agents.errors import ContextLengthError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText

Asked = Generator[list[Prefill], list[MessageHandle], Decode]
"""Yields what is to be encoded, is sent what came of it, and returns what is to be decoded."""
_MARGIN = 64
"""Positions left for what closes thoughts and answers."""
_LONG = 1 << 14
"""Characters of a conversation and its tools that would keep an event loop for too long."""


class ChatCall:
    """Of one engine.

    Args:
        engine: Encodes and decodes.
        messages: Of the conversation.
        request: What is asked beside.
        thread: Keeps what is encoded; None: nobody does, but for a while.
        sign: Puts a reference to its encoding on the answer; tells whether that says just the answer's words.
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
        self._thinks = request.thinks(chat)
        self._header = answer_header(chat, None, thinks=self._thinks, calls=bool(tools))
        self._memo = uuid.uuid4().hex if self._thinks else None
        self._encodings: Encodings | None = None
        self.decode: Decode | None = None
        """What was asked of the engine, once it is."""
        self.message: AIMessage | None = None
        """What was said, once it is, ..."""
        self.handle: MessageHandle | None = None
        """... its encoding, ..."""
        self.queued_s: float | None = None
        """... and how many seconds it waited until a step could hold it."""

    @property
    def is_long(self) -> bool:
        """Whether its messages and tools take a while to be encoded as tokens."""
        told = (*(message.content for message in self._messages), *self.request.tools)
        return sum(len(str(each)) for each in told) > _LONG

    @property
    def is_led(self) -> bool:
        """Whether a grammar has to be compiled for it."""
        return bool(self.request.required) or self.request.sampling.constraint is not None

    def prompt(self) -> list[int]:
        """All tokens that are read before the answer, where it has no parents.

        Raises:
            InvalidRequestError: A message holds more than text, or an effort changes nothing.
        """
        request = self.request
        return whole_prompt(
            self.engine.model, self._messages, request.tools, self._header, thinks=self._thinks, effort=request.effort
        )

    def asked(self, noted: dict[str, Any]) -> Asked:
        """What is to be encoded, and then decoded.

        Args:
            noted: What is remembered of the thread.
        """
        engine, request, view = self.engine, self.request, list[MessageHandle]()
        if request.reuse == "anywhere":
            has_thread = isinstance(self.thread, str)
            # Without a thread nobody is known to whom a foreign message may be shown.
            made = noted.setdefault(__name__, Encodings()) if has_thread else engine.kv.get_or_create(Encodings)
            self._encodings, inherits = made, request.inherits if has_thread else ()
            view = yield from view_anywhere(engine, self._spans(), request, made, inherits)
            return self._decode(engine.model.encode(self._header), view)
        *told, header = self._told()
        for each in told:
            if isinstance(each, MessageHandle):
                view.append(each)
                continue
            call = Prefill(each, [*view], author=f"{request.agent}.prompt", adapter=request.adapter, lazy=True)
            view += yield [call]
        assert not isinstance(header, MessageHandle), "it comes last"
        return self._decode(header, view)

    def _told(self) -> list[Piece | MessageHandle]:
        """All that is read, in pieces; the answer's header comes last."""
        model, cutter, text = self.engine.model, PromptCutter(self.engine.model), PromptText()
        header, told = model.encode(self._header), list[Piece | MessageHandle]()
        if not self.request.parents:
            prompt, most = self.prompt(), model.adapter.max_positions
            if len(prompt) > most:  # before it is cut, which takes longer than to encode it
                raise ContextLengthError(
                    f"the messages and tools have {len(prompt)} tokens, the model's context ends at {most}: "
                    "show fewer or shorter ones"
                )
            return [*cutter.cut(prompt, header)]
        for span in self._spans():
            text += span.text
            if span.handle is not None:
                told += [*cutter.pieces(model.encode(text)), span.handle]
                text = PromptText()
        return [*told, *cutter.cut(model.encode(text + self._header), header)]

    def _spans(self) -> list[ChatSpan]:
        return spans_of(self._messages, self.request.tools, self.engine.chat, self.request.parents)

    def _decode(self, header: Sequence[int], view: Sequence[MessageHandle]) -> Decode:
        engine, request = self.engine, self.request
        read = sum(parent.length for parent in view) + len(header)
        sampling, rest = request.sampling, engine.model.adapter.max_positions - read - _MARGIN
        self._counts = request.counts_thoughts and "max_tokens" in request.sampling.model_fields_set
        room = rest - (0 if self._counts else sampling.within(rest // 2).longest)
        thinking, calls = None, bool(request.tools)
        if self._thinks:
            thinking = thinking_before(engine.chat, None, request.budget(room), calls=calls)
            thinking = replace(thinking, counts=self._counts)
        self._read = read - len(header)
        self._speaking = OutputStream(
            engine,
            header,
            thinking,
            sampling,
            request.tools,
            request.required,
            # Of two calls that are asked the same each has results of its own.
            request.message_id or uuid.uuid4().hex,
            message_id=request.message_id,
            stop=sampling.stop,
            may_be_cut=request.may_be_cut,
        )
        self.opened = self._speaking.opened
        self.decode = Decode(
            header,
            view,
            author=f"{request.agent}.assistant",
            adapter=request.adapter,
            priority=request.priority,
            timeout_s=request.timeout_s,
            idempotency_key=self._memo,
            **self._speaking.asked,
        )
        return self.decode

    def heard(self, item: StreamedToken | MessageHandle) -> Iterator[AIMessageChunk]:
        """What comes of a token, and, at the end, of the whole message."""
        if not isinstance(item, MessageHandle):
            yield from self._speaking.hear(item)
            return
        yield from self._speaking.rest()
        self.engine.threads.hold([item])
        self.handle, self.message = item, self._replied(item)
        self.queued_s = self.engine.usage(item).queued_s
        yield from self._speaking.last(self.message)

    def _replied(self, handle: MessageHandle) -> AIMessage:
        engine, request = self.engine, self.request
        whole = self._speaking.said(handle)
        spoken = whole._replace(words=before_stop(whole.words, request.sampling.stop).strip())
        thought = (
            next(iter(engine.inspect.thoughts(handle, idempotency_key=self._memo)), None) if self._thinks else None
        )
        metadata: dict[str, Any] = {}
        if request.sampling.logprobs is not None:
            metadata["logprobs"] = logprobs_of(engine.model, answer_tokens(engine, handle))
        most = request.sampling.max_tokens if self._counts else None
        message = self._speaking.reply(handle, spoken, thought, read=self._read, most=most, metadata=metadata)
        is_whole = whole == spoken  # else what it stopped at stands in its encoding
        if self._encodings is not None and is_whole:
            said = request.adapter, message_turn(message, engine.chat).text
            self._encodings.note(handle, said, f"{request.agent}.assistant")
        return message if self._sign is None else self._sign(message, handle, is_whole)


def count_tokens(engine: Engine, messages: Sequence[BaseMessage], request: ChatRequest) -> int:
    """Tokens that a call reads before it answers. Raises what `ChatCall.prompt` raises."""
    parents = (parent.length for parent in request.parents if isinstance(parent, MessageHandle))
    return len(ChatCall(engine, messages, request).prompt()) + sum(parents)


def streamed(call: ChatCall) -> Generator[AIMessageChunk]:
    """The pieces of a call's message, of which the last says what it cost; then it is `call.message`.

    Leaving early cancels it.
    """
    engine = call.engine
    with engine.threads.used(call.thread) as held:
        # A scope is this context's, and a generator's caller goes on in it between two pieces: so it ends before.
        with engine.threads.speaking(call.thread), closing(call.asked(held.noted)) as asked:
            step = _next(asked)
            while not isinstance(step, Decode):
                step = _next(asked, engine.prefill(step))
            tokens = engine.stream(**vars(step))
        with closing(tokens):
            for item in tokens:
                yield from call.heard(item)


async def astreamed(call: ChatCall) -> AsyncGenerator[AIMessageChunk]:
    """The same. Cancelling the task that awaits it cancels the call."""
    engine = call.engine
    with engine.threads.used(call.thread) as held:
        with engine.threads.speaking(call.thread), closing(call.asked(held.noted)) as asked:
            step = await _on_a_thread(asked) if call.is_long else _next(asked)
            while not isinstance(step, Decode):
                made = await engine.aprefill(step)
                step = await _on_a_thread(asked, made) if call.is_led else _next(asked, made)
            tokens = engine.astream(**vars(step))
        async with aclosing(tokens):
            async for item in tokens:
                for chunk in call.heard(item):
                    yield chunk


def _next(asked: Asked, made: list[MessageHandle] | None = None) -> list[Prefill] | Decode:
    """What is to be encoded next, of what was made before, or in the end decoded."""
    try:
        return next(asked) if made is None else asked.send(made)
    except StopIteration as done:
        found: Decode = done.value
        return found


async def _on_a_thread(asked: Asked, made: list[MessageHandle] | None = None) -> list[Prefill] | Decode:
    """Of it what takes long, while the event loop goes on: a prompt is written and encoded, a grammar compiled."""
    running = asyncio.ensure_future(asyncio.to_thread(_next, asked, made))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])  # who is cancelled must not close what is running
