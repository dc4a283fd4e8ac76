"""One message of a model, from how its decode is led to the chat message: pieces as they come, and the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk

from choreo_agents.chat.constraints import CallsOrAnswer, led
from choreo_agents.chat.output_parser import Called, OutputParser, require_names
from choreo_agents.chat.tools import Described
from choreo_agents.chat.turns import thoughts_of
from choreo_agents.engine import Engine, StreamedToken, Thinking
from choreo_agents.engine.constraints import PhaseTexts
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, PromptText, tools_format
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.sampling import SampledToken, Sampling


class ShownText:
    """Of one message: holds back what may turn out to be no part of it, and nothing else.

    What a piece costs depends on the piece and on what may follow, not on what was shown before.

    Args:
        ending: Text that may follow and is not shown: what ends a turn, or thoughts.
        stops: Texts with which it is over: neither they are shown nor what follows.
    """

    def __init__(self, ending: str = "", stops: Sequence[str] = ()) -> None:
        self._endings, self._stops = (ending, *stops), stops
        self._is_over = False
        self._shown: list[str] = []
        self._spaces: list[str] = []
        """What has come since the last word, ..."""
        self._tail = ""
        """... and then may begin an ending."""

    def add(self, text: str) -> str:
        """What can be shown of all that has come and was not yet shown, with the next piece; empty: nothing."""
        whole = "" if self._is_over else before_stop(self._tail + text, self._stops)
        self._is_over = self._is_over or whole != self._tail + text
        self._tail = self._begun(whole)
        said = whole[: len(whole) - len(self._tail)]
        words = said.rstrip()
        spaces = said[len(words) :]
        if not words:
            self._spaces.append(spaces)
            return ""
        words = "".join([*self._spaces, words])
        self._spaces = [spaces]
        return self._show(words if self._shown else words.lstrip())

    def rest(self, whole: str) -> str:
        """What is still to be shown, given all that is said; empty if the pieces so far do not begin it."""
        shown = "".join(self._shown)
        return self._show(whole.removeprefix(shown)) if whole.startswith(shown) else ""

    def __bool__(self) -> bool:
        """Whether anything was shown."""
        return bool(self._shown)

    def _show(self, text: str) -> str:
        self._shown += [text] if text else []
        return text

    def _begun(self, text: str) -> str:
        """The longest end of a text that an ending begins with."""
        begun = (_begun(text, ending) for ending in self._endings)
        return max(begun, key=len, default="")


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of these that stands in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _begun(text: str, ending: str) -> str:
    """The longest end of a text that this ending begins with."""
    for have in range(min(len(ending), len(text)), 0, -1):
        if text.endswith(ending[:have]):
            return ending[:have]
    return ""


def shown_thoughts(thinking: Thinking | None, model: LoadedModel) -> ShownText:
    """Thoughts as they are shown: without what ends them, of which control tokens have no text."""
    end = "" if thinking is None else thinking.end
    return ShownText(model.decode(model.encode(PromptText.special(end)), special=False) if end else "")


def answer_tokens(engine: Engine, handle: MessageHandle) -> tuple[SampledToken, ...]:
    """Return the tokens that were sampled for a message, without one that only closes its turn."""
    chosen = engine.logprobs(handle)
    return chosen[:-1] if chosen and engine.model.closes(chosen[-1].token) else chosen


def logprobs_of(model: LoadedModel, chosen: Sequence[SampledToken]) -> dict[str, Any]:
    """Of the tokens of one message, with the likeliest in the place of each."""

    def told(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": model.decode([token]), "bytes": [*model.bytes_of(token)], "logprob": logprob}

    return {
        "content": [
            {**told(each.token, each.logprob), "top_logprobs": [told(*likely) for likely in each.top]}
            for each in chosen
        ]
    }


class ParsedOutput(NamedTuple):
    """One message."""

    words: str
    calls: Sequence[ToolCall] = ()
    broken: Sequence[InvalidToolCall] = ()


class OutputStream:
    """One answer as its decode says it: pieces that add up to the message, and the whole.

    Args:
        engine: Decodes it.
        opening: The tokens that it starts with, where nothing is thought before.
        thinking: How its model thinks before it speaks; None: not at all.
        sampling: Of the answer.
        tools: What the speaker may call; without any, all that it says is words.
        required: Of those of which one must be, the names; None: its sampling alone leads it.
        place: See `OutputParser`.
        message_id: Of the message, and the `name` of who says it.
        stop: Texts that end it and are no part of it.
        may_be_cut: See `Constraint`.

    Raises:
        GrammarError: It cannot be led by its constraint, or by what the arguments of a tool must be.
        InvalidRequestError: A tool has a name that the model cannot write; see also `led`.
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
        constraint, ways = None, None
        if required is not None:
            sampling, constraint, ways = led(engine, tools, required, sampling)
        if constraint is not None and may_be_cut:
            constraint = replace(constraint, key=f"{constraint.key}, which may be cut", may_be_cut=True)
        self.opened = len(opening if thinking is None else model.encode(thinking.answer))
        """Tokens before its first word."""
        how = tools_format(model.chat)
        self.asked: dict[str, Any] = {
            "sampling": sampling,
            "constraint": constraint,
            "thinking": thinking,
            "turn_suffix": model.chat.turn_end,
            # Tokens that end a call's turn by themselves.
            "extra_stop_token_ids": tuple(
                token for text in (how.ends if tools else ()) for token in model.encode(text)[:1]
            ),
            # A turn may have several messages: a preamble, then a call.
            "in_parts": bool(tools) and how.is_headed and bool(how.ends),
        }
        """The keyword arguments of its `Decode`."""
        self._ways: Callable[[], CallsOrAnswer | None] = ways or (lambda: None)
        self._speech = OutputParser(model, tools, place, self._ways()) if tools else None
        self._said: dict[str, Any] = {"id": message_id, "name": name}
        turn_end = model.decode(model.encode(PromptText.special(model.chat.turn_end)), special=False)
        self._words, self._thoughts = ShownText(turn_end, stop), shown_thoughts(thinking, model)
        self._called: dict[str | None, bool] = {}
        """Calls that were shown, by their ids; whether they can be made."""

    def hear(self, item: StreamedToken) -> Iterator[AIMessageChunk]:
        """What the next token says."""
        if item.phase == "thoughts":
            if piece := self._thoughts.add(item.text):
                yield self._chunk(_reasoning(piece))
        elif self._speech is not None and item.phase == "answer":
            yield from self._heard(self._speech.add(item.token))
        else:
            yield from self._heard([item.text])

    def rest(self) -> Iterator[AIMessageChunk]:
        """What is left of calls when nothing follows."""
        yield from self._heard([] if self._speech is None else self._speech.end())

    def _heard(self, pieces: Sequence[str | Called]) -> Iterator[AIMessageChunk]:
        for piece in pieces:
            if not isinstance(piece, str):
                yield from self._call(piece)
            elif shown := self._words.add(piece):
                yield self._chunk(self._text(shown))

    def _call(self, call: Called) -> Iterator[AIMessageChunk]:
        """A whole call, once."""
        if call["id"] in self._called:
            return
        # What has no number is never joined to anything.
        number = sum(self._called.values()) if call["type"] == "tool_call" else None
        self._called[call["id"]] = number is not None
        args = call["args"] if isinstance(call["args"], str) else to_json(call["args"])
        yield self._chunk(
            "", tool_call_chunks=[tool_call_chunk(name=call["name"], args=args, id=call["id"], index=number)]
        )

    def last(self, message: AIMessage) -> Iterator[AIMessageChunk]:
        """Yield what is left of the message; the last piece alone says how it ended and what it cost."""
        if rest := self._thoughts.rest(thoughts_of(message)):
            yield self._chunk(_reasoning(rest))
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

    def _chunk(self, content: Any, **more: Any) -> AIMessageChunk:
        return AIMessageChunk(content=content, **self._said, **more)

    def said(self, handle: MessageHandle) -> ParsedOutput:
        """The words and calls of the whole message."""
        model = self._model
        tokens, ending = self._engine.tokens(handle)[self.opened :], model.encode(model.chat.turn_end)
        # What only looks like what ends its turn was said.
        tokens = tokens[: -len(ending)] if ending and tokens[-len(ending) :] == ending else tokens
        if not self._tools:
            return ParsedOutput(model.decode(tokens, special=False).strip())
        said = OutputParser(model, self._tools, self._place, self._ways()).whole(tokens)
        calls = [call for call in said.calls if call["type"] == "tool_call"]
        broken = [call for call in said.calls if call["type"] == "invalid_tool_call"]
        return ParsedOutput(said.words, calls, broken)

    def reply(
        self,
        handle: MessageHandle,
        spoken: ParsedOutput,
        thought: MessageHandle | None,
        *,
        read: int,
        most: int | None = None,
        metadata: dict[str, Any] | None = None,
        **said: Any,
    ) -> AIMessage:
        """The whole message: words, thoughts and calls, what it cost, and why it ended.

        Args:
            handle: Of the message.
            spoken: What it says.
            thought: What was decoded, thoughts and answer; None: it was said without thinking. Thoughts get a block of
                their own.
            read: Tokens of its view.
            most: Tokens that it may have sampled at most: what it was made to say beside is not counted.
            metadata: Of the response, beside the model's name and why it ended.
            said: Other fields of the message.
        """
        engine = self._engine
        thoughts, reasoning = ("", 0) if thought is None else self._thought(thought, handle)
        content: Any = spoken.words
        if thoughts:
            content = [{"type": "reasoning", "reasoning": thoughts}]
            content += [{"type": "text", "text": spoken.words}] if spoken.words or not spoken.calls else []
        made = reasoning + len(answer_tokens(engine, handle))
        output = made if most is None else min(made, most)
        usage = UsageMetadata(
            input_tokens=read + self.opened,
            output_tokens=output,
            total_tokens=read + self.opened + output,
            input_token_details=InputTokenDetails(cache_read=engine.usage(handle).tokens_reused),
        )
        if reasoning:
            usage["output_token_details"] = OutputTokenDetails(reasoning=min(reasoning, output))
        # One that was cut is cut, whatever it calls.
        is_cut = engine.inspect.finish_reason(handle) == "length"
        ended = "length" if is_cut else "tool_calls" if spoken.calls else "stop"
        return AIMessage(
            content=content,
            tool_calls=[*spoken.calls],
            invalid_tool_calls=[*spoken.broken],
            response_metadata={"model_name": engine.model.name, "finish_reason": ended, **(metadata or {})},
            usage_metadata=usage,
            **{**self._said, **said},
        )

    def _thought(self, thought: MessageHandle, handle: MessageHandle) -> tuple[str, int]:
        """Return the thoughts before a message, as a stream of them adds up to, and their length in tokens."""
        if self._thinking is None:
            return "", 0
        *_, made = self._engine.inspect.records([thought])
        assert made.sampled is not None
        sampled = list(made.tokens[slice(*made.sampled)])
        texts, shown = PhaseTexts(self._model, self._thinking), shown_thoughts(self._thinking, self._model)
        said = (text for phase, text in map(texts.add, sampled) if phase == "thoughts")
        return "".join(map(shown.add, said)), len(sampled) - len(self._engine.logprobs(handle))


def _reasoning(piece: str) -> Any:
    return [{"type": "reasoning", "reasoning": piece, "index": 0}]
