"""Agents that must call: whatever their model would say, their message is one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.tools import tool
from support.tiny import save_tiny_llama
from support.tool_templates import tool_tokenizer

from choreo_agents import START, Agent, ChoreoGraph, Engine, Memory, Sampling
from choreo_agents.errors import ScriptError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.testing import Script

ASK = {"messages": [("user", "Where are the kites?")]}
FREE = Sampling(temperature=1.0, max_tokens=120, seed=0)


@tool
def find(thing: Literal["kites", 'a "boat"', "</tool_call>"], loud: bool = False) -> str:
    """Say in which box a thing is."""
    return thing


@tool
def count() -> int:
    """Count all things."""
    return 3


def loaded(family: str, folder: Path) -> LoadedModel:
    tokenizer = tool_tokenizer(family)
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|eom_id|>", "<|observation|>") if t in tokenizer.get_vocab()]
    ids = [tokenizer.eos_token_id, *ends]
    save_tiny_llama(
        folder, vocab_size=len(tokenizer), eos_token_id=ids, max_position_embeddings=8192, num_hidden_layers=1
    )
    tokenizer.save_pretrained(folder)
    return load_model(folder)


def called(engine: Engine, **options: Any) -> list[tuple[str, Any]]:
    agent = Agent("ann", tools=[find, count], **{"sampling": FREE} | options)
    said = ChoreoGraph().add_node(agent).add_edge(START, "ann").compile(engine=engine).invoke(ASK)["messages"][-1]
    assert said.text == "" and not said.invalid_tool_calls
    assert said.response_metadata["finish_reason"] == "tool_calls"
    return [(call["name"], call["args"]) for call in said.tool_calls]


@pytest.mark.parametrize("family", ["Qwen 3", "Hermes", "gpt-oss", "Mistral", "Llama 3.1", "LFM2", "GLM-4.5"])
def test_a_random_model_calls_as_its_family_does(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        thinking: list[Any] = [False, 5] if model.chat.thoughts is not None else [None, None]
        [(name, given)] = called(engine, tool_choice="required", thinking=thinking[0])
        assert (name, given) == ("count", {}) or (name == "find" and find.args_schema.model_validate(given))  # type: ignore[union-attr]
        assert called(engine, tool_choice="count", thinking=thinking[1]) == [("count", {})]
        [(_, given)] = called(engine, tool_choice="find", thinking=thinking[0])
        assert find.args_schema.model_validate(given)  # type: ignore[union-attr]
        engine.check()


def test_a_script_must_call_too() -> None:
    said = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    for words, choice in ((said, "required"), (said, "count")):
        with Script({"ann": words}).load() as engine:
            assert called(engine, tool_choice=choice) == [("count", {})]
    for words, choice in (("In box 12.", "required"), (said, "find"), (f"Let me see. {said}", "required")):
        with Script({"ann": words}).load() as engine, pytest.raises(ScriptError, match="does not allow it"):
            called(engine, tool_choice=choice)
