"""What a client may ask of a service that runs a graph for many, and what it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import MakeEngine
from support.graphs import QUESTION, branches

from choreo_agents import RunOptions, Sampling
from choreo_agents.errors import InvalidRequestError

HOT = Sampling(temperature=1.0, max_tokens=6, stop_tokens=())


# Options of a run


@pytest.mark.parametrize(
    "written",
    [
        {"seed": 7},
        {"seed": None},
        {"replay": {}},
        {"watch": "x"},
        {"choreo": {"seed": 7}},
        {"choreo": {"replay": {"ann": [5]}, "watch": None}},
        {"choreo": None},
        {"choreo": RunOptions(seed=1), "replay": {}},
    ],
    ids=repr,
)
def test_what_a_client_can_write_into_configurable_is_no_option_of_a_run(
    make_engine: MakeEngine, written: dict[str, Any]
) -> None:
    app = branches(["ann"], HOT).compile(engine=make_engine())
    with pytest.raises(InvalidRequestError, match=r"choreo_agents\.RunOptions\("):
        app.invoke(QUESTION, {"configurable": written})


def test_json_carries_no_options_of_a_run(make_engine: MakeEngine) -> None:
    options = RunOptions(seed=7)
    with pytest.raises(TypeError):
        json.dumps({"choreo": options})
    app, said = branches(["ann"], HOT).compile(engine=make_engine()), set()
    for seed in (1, 2, 1, None):
        state = app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=seed)}})
        said.add((seed, state["messages"][-1].text))
    assert len(said) == 3 and len({text for _, text in said}) == 3
    for wrong in ("7", 7.0, True):
        with pytest.raises(InvalidRequestError, match="seed of a run must be an integer"):
            RunOptions(seed=wrong)  # type: ignore[arg-type]
