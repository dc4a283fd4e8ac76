"""State survives LangGraph's strict serializer, as a user switches it on: by an environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys
told = logging.getLogger("langgraph")
told.addHandler(logging.StreamHandler(sys.stdout))
import torch
torch.set_num_threads(1)
from langgraph.checkpoint.memory import InMemorySaver
from choreo_agents import Engine, Memory, Sampling
from choreo_agents.workflows import debate

with Engine.load(sys.argv[1], memory=Memory(kv_budget_bytes=1 << 23)) as engine:
    graph = debate({"alice": "one", "bruno": "two"}, rounds=4, sampling=Sampling(max_tokens=4))
    app = graph.compile(InMemorySaver(), engine=engine, interrupt_before=["moderator"])
    config = {"configurable": {"thread_id": "t"}}
    state = app.invoke({"messages": [("user", "What does Ann have?")]}, config)
    while app.get_state(config).next:
        state = app.invoke(None, config)
    assert type(state["handles"][0]) is dict
    print("said", len(state["handles"]))
"""


@pytest.mark.timeout(300)
def test_a_debate_over_checkpoints_makes_the_strict_serializer_say_nothing(tiny_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_path)],
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "said 9\n"
