"""Parser of one answer's tokens; the arguments of its decode, its chunks as tokens come, and the complete message."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall
from langchain_core.messages import ToolCall as CallMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from choreo_agents.chat.constraints import CallsOrAnswer, constrained_sampling
from choreo_agents.chat.tools import Described
from choreo_agents.chat.turns import short_id, thoughts_of
from choreo_agents.engine import Engine, StreamedToken, Thinking
from choreo_agents.engine.constraints import Detokenizer, PhaseTexts
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import BrokenCall, CallPart, LoadedModel, PromptText, TextPart, ToolCall, tools_format
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.chat.tools.reading import partial_mark
from choreo_agents.sampling import SampledToken, Sampling

Called = CallMessage | InvalidToolCall
"""A valid call, or an invalid one with its error."""
_EVERYWHERE = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
"""Names that every call format can write."""


def require_names(model: LoadedModel, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidRequestError` if a written call of a tool, with its required arguments, is not parsed back."""
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        required = [field for field in schema.get("required") or () if isinstance(field, str)]
        if all(map(_EVERYWHERE.fullmatch, (name, *required))):
            continue
        call = ToolCall(name, dict.fromkeys(required, "."), short_id(name))
        read = OutputParser(model, tools, "").parse(model.encode(tools_format(model.chat).grammar.write([call]))).calls
        if [(parsed["name"], parsed["args"]) for parsed in read] != [(name, call.arguments)]:
            raise InvalidRequestError(
                f"this model cannot write a parsable call of {name!r} with "
                f"{', '.join(map(repr, required)) or 'nothing'}: rename the tool or its arguments, with letters, "
                "digits and underscores only"
            )


class OutputParser:
    """Parser of one message.

    Args:
        model: Model that sampled the tokens.
        tools: Tools that it may call.
        place: Name of the agent's call. Ids of tool calls are derived from it, so that a re-run gives the same ids.
        decider: Decides between calls and a constrained answer; None: both may occur, in free text.
    """

    def __init__(
        self, model: LoadedModel, tools: Sequence[Mapping[str, Any]], place: str, decider: CallsOrAnswer | None = None
    ) -> None:
        self._model = model
        self._reader = tools_format(model.chat).reader(tools, [*model.controls.values()], model.visible_controls)
        self._place, self._decider = place, decider
        ending = [] if tools_format(model.chat).is_headed else model.encode(PromptText.special(model.chat.turn_end))[:1]
        self._ends = {*model.adapter.end_tokens, *ending}
        self._texts = Detokenizer(model)
        self._run: list[int] = []
        """Tokens since the last control token, ..."""
        self._shown = ""
        """... and the part of their text that was returned."""
        self.calls: list[Called] = []
        """All calls of the message, valid and invalid."""

    def parse(self, tokens: Iterable[int]) -> OutputParser:
        """Parse a whole message, and return self."""
        for ready in (*map(self._ready_tokens, tokens), self._ready_tokens()):
            for token in ready:
                self._add(token, "")  # whole texts are decoded at once
        self.end()
        return self

    def add(self, token: int) -> list[str | Called]:
        """Return the text and calls that the next token completes."""
        return self._read(self._ready_tokens(token))

    def _read(self, tokens: Sequence[int]) -> list[str | Called]:
        controls, texts = self._model.controls, self._texts
        return [part for token in tokens for part in self._add(token, "" if token in controls else texts.add(token))]

    def _ready_tokens(self, *token: int) -> list[int]:
        """Return the tokens that can be parsed now, with the next one or at the end: none while it is undecided."""
        if (decider := self._decider) is None:
            return [*token]
        is_answer = decider.take(*token) if token else decider.ended()
        if is_answer is None:
            return []
        if is_answer:
            self._reader.disable_calls()
        self._decider = None
        return decider.tokens

    def _add(self, token: int, text: str) -> list[str | Called]:
        """Parse a token that adds this text; text that is still missing comes with `_flush`."""
        control = self._model.controls.get(token)
        if control is None:
            self._run.append(token)
            self._shown += text
            return self._convert(self._reader.add(text)) if text else []
        parts = self._flush()
        return parts if token in self._ends else [*parts, *self._convert(self._reader.add(control, is_control=True))]

    def end(self) -> list[str | Called]:
        """Return what is left at the end of the message."""
        return [*self._read(self._ready_tokens()), *self._flush(), *self._convert(self._reader.end())]

    def _flush(self) -> list[str | Called]:
        """Return the rest of the text since the last control token, decoded as a whole."""
        text, shown = self._model.decode(self._run, special=False) if self._run else "", self._shown
        self._run, self._shown, self._texts = [], "", Detokenizer(self._model)
        return self._convert(self._reader.add(text[len(shown) :])) if text != shown and text.startswith(shown) else []

    def _convert(self, parts: Sequence[TextPart | CallPart]) -> list[str | Called]:
        return [part.text if isinstance(part, TextPart) else self._add_call(part.number) for part in parts]

    def _add_call(self, number: int) -> Called:
        call = self._reader.calls[number]
        if isinstance(call, BrokenCall):
            result: Called = invalid_tool_call(name=call.name, args=call.text, id=self._id(number), error=call.why)
        else:
            result = tool_call(name=call.name, args=dict(call.arguments), id=self._id(number))
        self.calls.append(result)
        return result

    @property
    def words(self) -> str:
        """The text beside calls."""
        return self._reader.words.strip()

    def _id(self, number: int) -> str:
        return short_id(hashlib.sha256(f"{self._place} {number}".encode()).hexdigest())


