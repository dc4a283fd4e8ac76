"""Agents whose messages are what a type, a schema, a regular expression or a grammar says."""

from __future__ import annotations

import json
import operator
import pickle
import re
from typing import Annotated, Any, Literal

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessageChunk
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Send
from pydantic import BaseModel, Field, computed_field, field_validator
from typing_extensions import TypedDict

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, RunOptions, Sampling, Synthesizer, Worker
from choreo_agents.errors import ConstraintError, GrammarError, InvalidRequestError, ScriptError
from choreo_agents.models import LoadedModel
from choreo_agents.testing import Script

ASK = {"messages": [("user", "Who has boats?")]}


def print_it(text: str) -> str:
    """Print a text."""
    return text


class Report(BaseModel):
    title: str = Field(max_length=8)
    score: int = Field(ge=0, le=10, alias="points")
    kind: Literal["short", "long"] = "short"

    @field_validator("title")
    @classmethod
    def _says_something(cls, title: str) -> str:
        if title == "nothing":
            raise ValueError("must be a list of non-empty strings")
        return title

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shouted(self) -> str:
        return self.title.upper()


class State(ChoreoState):
    report: dict[str, Any]
    verdict: str
    parts: Annotated[list[Any], operator.add]


def app(engine: Engine, *agents: Agent, **options: Any) -> Any:
    graph: Any = ChoreoGraph(State)
    for before, agent in zip([START, *(each.name for each in agents)], agents, strict=False):
        graph.add_node(agent)
        graph.add_edge(before, agent.name)
    graph.add_edge(agents[-1].name, END)
    return graph.compile(engine=engine, **options)


def judge(**options: Any) -> Agent:
    return Agent("judge", **{"sampling": Sampling(temperature=1.0, max_tokens=120), **options})


