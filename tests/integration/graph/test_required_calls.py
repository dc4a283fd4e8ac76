"""Agents that must call, or may where they would answer in a form: whatever their model would say, they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel, Field
from support.speaking import speaking
from support.tiny import save_tiny_llama
from support.tool_templates import tool_tokenizer

from choreo_agents import START, Agent, ChoreoGraph, ChoreoState, Engine, Memory, PromptText, Sampling
from choreo_agents.chat import CompiledConstraints, described_tools
from choreo_agents.errors import ScriptError
from choreo_agents.models import LoadedModel, ToolCall, load_model, tools_format
from choreo_agents.sampling import Grammar
from choreo_agents.testing import Script

ASK = {"messages": [("user", "Where are the kites?")]}
FAMILIES = ["Qwen 3", "Hermes", "gpt-oss", "Mistral", "Llama 3.1", "listed", "GLM-4.5"]
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


class Boxes(BaseModel):
    name: Literal["kites", "boats"]
    boxes: list[bool] = Field(max_length=2)


def called(engine: Engine, **options: Any) -> list[tuple[str, Any]]:
    agent = Agent("ann", tools=[find, count], **{"sampling": FREE} | options)
    said = ChoreoGraph().add_node(agent).add_edge(START, "ann").compile(engine=engine).invoke(ASK)["messages"][-1]
    assert said.text == "" and not said.invalid_tool_calls
    assert said.response_metadata["finish_reason"] == "tool_calls"
    return [(call["name"], call["args"]) for call in said.tool_calls]


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_and_answers_in_a_form_are_led_side_by_side(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    tools, how = described_tools("ann", [find, count], "auto"), tools_format(model.chat)
    calls = [ToolCall("find", {"thing": "kites", "loud": True}, "abcdefghi"), ToolCall("count", {}, "ABCDEFGHI")]
    lead = PromptText.special(how.lead) if how.is_headed else PromptText()
    answers = (
        ({"json_schema": Boxes.model_json_schema()}, '{"name": "kites", "boxes": [true]}'),
        ({"regex": "[0-9]/2"}, "3/2"),
        ({"grammar": 'start: "in " box\nbox: /[0-9]+/'}, "in 12"),
    )
    for form, answer in answers:
        led, _ = CompiledConstraints(model).of(Grammar.model_validate(form), tools)
        said = [how.grammar.write([each]) for each in calls] + [lead + PromptText.plain(answer)]
        said += [] if how.is_headed else [how.grammar.write(calls)]
        end = frozenset(model.adapter.end_tokens)
        for each in said:
            constraint = led.make(model, end)
            for token in model.encode(each):
                assert constraint.allowed()[token], each.text  # type: ignore[index]
                constraint.take(token)
            assert constraint.done or constraint.allowed()[min(end)], each.text  # type: ignore[index]
        assert not led.make(model, end).allowed()[model.encode("Hello")[0]]  # type: ignore[index]


@pytest.mark.parametrize("family", ["Qwen 3", "gpt-oss", "Llama 3.1"])
def test_a_random_model_calls_or_answers_in_the_form(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        for seed in range(4):
            agent = Agent(
                "ann", tools=[find, count], response_format=Boxes, sampling=FREE.model_copy(update={"seed": seed})
            )
            graph = ChoreoGraph().add_node(agent).add_edge(START, "ann").compile(engine=engine)
            said = graph.invoke(ASK)["messages"][-1]
            assert not said.invalid_tool_calls and bool(said.tool_calls) != bool(said.text)
            if said.text:
                assert Boxes.model_validate_json(said.text).model_dump() == said.additional_kwargs["parsed"]
        engine.check()


class Asked(BaseModel):
    name: str
    parameters: dict[str, str]


@pytest.mark.parametrize(
    ("family", "output", "says", "is_call"),
    [
        ("Llama 3.1", Asked, '{"name": "find", "parameters": {"thing": "a stone"}}', False),
        ("Llama 3.1", Asked, '{"name": "find", "parameters": {"thing": "kites"}}', True),
        ("Hermes", re.compile("(?s:.*)"), '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>', False),
        ("Hermes", re.compile("(?s:.*)"), '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>', True),
    ],
)
def test_an_answer_in_the_form_that_no_call_may_be_is_an_answer(
    family: str, output: Any, says: str, is_call: bool, tmp_path: Path
) -> None:
    """Whatever it looks like: a tool never runs with arguments that its schema refuses."""
    model = loaded(family, tmp_path)
    thinking = None if model.chat.thoughts is None else False
    said = [*model.encode(says), min(model.adapter.end_tokens)]
    with Engine.load(speaking(model, [said]), memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        agent = Agent("ann", tools=[find, count], response_format=output, sampling=FREE, thinking=thinking)
        graph = ChoreoGraph().add_node(agent).add_edge(START, "ann").compile(engine=engine)
        chunks, state = list[Any](), dict[str, Any]()
        for mode, piece in graph.stream(ASK, stream_mode=["messages", "values"]):
            if mode == "messages":
                chunks.append(piece[0])
            else:
                state = piece
        whole = state["messages"][-1]
        assert bool(whole.tool_calls) == is_call and not whole.invalid_tool_calls
        assert whole.text == ("" if is_call else says) == "".join(each.text for each in chunks)
        assert bool(sum(len(each.tool_calls) for each in chunks)) == is_call


class Noted(ChoreoState):
    boxes: dict[str, Any]


def test_an_agent_calls_and_then_answers_in_the_form() -> None:
    """It writes its output once it has one."""
    says = ['<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>', '{"name": "kites", "boxes": []}']
    with Script({"ann": says}).load() as engine:
        agent = Agent("ann", tools=[count], response_format=Boxes, output_key="boxes")
        graph = ChoreoGraph(Noted).add_node(agent).add_node("tools", ToolNode([count]))
        graph.add_edge(START, "ann").add_conditional_edges("ann", tools_condition).add_edge("tools", "ann")
        written = [*graph.compile(engine=engine).stream(ASK, stream_mode="updates")]
        assert "boxes" not in written[0]["ann"] and [
            each["name"] for each in written[0]["ann"]["messages"][-1].tool_calls
        ] == ["count"]
        assert written[2]["ann"]["boxes"] == {"name": "kites", "boxes": []}
    with Script({"ann": "It is."}).load() as engine, pytest.raises(ScriptError, match="does not allow it"):
        ChoreoGraph(Noted).add_node(agent).add_edge(START, "ann").compile(engine=engine).invoke(ASK)


def test_a_script_must_call_too() -> None:
    said = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    for words, choice in ((said, "required"), (said, "count")):
        with Script({"ann": words}).load() as engine:
            assert called(engine, tool_choice=choice) == [("count", {})]
    for words, choice in (("In box 12.", "required"), (said, "find"), (f"Let me see. {said}", "required")):
        with Script({"ann": words}).load() as engine, pytest.raises(ScriptError, match="does not allow it"):
            called(engine, tool_choice=choice)
