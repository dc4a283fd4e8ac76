"""A checkpoint's own sampling is what calls do that do not say otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from support.tiny import save_tiny_llama

from choreo_agents import Agent, ChoreoGraph, Decode, Engine, MessageHandle, Sampling
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.testing import Script

OWN = {"do_sample": True, "temperature": 1.3, "top_k": 40, "repetition_penalty": 1.1}
SAME = Sampling(temperature=1.3, top_k=40, repetition_penalty=1.1, max_tokens=12, stop_tokens=())
SHORT = Sampling(max_tokens=12, stop_tokens=())
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0, max_tokens=12, stop_tokens=())


def saved(folder: Path, said: dict[str, Any], **changes: Any) -> Path:
    """A model whose generation config says this."""
    save_tiny_llama(folder, **changes)
    (folder / "generation_config.json").write_text(json.dumps({"transformers_version": "5.0.0"} | said))
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("own"), OWN | {"eos_token_id": [2, 4]})


@pytest.fixture(scope="module")
def own(path: Path) -> LoadedModel:
    return load_model(path)


def test_a_loaded_model_says_what_it_does_by_default(
    own: LoadedModel, tiny: LoadedModel, embedded: LoadedModel
) -> None:
    wanted = {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.1}
    assert own.sampling_defaults.model_dump(exclude_unset=True) == wanted
    assert not tiny.sampling_defaults.model_fields_set and not embedded.sampling_defaults.model_fields_set


def _decoded(engine: Engine, sampling: Sampling, **options: Any) -> list[int]:
    return engine.tokens(engine.decode([7, 8], sampling=sampling, **options))


def _streamed(engine: Engine, sampling: Sampling) -> list[int]:
    *_, handle = engine.stream([7, 8], sampling=sampling)
    assert isinstance(handle, MessageHandle)
    return engine.tokens(handle)


def _in_batch(engine: Engine, sampling: Sampling) -> list[int]:
    return engine.tokens(engine.decode([Decode([7, 8], sampling=sampling)])[0])


def _merged(engine: Engine, sampling: Sampling) -> list[int]:
    branches = engine.decode([Decode([9, n], sampling=Sampling(forced_token_ids=(5, 6))) for n in (10, 11)])
    return engine.tokens(engine.branches.merge(branches, [6, 7], sampling=sampling))


def _in_a_graph(engine: Engine, sampling: Sampling) -> list[int]:
    graph = ChoreoGraph(system="Talk.").add_node(Agent("ann", sampling=sampling)).add_edge("__start__", "ann")
    state = asyncio.run(graph.compile(engine=engine).ainvoke({"messages": [("user", "Who has boats?")]}))
    return engine.tokens(MessageHandle.model_validate(state["handles"][-1]["handle"]))


@pytest.mark.parametrize("ask", [_decoded, _streamed, _in_batch, _merged, _in_a_graph])
def test_what_a_call_does_not_say_is_as_if_it_had_said_it(
    own: LoadedModel, tiny: LoadedModel, make_engine: MakeEngine, ask: Callable[[Engine, Sampling], list[int]]
) -> None:
    """Also the seed that is derived from what it says: the tokens are those of a call that says all of it."""
    unsaid, said = ask(make_engine(own), SHORT), ask(make_engine(own), SAME)
    greedy, plain = ask(make_engine(own), GREEDY), ask(make_engine(tiny), SHORT)
    assert unsaid == said and unsaid != greedy
    assert greedy == plain, "the likeliest token is taken where a call says so"
    assert ask(make_engine(own), GREEDY.model_copy(update={"temperature": 1.3})) != greedy


def test_an_answer_is_remembered_under_what_was_really_asked(own: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(own)
    first = engine.decode([7], sampling=SHORT, idempotency_key="a")
    assert engine.decode([7], sampling=SAME, idempotency_key="a") == first
    assert engine.decode([7], sampling=GREEDY, idempotency_key="a") != first


def test_a_summary_is_the_same_whenever_it_is_asked_for(own: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(own)
    root = engine.prefill("<s><|user|> Who has boats?<|end|>")
    branch = engine.decode("<|assistant|>", [root], sampling=SHORT, author="ann")
    merged = [
        engine.tokens(engine.branches.merge([branch], [6, 7], strategy="summary", sampling=GREEDY)) for _ in range(2)
    ]
    assert merged[0] == merged[1]


def test_they_can_be_left_aside(path: Path, tiny: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(path, generation_config="off")
    assert not engine.model.sampling_defaults.model_fields_set
    assert set(engine.model.adapter.end_tokens) == {2, 4}
    assert _decoded(engine, SHORT) == _decoded(make_engine(tiny), SHORT)
    with pytest.raises(InvalidRequestError, match="loaded already: pass generation_config to load_model"):
        Engine.load(tiny, generation_config="auto")
    with pytest.raises(InvalidRequestError, match='generation_config must be "auto" or "off", not \'vllm\''):
        load_model(path, generation_config="vllm")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "config", "ends"),
    [
        ({"eos_token_id": [4, 3]}, 3, [4, 3, 2]),
        ({"eos_token_id": 4}, 3, [4, 2]),
        ({}, 3, [2]),
        ({"eos_token_id": [2, 4]}, 2, [2, 4]),
    ],
)
def test_a_model_ends_where_its_settings_and_its_tokenizer_say(
    tmp_path: Path, said: dict[str, Any], config: int, ends: list[int]
) -> None:
    """The tokenizer's end token is 2."""
    assert [*load_model(saved(tmp_path, said, eos_token_id=config)).adapter.end_tokens] == ends


def test_without_a_generation_config_the_models_own_end_counts(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path, eos_token_id=4)
    (folder / "generation_config.json").unlink()
    model = load_model(folder)
    assert [*model.adapter.end_tokens] == [4, 2] and not model.sampling_defaults.model_fields_set


def test_a_script_takes_the_option() -> None:
    with Script(default="Yes.").load("some/model", generation_config="off") as engine:
        assert not engine.model.sampling_defaults.model_fields_set
