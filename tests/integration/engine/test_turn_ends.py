"""What ends a turn for its readers: its format's own closing, whichever of its end tokens the model has sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from support.shipped import shipped_tokenizer
from support.speaking import speaking
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import Agent, ChoreoGraph, Decode, Engine, MessageHandle, RunOptions, Sampling, StreamedToken
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.trace import record
from choreo_agents.workflows.playing import sampled

OPEN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As GLM's: a turn ends where the next one starts, and has no end of its own."""
CLOSED = OPEN.replace("{{ m['content'] }}", "{{ m['content'] }}<|end|>")
WORDS = (40, 41, 42)
HEADER = "<|assistant|>"


@pytest.fixture(scope="module")
def special() -> Callable[[str], int]:
    return shipped_tokenizer().convert_tokens_to_ids


def _model(folder: Path, template: str, ends: Sequence[int]) -> LoadedModel:
    save_tiny_llama(folder, eos_token_id=list(ends))
    tokenizer = shipped_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = template, tokenizer.convert_ids_to_tokens(ends[0])
    tokenizer.save_pretrained(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def unclosed(tmp_path_factory: pytest.TempPathFactory, special: Callable[[str], int]) -> LoadedModel:
    """Stops at `<|user|>`, and a turn of it ends with nothing."""
    return _model(tmp_path_factory.mktemp("unclosed"), OPEN, [special("<|user|>")])


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory, special: Callable[[str], int]) -> LoadedModel:
    """Stops at `<|end|>`, which closes its turns, and at `<|user|>`, which does not."""
    return _model(tmp_path_factory.mktemp("two_ends"), CLOSED, [special("<|end|>"), special("<|user|>")])


