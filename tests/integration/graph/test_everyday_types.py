"""Outputs of everyday types: led as far as tokens can be led, and checked by the type."""

from __future__ import annotations

import enum
import ipaddress
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_choreo import ChatChoreo
from pydantic import BaseModel, Field, Json, RootModel, SecretStr

from choreo_agents import START, Agent, ChoreoGraph
from choreo_agents.errors import ConstraintError, GrammarError
from choreo_agents.testing import Script


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    name: str


class Dog(BaseModel):
    name: str = Field(min_length=2)


SAID: dict[Any, Any] = {
    set[str]: ["a", "b"],
    frozenset[int]: [1, 2],
    dict[Color, int]: {"red": 1},
    dict[Literal["a", "b"], str]: {"b": "x"},
    bytes: "raw",
    Path: "/tmp/a",
    SecretStr: "secret",
    ipaddress.IPv4Network: "10.0.0.0/8",
    Json[list[int]]: "[1]",
    Annotated[list[int], Field(json_schema_extra={"uniqueItems": True})]: [1, 2],
    Annotated[Cat | Dog, Field(json_schema_extra={"oneOf": [{"type": "object"}, {"type": "object"}]})]: {"name": "Ann"},
}


def answers(output: Any, said: Any) -> Any:
    script = Script({"ann": said if isinstance(said, str) else json.dumps(said)})
    graph = ChoreoGraph().add_node(Agent("ann", response_format=output)).add_edge(START, "ann")
    with script.load() as engine:
        return graph.compile(engine=engine).invoke({"messages": [("user", "Go.")]})["messages"][-1]


@pytest.mark.parametrize("kind", SAID, ids=str)
def test_an_everyday_type_is_an_output_and_a_field(kind: Any) -> None:
    Agent("ann", response_format=kind)
    model: Any = type("Held", (BaseModel,), {"__annotations__": {"title": str, "of": kind}})
    said = {"title": "Kites", "of": SAID[kind]}
    assert set(answers(model, said).additional_kwargs["parsed"]) == {"title", "of"}
    with Script(default=json.dumps(said)).load() as engine:
        read: Any = ChatChoreo(engine=engine).with_structured_output(model).invoke("Go.")
        assert read == model.model_validate(said)


def test_the_type_checks_what_the_guide_leaves_out() -> None:
    with pytest.raises(ConstraintError, match="does not match its format"):
        answers(RootModel[dict[Color, int]], {"green": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "color"},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {}, "unevaluatedProperties": True, "dependentRequired": {}},
        {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "string", "not": False},
    ],
)
def test_annotations_and_what_forbids_nothing_change_nothing(schema: dict[str, Any]) -> None:
    Agent("ann", response_format=schema)


def test_what_nobody_checks_is_refused_with_what_to_do() -> None:
    with pytest.raises(GrammarError, match=r"uniqueItems.*; leave it out of the schema and check it afterwards"):
        Agent("ann", response_format={"type": "array", "uniqueItems": True})
    with pytest.raises(GrammarError, match=r"oneOf .* Write anyOf"):
        Agent("ann", response_format={"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]})


def test_a_property_may_be_named_as_a_keyword_is() -> None:
    names = {name: {"type": "string"} for name in ("format", "not", "uniqueItems", "propertyNames")}
    said = dict.fromkeys(names, "x")
    schema = {"type": "object", "properties": names, "required": [*names]}
    assert answers(schema, said).additional_kwargs["parsed"] == said
