"""Calls that think, where something happens between what they decode and the answer that they encode again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import Decode, Engine, Memory, Sampling, Thinking
from choreo_agents.engine import calling
from choreo_agents.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    ReleasedHandleError,
    RequestTimeoutError,
)
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import BatchSampler, Draw

LINES = ((">", "Ċ"), (">Ċ", "Ċ"))
"""A tokenizer that knows a mark and the end of its line as one token, and an empty line, too."""


def thinker(folder: Path, family: str, merges: tuple[tuple[str, str], ...] = ()) -> LoadedModel:
    tokenizer = tokenizer_for(family, merges)
    save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return thinker(tmp_path_factory.mktemp("thinker"), "Qwen 3")


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        yield engine
        engine.check()


def asked(engine: Engine) -> MessageHandle:
    return engine.prefill(engine.chat.turn("user", "Why?"), [engine.prefill(engine.chat.bos or " ")])


def call(engine: Engine, view: MessageHandle, *, budget: int = 4, **sampling: object) -> Decode:
    return Decode(
        engine.chat.header("ann", thinking=True),
        [view],
        sampling=Sampling.model_validate({"temperature": 1.0, "seed": 3, "max_tokens": 4} | sampling),
        author="ann",
        turn_suffix=engine.chat.turn_end,
        thinking=Thinking.of(engine.chat, "ann", budget),
    )


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Lets something happen once all is decoded, before the answers are encoded again."""

    def let(happen: Callable[[], object]) -> None:
        kept = calling.Tenant._leased_views

        def after(*asked: object) -> object:
            happen()
            return kept(*asked)  # type: ignore[arg-type]

        monkeypatch.setattr(calling.Tenant, "_leased_views", after)

    return let


Between = Callable[[Callable[[], object]], None]


def test_thinking_and_encoding_again_have_one_deadline(engine: Engine, between: Between) -> None:
    view = asked(engine)
    engine.decode([call(engine, view, seed=4)])  # the first step of an engine is slow
    leases = engine.stats().leases
    between(lambda: time.sleep(0.8))
    with pytest.raises(RequestTimeoutError):
        engine.decode([replace(call(engine, view), timeout_s=0.7)])
    assert engine.stats().leases == leases


def test_a_view_may_be_released_while_its_reader_thinks(engine: Engine, between: Between) -> None:
    view = asked(engine)
    between(lambda: engine.release(view))
    [answer] = engine.decode([call(engine, view)])
    assert engine.inspect.thoughts(answer)
    with pytest.raises(ReleasedHandleError):
        engine.tokens(view)


@pytest.mark.parametrize("what", ["engine", "tenant"])
def test_what_is_closed_while_a_model_thinks_says_so(model: LoadedModel, between: Between, what: str) -> None:
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        tenant = engine.tenant("x")
        view = asked(tenant)
        between((engine if what == "engine" else tenant).close)
        with pytest.raises(EngineClosedError):
            tenant.decode([call(tenant, view)])
        if what == "tenant":
            assert engine.stats().leases == 0


def test_what_stands_before_an_answer_is_no_part_of_it_and_stops_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that a model leaves empty behind its thoughts, as it samples them."""
    view, line = asked(engine), engine.model.encode("\n")
    [other] = engine.model.encode("x")
    close = engine.model.encode("</think>")
    for stop in ({"stop": ("\n",)}, {"stop_tokens": tuple(line)}, {"max_tokens": 1}):
        script = iter([other, *close, *line, other, *line])
        monkeypatch.setattr(BatchSampler, "draw", partial(_said, script))
        [answer] = engine.decode([call(engine, view, **stop)])
        assert other in [chosen.token for chosen in engine.logprobs(answer)]


def _said(script: Iterator[int], _: torch.Tensor, draws: Sequence[Draw], *rest: object) -> list[int]:
    """What a mask allows, or what comes next."""
    return [next(script) if draw.mask is None else int(draw.mask.nonzero()[0, 0]) for draw in draws]


@pytest.mark.parametrize("behind", ["", "\n", "\n\n", "\n\n\n"])
def test_thoughts_end_where_their_end_and_that_of_its_line_are_one_token(tmp_path: Path, behind: str) -> None:
    """Of a model whose marks are words, as tokenizers write them with what stands behind."""
    model = thinker(tmp_path, "Granite 3.3 on request", LINES)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        view = asked(engine)
        forced = (
            *engine.model.encode(f"hm\n</think>{behind}"),
            *engine.model.encode("ann:"),
            *engine.model.encode(" two"),
        )
        [answer] = engine.decode([call(engine, view, forced_token_ids=forced)])
        assert engine.text(answer).removesuffix(engine.chat.turn_end).endswith("ann: two")
        assert "hm" not in engine.text(answer)


@pytest.mark.parametrize(
    "wrong",
    [{"end": " "}, {"end": 7}, {"before": 3}, {"after": "x"}, {"answer": None}]
    + [{"budget": budget} for budget in (-1, 1.5, "3", None, True)],
    ids=str,
)
def test_thinking_that_no_step_could_follow_is_refused_where_it_is_made(wrong: dict[str, Any]) -> None:
    """A budget of a token and a half failed the engine's step, with all who shared it."""
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        Thinking(**({"end": "</think>", "answer": "x"} | wrong))


def test_a_context_that_thoughts_do_not_fit_into_says_so(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match="budget"):
        engine.decode([call(engine, asked(engine), budget=1 << 20)])