@pytest.fixture(params=["unclosed", "two_ends"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(request.param)
    return found


def _next_logits(engine: Engine, view: Sequence[MessageHandle]) -> torch.Tensor:
    """What a reader's next token is chosen from."""
    seen: list[torch.Tensor] = []
    forced = Sampling(forced_token_ids=(7,))
    [read] = engine.decode(
        [Decode("<|user|>", view, sampling=forced, logits_callback=lambda each: seen.append(each.clone()))]
    )
    engine.release(read)
    return seen[0]


def test_the_templates_have_the_ends_that_they_are_made_for(unclosed: LoadedModel, two_ends: LoadedModel) -> None:
    assert unclosed.chat.turn_end == "" and two_ends.chat.turn_end == "<|end|>"
    assert len(unclosed.adapter.end_tokens) == 1 and len(two_ends.adapter.end_tokens) == 2


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_a_stop_token_that_does_not_close_a_turn_is_no_part_of_it(
    model: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int], method: str
) -> None:
    said: list[Sequence[int]] = [(*WORDS, special("<|user|>"))]
    engine = make_engine(speaking(model, said), method=method)
    root = engine.prefill("<s><|user|> Who has boats?")
    header, closing = model.encode(HEADER), model.encode(model.chat.turn_end)
    answer = engine.decode(HEADER, [root], sampling=Sampling(logprobs=0), turn_suffix=model.chat.turn_end, author="ann")
    assert engine.tokens(answer) == [*header, *WORDS, *closing]
    assert [each.token for each in engine.logprobs(answer)] == [*WORDS]
    [*_, made] = engine.inspect.records([answer])
    assert made.sampled == (len(header), len(header) + len(WORDS))
    if method == "choreo":
        assert engine.usage(answer).tokens_encoded == answer.length
    assert engine.stats().tokens_encoded <= root.length * (1 if method == "choreo" else 2) + answer.length


def test_readers_see_what_a_prefill_of_the_shown_tokens_would_give_them(
    model: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    said: list[Sequence[int]] = [(*WORDS, special("<|user|>"))]
    spoke, told = make_engine(speaking(model, said)), make_engine(model)
    asked = "<s><|user|> Who has boats?"
    roots = [engine.prefill(asked) for engine in (spoke, told)]
    answer = spoke.decode(HEADER, [roots[0]], turn_suffix=model.chat.turn_end)
    given = told.prefill(spoke.tokens(answer), [roots[1]])
    kept, fresh = spoke.kv.read(answer), told.kv.read(given)
    torch.testing.assert_close((kept.keys, kept.values), (fresh.keys, fresh.values), rtol=0, atol=1e-5)
    mine, theirs = _next_logits(spoke, [roots[0], answer]), _next_logits(told, [roots[1], given])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["Nemotron Nano 2", "Llama 2"])
@pytest.mark.parametrize("blank", [True, False])
def test_a_blank_that_a_turn_closes_with_ends_nothing(
    make_engine: MakeEngine, tmp_path: Path, family: str, blank: bool
) -> None:
    """Words hold such blanks as well: what follows it tells that the turn is over."""
    tokenizer = tokenizer_for(family)
    save_tiny_llama(tmp_path, tokenizer=tokenizer, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model = load_model(tmp_path)
    chat, words = model.chat, "One.\nTwo, or \nthree."
    end = chat.turn_end if blank else chat.turn_end.strip()
    engine = make_engine(speaking(model, [model.encode(f" {words}{end}"), model.encode(f" {words}{end}")]))
    header = chat.header("ann", thinking=False)
    answer = engine.decode(header, turn_suffix=chat.turn_end)
    assert engine.text(answer, special=True).endswith(f" {words}{chat.turn_end}")
    open_ = engine.decode(header)
    assert len(engine.tokens(open_)) <= len(engine.tokens(answer)), "without a closing it ends at the model's own token"


def test_the_token_that_closes_a_turn_is_kept_as_it_was_sampled(
    two_ends: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    engine = make_engine(speaking(two_ends, [(*WORDS, special("<|end|>"))]))
    answer = engine.decode(HEADER, turn_suffix="<|end|>")
    assert engine.tokens(answer) == [special(HEADER), *WORDS, special("<|end|>")]
    assert [each.token for each in engine.logprobs(answer)] == [*WORDS, special("<|end|>")]


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({}, True),
        ({"turn_suffix": ""}, False),
        ({"turn_suffix": []}, False),
        ({"turn_suffix": "<|end|>", "sampling": {"stop_tokens": "<|user|>"}}, True),
        ({"turn_suffix": "<|end|><|user|>"}, False),
        ({"turn_suffix": "<|user|><|end|>"}, True),
        ({"turn_suffix": "", "sampling": {"max_tokens": len(WORDS) + 1}}, False),
    ],
)
def test_when_a_stop_token_stays(
    two_ends: LoadedModel,
    make_engine: MakeEngine,
    special: Callable[[str], int],
    options: dict[str, Any],
    keeps: bool,
) -> None:
    """Where the message is no turn, where the call names it, and where it begins the closing."""
    sampling: dict[str, Any] = {**options.pop("sampling", {})}
    if "stop_tokens" in sampling:
        sampling["stop_tokens"] = (special(sampling["stop_tokens"]),)
    engine = make_engine(speaking(two_ends, [(*WORDS, special("<|user|>"))]))
    answer = engine.decode(HEADER, sampling=Sampling(**sampling), **options)
    found = [each.token for each in engine.logprobs(answer)]
    assert found == ([*WORDS, special("<|user|>")] if keeps else [*WORDS])


def test_forced_tokens_are_taken_as_they_are(
    unclosed: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    whole = (*WORDS, special("<|user|>"))
    engine = make_engine(unclosed)
    assert engine.tokens(engine.decode(HEADER, sampling=Sampling(forced_token_ids=whole), turn_suffix=""))[1:] == [
        *whole
    ]


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
@pytest.mark.parametrize("words", [WORDS, ()], ids=["words", "nothing"])
def test_what_is_left_replays_to_the_same_message(
    model: LoadedModel,
    make_engine: MakeEngine,
    special: Callable[[str], int],
    words: tuple[int, ...],
    method: str,
) -> None:
    """Also if the model had nothing to say: then nothing is forced, and the message is its header and its end."""
    engine = make_engine(speaking(model, [(*words, special("<|user|>"))]), method=method, max_batched_tokens=4)
    root = engine.prefill("<s><|user|> Who has boats?")
    first = engine.decode(HEADER, [root], turn_suffix=model.chat.turn_end)
    [*_, made] = engine.inspect.records([first])
    assert made.sampled is not None and made.tokens[slice(*made.sampled)] == words
    assert engine.inspect.records([root])[-1].sampled is None
    replayed = Sampling(forced_token_ids=made.tokens[slice(*made.sampled)])
    again = engine.decode(HEADER, [root], sampling=replayed, turn_suffix=model.chat.turn_end)
    assert again == first and engine.tokens(again) == engine.tokens(first)
    told = make_engine(model, method=method)
    other = told.decode(
        HEADER, [told.prefill("<s><|user|> Who has boats?")], sampling=replayed, turn_suffix=model.chat.turn_end
    )
    assert told.tokens(other) == engine.tokens(first)
    if method == "choreo":
        assert told.usage(other).tokens_encoded == engine.usage(first).tokens_encoded == first.length
    else:
        assert told.usage(other).tokens_encoded >= root.length + 1, "its prompt was read, in one step or in many"


def test_an_answer_of_nothing_teaches_nothing(
    model: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    engine = make_engine(speaking(model, [(special("<|user|>"),)]))
    answer = engine.decode(HEADER, turn_suffix=model.chat.turn_end)
    assert engine.logprobs(answer) == () and engine.usage(answer).ttft_s is not None
    assert record(engine, "silent", [answer]).learnt_tokens == 0


def test_a_stream_shows_what_the_message_holds(
    model: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    engine = make_engine(speaking(model, [(*WORDS, special("<|user|>"))]))
    *items, answer = engine.stream(HEADER, turn_suffix=model.chat.turn_end, idempotency_key="once")
    assert isinstance(answer, MessageHandle)
    assert [item.token for item in items if isinstance(item, StreamedToken)] == [*WORDS]
    *again, same = engine.stream(HEADER, turn_suffix=model.chat.turn_end, idempotency_key="once")
    assert same == answer and again == items


def test_a_message_that_is_no_turn_is_not_remembered_for_one_that_is(
    unclosed: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    engine = make_engine(speaking(unclosed, [(*WORDS, special("<|user|>"))] * 2))
    assert engine.decode(HEADER, idempotency_key="a") != engine.decode(HEADER, idempotency_key="a", turn_suffix="")


def test_the_end_of_an_ambiguous_choice_is_left_out(
    unclosed: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    vote = Sampling(choices=("red", "red kites"))
    [red] = unclosed.encode(" red")
    engine = make_engine(speaking(unclosed, [(red, special("<|user|>"))]))
    answer = engine.decode(HEADER, sampling=vote, turn_suffix=unclosed.chat.turn_end)
    assert engine.tokens(answer) == [special(HEADER), red]


def test_a_turn_of_a_graph_says_its_words_and_replays(
    model: LoadedModel, make_engine: MakeEngine, special: Callable[[str], int]
) -> None:
    said: list[Sequence[int]] = [(*WORDS, special("<|user|>")), (special("<|user|>"),)]
    engine = make_engine(speaking(model, said))
    graph = ChoreoGraph(system="Talk.").add_node(Agent("ann")).add_node(Agent("bo"))
    graph.add_edge("__start__", "ann").add_edge("ann", "bo").add_edge("bo", "__end__")
    question = {"messages": [("user", "Who has boats?")]}
    state = asyncio.run(graph.compile(engine=engine).ainvoke(question))
    spoken = {message.name: message.content for message in state["messages"][1:]}
    assert spoken == {"ann": model.decode([*WORDS]).strip(), "bo": ""}
    shown = [engine.tokens(MessageHandle.model_validate(entry["handle"])) for entry in state["handles"]]
    ending = model.encode(model.chat.turn_end)
    for tokens, words in zip(shown[-2:], (WORDS, ()), strict=True):
        assert special("<|user|>") not in tokens and tokens[len(tokens) - len(words) - len(ending) :] == [
            *words,
            *ending,
        ]
    other = make_engine(model)
    options = RunOptions(replay=sampled(engine, state))
    again = graph.compile(engine=other).invoke(question, {"configurable": {"choreo": options}})
    assert [other.tokens(MessageHandle.model_validate(entry["handle"])) for entry in again["handles"]] == shown