def test_a_model_of_pydantic_is_written_as_plain_values(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    engine, config = make_engine(embedded), {"configurable": {"thread_id": "t"}}
    graph = app(engine, judge(response_format=Report, output_key="report"), checkpointer=InMemorySaver())
    state = graph.invoke(ASK, config)
    report, message = state["report"], state["messages"][-1]
    assert set(report) == {"title", "points", "kind"} and Report.model_validate(report).score <= 10
    assert json.loads(message.text).items() <= report.items() and message.additional_kwargs["parsed"] == report
    assert graph.get_state(config).values["report"] == report == json.loads(json.dumps(report))


def test_what_is_streamed_is_the_json(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    graph = app(make_engine(embedded), judge(response_format=Report, output_key="report"))
    shown, report = "", None
    for mode, item in graph.stream(ASK, stream_mode=["messages", "values"]):
        if mode == "messages" and isinstance(item[0], AIMessageChunk):
            shown += str(item[0].text)
        elif mode == "values":
            report = item.get("report")
    assert report is not None and json.loads(shown).items() <= report.items()


class Pair(TypedDict):
    a: int
    b: list[bool]


SCHEMA = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("output", "said", "report"),
    [
        (SCHEMA, '{"a": 5}', {"a": 5}),
        ({"json_schema": SCHEMA}, '{"a": 5}', {"a": 5}),
        (Pair, '{"a": -3, "b": [true]}', {"a": -3, "b": [True]}),
        (list[int], "[1, 22]", [1, 22]),
        (re.compile("[0-9]+ boats?"), "12 boats", "12 boats"),
        ({"regex": "yes|no"}, "no", "no"),
        ({"grammar": 'start: "so " ("yes" | "no")'}, "so no", "so no"),
        (None, "as it is", "as it is"),
    ],
)
def test_a_script_says_what_an_output_allows_and_the_channel_gets_it(output: Any, said: str, report: Any) -> None:
    state = app(Script({"judge": said}).load(), judge(response_format=output, output_key="report")).invoke(ASK)
    assert state["report"] == report and state["messages"][-1].text == said
    assert state["messages"][-1].additional_kwargs.get("parsed", report) == report
    if output is not None:
        with pytest.raises(ScriptError, match="does not allow it"):
            app(Script({"judge": "something else"}).load(), judge(response_format=output)).invoke(ASK)


def test_what_a_type_refuses_is_an_error_with_the_words_and_leaves_nothing_behind() -> None:
    said = '{"title": "nothing", "points": 3, "kind": "long"}'
    with Script({"judge": said}).load() as engine:
        graph = app(engine, judge(response_format=Report, output_key="report"))
        with pytest.raises(ConstraintError, match="must be a list of non-empty strings") as refused:
            graph.invoke(ASK)
        assert refused.value.text == said and "'judge'" in str(refused.value)
        assert pickle.loads(pickle.dumps(refused.value)).text == said
        engine.check()


def test_tokens_that_a_run_replays_are_taken_and_judged(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(embedded)
    graph = app(engine, judge(response_format=SCHEMA, output_key="report"))
    for said in ('{"a": 5}', '{"a": 6}'):
        tokens = tuple(engine.model.encode(said))
        options = RunOptions(replay={("judge", 1, 0, 0): tokens})
        state = graph.invoke(ASK, {"configurable": {"choreo": options}})
        assert state["report"] == json.loads(said)
    options = RunOptions(replay={("judge", 1, 0, 0): tokens[:-1]})
    with pytest.raises(ConstraintError, match="'judge' does not match its format"):
        graph.invoke(ASK, {"configurable": {"choreo": options}})


@pytest.mark.parametrize("said", ["1" + "0" * 30, "-1" + "0" * 20, "1.0e999"])
def test_numbers_that_no_checkpoint_can_carry_are_an_error_of_that_name(said: str) -> None:
    """They would fail where the checkpoint is written, with no word of them."""
    for output in ({"type": "array", "items": {"type": "number"}}, list[float | int]):
        graph = app(Script({"judge": f"[{said}]"}).load(), judge(response_format=output), checkpointer=InMemorySaver())
        with pytest.raises(ConstraintError, match="a number that checkpoints cannot store") as large:
            graph.invoke(ASK, {"configurable": {"thread_id": "t"}})
        assert large.value.text == f"[{said}]"
    highest = app(Script({"judge": str((1 << 64) - 1)}).load(), judge(response_format=int, output_key="report"))
    assert highest.invoke(ASK)["report"] == (1 << 64) - 1


def test_a_message_that_is_cut_is_an_error_that_is_not_retried(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    graph = app(make_engine(embedded), judge(response_format={"regex": "[a-z]{400}"}, sampling=Sampling(max_tokens=5)))
    with pytest.raises(ConstraintError, match="max_tokens=5 was reached") as cut:
        graph.invoke(ASK)
    assert cut.value.text and isinstance(cut.value, ValueError)


def test_instances_and_their_samples_write_lists() -> None:
    engine = Script({"scout": lambda call: "12" if "first" in call.text else "34", "captain": "[7]"}).load()
    graph: Any = ChoreoGraph(State)
    scout = Worker("scout", n=2, response_format={"json_schema": {"type": "integer"}}, output_key="parts")
    graph.add_node(scout)
    graph.add_node(Synthesizer("captain", merges=["scout"], response_format=list[int], output_key="report"), defer=True)

    def sends(state: Any) -> list[Send]:
        return [scout.send(state, "the first"), scout.send(state, "another")]

    graph.add_conditional_edges(START, sends, ["scout"])
    graph.add_edge("scout", "captain").add_edge("captain", END)
    state = graph.compile(engine=engine).invoke(ASK)
    assert state["parts"] == [12, 12, 34, 34] and state["report"] == [7]


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"response_format": "yes|no"}, InvalidRequestError, r"pass \{'regex'"),
        ({"response_format": object()}, InvalidRequestError, "must be a pydantic model"),
        ({"response_format": {"not": {}}}, GrammarError, '"not"'),
        ({"response_format": {"regex": "a(?!b)"}}, GrammarError, "look-around"),
        ({"response_format": re.compile("a", re.IGNORECASE)}, InvalidRequestError, "with flags inside"),
        ({"response_format": re.compile(b"a")}, InvalidRequestError, "of bytes"),
        ({"response_format": Report, "choices": ["a"]}, InvalidRequestError, "has several constraints"),
        (
            {"response_format": Report, "sampling": Sampling(constraint={"regex": "a"})},
            InvalidRequestError,
            "has several constraints",
        ),
        (
            {"choices": ["a"], "sampling": Sampling(constraint={"regex": "a"})},
            InvalidRequestError,
            "has several constraints",
        ),
        (
            {"response_format": Report, "sampling": Sampling(choices=("a",))},
            InvalidRequestError,
            "has several constraints",
        ),
        ({"choices": ["a"], "tools": [print_it]}, InvalidRequestError, r"response_format=\{'regex': 'yes\|no'\}"),
        ({"sampling": Sampling(choices=("a",)), "tools": [print_it]}, InvalidRequestError, "choices exclude calls"),
        ({"output_key": "handles"}, InvalidRequestError, "cannot write 'handles'"),
        ({"output_key": 3}, InvalidRequestError, "cannot write 3"),
    ],
)
def test_what_no_message_can_be_is_refused_when_the_agent_is_made(options: Any, error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        Agent("judge", **options)


def test_a_channel_that_the_state_has_not_is_refused_when_the_graph_is_compiled() -> None:
    with pytest.raises(InvalidRequestError, match=r"'judge' writes 'rport', .* has report, verdict, parts"):
        app(Script(default="-").load(), judge(response_format=Report, output_key="rport"))


def test_objects_of_a_type_have_no_other_properties_and_those_of_a_schema_as_it_says() -> None:
    class Outer(BaseModel):
        inner: list[Report]
        any: dict[str, int] = {}

    agent = judge(response_format=Outer)
    assert agent.response_format is not None
    schema = agent.response_format.grammar.plain()["json_schema"]
    assert schema["additionalProperties"] is schema["$defs"]["Report"]["additionalProperties"] is False
    assert schema["properties"]["any"]["additionalProperties"] == {"type": "integer"}
    open_schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    opened = judge(response_format=open_schema).response_format
    assert opened is not None and opened.grammar.plain()["json_schema"] == open_schema