class ShownText:
    """Text of one message as it is streamed: holds back only what may turn out to be an ending, and outer spaces.

    The cost of a piece depends on its length and the endings', not on the text before.

    Args:
        ending: Text that ends a turn, or thoughts, and is not shown.
        stops: Stop texts: neither they nor what follows is shown.
    """

    def __init__(self, ending: str = "", stops: Sequence[str] = ()) -> None:
        self._endings, self._stops = (ending, *stops), stops
        self._is_over = False
        self._shown: list[str] = []
        self._spaces: list[str] = []
        """Whitespace since the last word, ..."""
        self._tail = ""
        """... followed by text that may begin an ending."""

    def add(self, text: str) -> str:
        """Add a piece, and return the text that can be shown now; may be empty."""
        pending = "" if self._is_over else before_stop(self._tail + text, self._stops)
        self._is_over = self._is_over or pending != self._tail + text
        held_from = len(pending) - max(partial_mark(pending, ending) for ending in self._endings)
        ready, self._tail = pending[:held_from], pending[held_from:]
        words = ready.rstrip()
        spaces = ready[len(words) :]
        if not words:
            self._spaces.append(spaces)
            return ""
        words = "".join([*self._spaces, words])
        self._spaces = [spaces]
        return self._show(words if self._shown else words.lstrip())

    def rest(self, whole: str) -> str:
        """Return the part of the complete text that was not shown; empty if it does not start with what was shown."""
        shown = "".join(self._shown)
        return self._show(whole.removeprefix(shown)) if whole.startswith(shown) else ""

    def __bool__(self) -> bool:
        """Return whether anything was shown."""
        return bool(self._shown)

    def _show(self, text: str) -> str:
        self._shown += [text] if text else []
        return text


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop text in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def shown_thoughts(thinking: Thinking | None, model: LoadedModel) -> ShownText:
    """Return a `ShownText` of thoughts, without the text that ends them; its control tokens have none."""
    end = "" if thinking is None else thinking.end
    return ShownText(model.decode(model.encode(PromptText.special(end)), special=False) if end else "")


def answer_tokens(engine: Engine, handle: MessageHandle) -> tuple[SampledToken, ...]:
    """Return the tokens that were sampled for a message, without a final one that only closes its turn."""
    chosen = engine.logprobs(handle)
    return chosen[:-1] if chosen and chosen[-1].token in engine.model.closing_tokens else chosen


