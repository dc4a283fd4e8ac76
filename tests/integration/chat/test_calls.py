"""Calls of a chat model on a real model: what is found of a prompt, and what comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from support.chatty import save_chatty
from support.checkpoints import FAMILIES
from support.speaking import engine_that_says

from choreo_agents import Engine, Memory, PromptText, Sampling
from choreo_agents.chat import ChatCall, ChatRequest, astreamed, streamed

FORCED = "I vote for Candidate 1."
TALK: list[BaseMessage] = [SystemMessage("You vote."), HumanMessage("For whom, and why do you vote so?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("chatty"), layers=3)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        yield engine
        engine.check()


def forced(engine: Engine, words: str = FORCED, **more: Any) -> Sampling:
    return Sampling(forced_token_ids=tuple(engine.model.encode(words)), **more)


def said(call: ChatCall) -> AIMessage:
    for _ in streamed(call):
        pass
    assert call.message is not None
    return call.message


def cached(message: AIMessage) -> int:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]["cache_read"]


def test_the_pieces_add_up_to_the_message_and_the_last_tells_what_it_cost(engine: Engine) -> None:
    call = ChatCall(engine, TALK, ChatRequest(sampling=forced(engine), message_id="m"))
    *pieces, last = streamed(call)
    whole: Any = sum(pieces[1:], start=pieces[0]) + last
    assert isinstance(whole, AIMessageChunk) and call.message is not None
    assert whole.text == call.message.text == FORCED
    assert len(pieces) > 1 and last.chunk_position == "last"
    assert not any(piece.usage_metadata for piece in pieces)
    usage = call.message.usage_metadata
    assert usage is not None and last.usage_metadata == usage
    prompt = engine.model.tokenizer.apply_chat_template(
        [{"role": "system", "content": "You vote."}, {"role": "user", "content": TALK[1].content}],
        add_generation_prompt=True,
    )["input_ids"]
    assert usage["input_tokens"] == len(prompt)
    assert usage["output_tokens"] == len(engine.model.encode(FORCED)), "what closes the turn was not said"


def test_the_next_call_finds_all_that_was_read_and_said(engine: Engine) -> None:
    request = ChatRequest(sampling=forced(engine))
    first = said(ChatCall(engine, TALK, request))
    assert cached(first) == 0
    usage = first.usage_metadata
    assert usage is not None
    longer = [*TALK, first, HumanMessage("And else?")]
    second = said(ChatCall(engine, longer, request))
    assert cached(second) == usage["total_tokens"] + len(engine.model.encode("<|im_end|>\n")), "with its end"
    again = said(ChatCall(engine, longer, request))
    assert again.usage_metadata is not None and second.usage_metadata is not None
    assert cached(again) == second.usage_metadata["input_tokens"] - len(engine.model.encode("<|im_start|>assistant\n"))


def test_another_beginning_finds_nothing(engine: Engine) -> None:
    request = ChatRequest(sampling=forced(engine))
    said(ChatCall(engine, TALK, request))
    assert cached(said(ChatCall(engine, [SystemMessage("You do not."), TALK[1]], request))) == 0


def test_its_logits_are_those_of_the_whole_prompt(engine: Engine, folder: Path) -> None:
    request = ChatRequest(sampling=Sampling(max_tokens=12, logprobs=0, seed=1))
    longer = [*TALK, AIMessage(FORCED), HumanMessage("And else?")]
    said(ChatCall(engine, TALK, ChatRequest(sampling=forced(engine))))
    warm = said(ChatCall(engine, longer, request))
    with Engine.load(folder, memory=Memory(kv_budget_bytes=1 << 25)) as other:
        cold = said(ChatCall(other, longer, request))
    assert cached(warm) > cached(cold) == 0 and warm.text == cold.text
    one, other_one = (
        [each["logprob"] for each in message.response_metadata["logprobs"]["content"]] for message in (warm, cold)
    )
    assert one == pytest.approx(other_one, abs=1e-4)


@pytest.mark.parametrize("family", ["Qwen 3", "Gemma 2", "Mistral 7B v0.1"])
def test_the_bytes_of_tokens_add_up_to_the_text_and_its_end_is_none_of_them(family: str) -> None:
    """Byte-level, and pieces that fall back to bytes; emojis, letters of several tokens, and blanks."""
    words = "Ja, na\u00efve \U0001f60a \u4f60\u597d\u00a0x\n\ty"
    with engine_that_says(FAMILIES[family], words) as (engine, _):
        end, size = engine.model.encode(engine.chat.turn_end)[:1], len(engine.model.encode(PromptText.plain(words)))
        for most in (size, size + 1):
            tokens = (*engine.model.encode(PromptText.plain(words)), *end)[:most]
            sampling = Sampling(forced_token_ids=tokens, logprobs=2, max_tokens=most)
            message = said(ChatCall(engine, [HumanMessage("Hi")], ChatRequest(sampling=sampling, thinking=False)))
            told = message.response_metadata["logprobs"]["content"]
            assert b"".join(bytes(each["bytes"]) for each in told).decode() == message.text == words
            assert message.usage_metadata is not None and message.usage_metadata["output_tokens"] == len(told) == size


def test_texts_to_stop_at_are_no_part_of_it(engine: Engine) -> None:
    words = engine.model.encode("I vote for Candidate 2. Candidate 3.")
    call = ChatCall(engine, TALK, ChatRequest(sampling=Sampling(forced_token_ids=tuple(words), stop=(" for Cand",))))
    assert "".join(chunk.text for chunk in streamed(call)) == "I vote"
    assert call.message is not None and call.message.text == "I vote"
    assert call.message.response_metadata["finish_reason"] == "stop"


def test_a_thread_keeps_what_it_has_read_until_it_is_forgotten(engine: Engine) -> None:
    request = ChatRequest(sampling=forced(engine))
    said(ChatCall(engine, TALK, request, thread="t"))
    assert cached(said(ChatCall(engine, TALK, request, thread="t"))) > 0
    engine.threads.forget("t")
    assert engine.stats().leases == 0
    assert cached(said(ChatCall(engine, TALK, request, thread="t"))) == 0


async def test_async_calls_say_the_same(engine: Engine) -> None:
    call = ChatCall(engine, TALK, ChatRequest(sampling=forced(engine)))
    pieces = [chunk async for chunk in astreamed(call)]
    assert "".join(piece.text for piece in pieces) == FORCED
    left = astreamed(ChatCall(engine, TALK, ChatRequest(sampling=Sampling(max_tokens=3000))))
    await anext(left)
    await left.aclose()


def test_who_stops_listening_leaves_nothing_under_way(engine: Engine) -> None:
    pieces = streamed(ChatCall(engine, TALK, ChatRequest(sampling=Sampling(max_tokens=3000))))
    next(pieces)
    pieces.close()
    said(ChatCall(engine, TALK, ChatRequest(sampling=forced(engine))))
    assert (engine.stats().unfinished, engine.stats().cancelled) == (0, 1)
