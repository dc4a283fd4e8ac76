"""Long texts: refused before a tokenizer is asked, or tokenized while others go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from conftest import MakeEngine

from choreo_agents import Engine, Prefill, Sampling
from choreo_agents.engine import calling
from choreo_agents.errors import ContextLengthError, InvalidRequestError
from choreo_agents.models import LoadedModel, PromptText

FEW = Sampling(max_tokens=2, stop_tokens=())


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long here: the tests' models have short contexts."""
    monkeypatch.setattr(calling, "LONG", 100)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Length of each text that was tokenized, and the thread that did it."""
    found: list[tuple[int, str]] = []
    encode = LoadedModel.encode

    def encoding(self: LoadedModel, text: Any) -> list[int]:
        found.append((len(text), threading.current_thread().name))
        return encode(self, text)

    monkeypatch.setattr(LoadedModel, "encode", encoding)
    return found


@pytest.mark.parametrize("kind", [str, PromptText.plain], ids=["text", "framed"])
def test_what_is_much_too_long_reaches_no_tokenizer(
    make_engine: MakeEngine, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    longest = engine.model.longest_text
    assert longest >= 64 * engine.model.adapter.max_positions

    def none(*_: object, **__: object) -> None:
        raise AssertionError("a tokenizer was asked")

    monkeypatch.setattr(engine.model.tokenizer, "encode", none)
    monkeypatch.setattr(engine.model.safe_tokenizer, "encode", none)
    with pytest.raises(ContextLengthError, match="characters is too long"):
        engine.prefill(kind("x" * (longest + 1)))
    with pytest.raises(ContextLengthError, match="characters is too long"):
        engine.decode(kind("x" * (longest + 1)), sampling=FEW)
    assert engine.stats().unfinished == 0


def test_a_long_text_is_tokenized_beside_who_asks(make_engine: MakeEngine, asked: list[tuple[int, str]]) -> None:
    engine: Engine = make_engine()
    text = "red " * 40
    made = engine.prefill(text)
    assert made.id == engine.prefill(engine.model.encode(text)).id
    assert engine.prefill(text, escape_special_tokens=True).id == engine.prefill(PromptText.plain(text)).id
    long = {thread for length, thread in asked if length >= calling.LONG and thread != "MainThread"}
    assert long == {"choreo-tokenizing"}
    mixed = engine.prefill([Prefill("Ann has 3 kites."), Prefill(text), Prefill("Bob has 5 boats.")])
    assert [handle.id for handle in mixed] == [
        engine.prefill(each).id for each in ("Ann has 3 kites.", text, "Bob has 5 boats.")
    ]
    started: list[str] = []
    with pytest.MonkeyPatch.context() as counted:
        counted.setattr(
            calling.threading.Thread,
            "start",
            lambda self, start=threading.Thread.start: (started.append(self.name), start(self)),
        )
        engine.prefill([Prefill(text + "blue " * number) for number in range(50)])
    assert started.count("choreo-tokenizing") == 1, "one for a batch"
    asked.clear()
    engine.prefill("Ann has 3 kites.")
    assert {thread for _, thread in asked} <= {"MainThread"}, "a thread for each short text would cost more than it"


async def test_an_event_loop_goes_on_meanwhile(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gone_on = make_engine(), threading.Event()
    encode = LoadedModel.encode

    def waiting(self: LoadedModel, text: Any) -> list[int]:
        if len(text) >= calling.LONG:
            assert gone_on.wait(30), "the event loop waits for the tokenizer"
        return encode(self, text)

    monkeypatch.setattr(LoadedModel, "encode", waiting)
    text = "red " * 40
    prefilled = asyncio.create_task(engine.aprefill(text))
    said = asyncio.create_task(engine.adecode(text, sampling=FEW))

    async def streamed() -> list[Any]:
        return [item async for item in engine.astream(text, sampling=FEW)]

    pieces = asyncio.create_task(streamed())
    await asyncio.sleep(0.05)
    gone_on.set()
    handle = await prefilled
    assert engine.tokens(handle) == engine.model.encode(text)
    assert engine.tokens(await said)[: handle.length] == engine.tokens(handle) and len(await pieces) == 3


def test_what_cannot_be_tokenized_says_so(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="cannot tokenize"):
        make_engine().prefill("\ud800" * calling.LONG)