def logprobs_of(model: LoadedModel, chosen: Sequence[SampledToken]) -> dict[str, Any]:
    """Return logprobs in OpenAI's format: each sampled token, and the likeliest tokens at its position."""

    def describe(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": model.decode([token]), "bytes": [*model.bytes_of(token)], "logprob": logprob}

    content = [
        {**describe(s.token, s.logprob), "top_logprobs": [describe(*likely) for likely in s.top]} for s in chosen
    ]
    return {"content": content}


class ParsedOutput(NamedTuple):
    """Text and calls of one message."""

    words: str
    calls: Sequence[CallMessage] = ()
    broken: Sequence[InvalidToolCall] = ()


class OutputStream:
    """An answer while it is decoded: chunks that add up to the message, and the complete message.

    Args:
        engine: Decodes the answer.
        opening: Header tokens, where no thoughts come first.
        thinking: How the model thinks before it answers; None: it does not.
        sampling: Sampling of the answer.
        tools: Tools that may be called; if empty, all output is text.
        required: Names of tools of which one must be called; None: the engine applies the sampling's constraint.
        place: See `OutputParser`.
        message_id: Id of the message; `name` is its speaker's.
        stop: Stop texts, which are no part of the message.
        may_be_cut: See `Constraint`.

    Raises:
        GrammarError: The constraint, or the schema of a tool's arguments, cannot be compiled.
        InvalidRequestError: The model cannot write a tool's name; see also `constrained_sampling`.
    """

    def __init__(
        self,
        engine: Engine,
        opening: Sequence[int],
        thinking: Thinking | None,
        sampling: Sampling,
        tools: Described,
        required: Collection[str] | None,
        place: str,
        *,
        message_id: str | None = None,
        name: str | None = None,
        stop: Sequence[str] = (),
        may_be_cut: bool = False,
    ) -> None:
        self._engine, self._thinking, self._tools, self._place = engine, thinking, tools, place
        model = self._model = engine.model
        require_names(model, tools)
        constraint, classifier = None, None
        if required is not None:
            sampling, constraint, classifier = constrained_sampling(engine, tools, required, sampling)
        if constraint is not None and may_be_cut:
            constraint = replace(constraint, key=f"{constraint.key}, which may be cut", may_be_cut=True)
        self.opened = len(opening if thinking is None else model.encode(thinking.answer))
        """Number of header tokens before the text."""
        how = tools_format(model.chat)
        ends = [token for text in (how.ends if tools else ()) for token in model.encode(text)[:1]]
        self.decode_args: dict[str, Any] = {
            "sampling": sampling,
            "constraint": constraint,
            "thinking": thinking,
            "turn_suffix": model.chat.turn_end,
            # Tokens that end a call's turn by themselves.
            "extra_stop_token_ids": tuple(ends),
            # A turn may have several messages: a preamble, then a call.
            "in_parts": bool(tools) and how.is_headed and bool(how.ends),
        }
        """The keyword arguments of its `Decode`."""
        self._make_classifier: Callable[[], CallsOrAnswer | None] = classifier or (lambda: None)
        self._parser = OutputParser(model, tools, place, self._make_classifier()) if tools else None
        self._fields: dict[str, Any] = {"id": message_id, "name": name}
        turn_end = model.decode(model.encode(PromptText.special(model.chat.turn_end)), special=False)
        self._words, self._thoughts = ShownText(turn_end, stop), shown_thoughts(thinking, model)
        self._shown_calls: dict[str | None, bool] = {}
        """Calls that were shown: id to whether the call is valid."""

    def add(self, item: StreamedToken) -> Iterator[AIMessageChunk]:
        """Yield the chunks that the next token completes."""
        if item.phase == "thoughts":
            if piece := self._thoughts.add(item.text):
                yield self._chunk(_reasoning(piece))
        elif self._parser is not None and item.phase == "answer":
            yield from self._chunks(self._parser.add(item.token))
        else:
            yield from self._chunks([item.text])

    def end(self) -> Iterator[AIMessageChunk]:
        """Yield the chunks that are left after the last token."""
        yield from self._chunks([] if self._parser is None else self._parser.end())

    def _chunks(self, pieces: Sequence[str | Called]) -> Iterator[AIMessageChunk]:
        for piece in pieces:
            if not isinstance(piece, str):
                yield from self._call(piece)
            elif shown := self._words.add(piece):
                yield self._chunk(self._text(shown))

    def _call(self, call: Called) -> Iterator[AIMessageChunk]:
        """Yield a complete call, unless it was shown."""
        if call["id"] in self._shown_calls:
            return
        # LangChain merges chunks of one index; without an index a chunk stays separate.
        number = sum(self._shown_calls.values()) if call["type"] == "tool_call" else None
        self._shown_calls[call["id"]] = number is not None
        args = call["args"] if isinstance(call["args"], str) else to_json(call["args"])
        piece = tool_call_chunk(name=call["name"], args=args, id=call["id"], index=number)
        yield self._chunk("", tool_call_chunks=[piece])

    def last(self, message: AIMessage) -> Iterator[AIMessageChunk]:
        """Yield what is left of the message; only the last chunk has the finish reason and usage."""
        if text := self._thoughts.rest(thoughts_of(message)):
            yield self._chunk(_reasoning(text))
        calls: list[Called] = [*message.tool_calls, *message.invalid_tool_calls]
        for call in calls:
            yield from self._call(call)
        yield self._chunk(
            self._text(self._words.rest(str(message.text))),
            response_metadata=dict(message.response_metadata),
            usage_metadata=message.usage_metadata,
            chunk_position="last",
        )

    def _text(self, piece: str) -> Any:
        return [{"type": "text", "text": piece, "index": 1}] if self._thoughts else piece

    def _chunk(self, content: Any, **fields: Any) -> AIMessageChunk:
        return AIMessageChunk(content=content, **self._fields, **fields)

    def parse(self, handle: MessageHandle) -> ParsedOutput:
        """Return the text and calls of the complete message."""
        model = self._model
        tokens, ending = self._engine.tokens(handle)[self.opened :], model.encode(model.chat.turn_end)
        # Compare tokens: text that only looks like the end of the turn belongs to the message.
        tokens = tokens[: -len(ending)] if ending and tokens[-len(ending) :] == ending else tokens
        if not self._tools:
            return ParsedOutput(model.decode(tokens, special=False).strip())
        parser = OutputParser(model, self._tools, self._place, self._make_classifier()).parse(tokens)
        calls = [call for call in parser.calls if call["type"] == "tool_call"]
        broken = [call for call in parser.calls if call["type"] == "invalid_tool_call"]
        return ParsedOutput(parser.words, calls, broken)

    def reply(
        self,
        handle: MessageHandle,
        parsed: ParsedOutput,
        thought: MessageHandle | None,
        *,
        tokens_read: int,
        limit: int | None = None,
        metadata: dict[str, Any] | None = None,
        **fields: Any,
    ) -> AIMessage:
        """Return the complete message: text, thoughts and calls, usage, and finish reason.

        Args:
            handle: Handle of the message.
            parsed: Its text and calls.
            thought: Handle of thoughts and answer as decoded; None: no thinking. Thoughts become a block of their own.
            tokens_read: Number of tokens in the view.
            limit: Maximum of output tokens in the usage: forced tokens beyond it are not counted.
            metadata: Response metadata beside model name and finish reason.
            fields: Other fields of the message.
        """
        engine = self._engine
        thoughts, reasoning = ("", 0) if thought is None else self._read_thoughts(thought, handle)
        content: Any = parsed.words
        if thoughts:
            content = [{"type": "reasoning", "reasoning": thoughts}]
            content += [{"type": "text", "text": parsed.words}] if parsed.words or not parsed.calls else []
        sampled = reasoning + len(answer_tokens(engine, handle))
        output = sampled if limit is None else min(sampled, limit)
        usage = UsageMetadata(
            input_tokens=tokens_read + self.opened,
            output_tokens=output,
            total_tokens=tokens_read + self.opened + output,
            input_token_details=InputTokenDetails(cache_read=engine.usage(handle).tokens_reused),
        )
        if reasoning:
            usage["output_token_details"] = OutputTokenDetails(reasoning=min(reasoning, output))
        # "length" wins over "tool_calls".
        is_cut = engine.inspect.finish_reason(handle) == "length"
        ended = "length" if is_cut else "tool_calls" if parsed.calls else "stop"
        return AIMessage(
            content=content,
            tool_calls=[*parsed.calls],
            invalid_tool_calls=[*parsed.broken],
            response_metadata={"model_name": engine.model.name, "finish_reason": ended, **(metadata or {})},
            usage_metadata=usage,
            **{**self._fields, **fields},
        )

    def _read_thoughts(self, thought: MessageHandle, handle: MessageHandle) -> tuple[str, int]:
        """Return the thoughts before a message, as streamed, and their number of tokens."""
        if self._thinking is None:
            return "", 0
        *_, record = self._engine.inspect.records([thought])
        assert record.sampled is not None
        sampled = list(record.tokens[slice(*record.sampled)])
        texts, shown = PhaseTexts(self._model, self._thinking), shown_thoughts(self._thinking, self._model)
        pieces = (text for phase, text in map(texts.add, sampled) if phase == "thoughts")
        return "".join(map(shown.add, pieces)), len(sampled) - len(self._engine.logprobs(handle))


def _reasoning(piece: str) -> Any:
    return [{"type": "reasoning", "reasoning": piece, "index": 0}]
