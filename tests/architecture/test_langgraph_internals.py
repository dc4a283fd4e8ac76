"""What LangGraph keeps to itself is known to one file: a new LangGraph that breaks us breaks that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from langgraph.graph import StateGraph
from typing_extensions import TypedDict

PACKAGE = Path(__file__).parents[2] / "choreo_agents"
ALLOWED = "graph/langgraph_internals.py"
SHOWN_TO_USERS = {"langgraph_node"}
"""By which LangGraph's own documentation tells the streams of nodes apart."""


class _State(TypedDict):
    words: str


def private_attributes() -> frozenset[str]:
    """What a graph of LangGraph's, and what it is compiled to, have and do not promise."""
    graph = StateGraph(_State).add_node("node", lambda state: state).set_entry_point("node")
    names = {name for each in (graph, graph.compile(), graph.nodes["node"]) for name in dir(each)}
    return frozenset(name for name in names if name.startswith("_") and not name.startswith("__"))


def reached(source: str, private: frozenset[str]) -> Iterator[str]:
    """Every private name of LangGraph's in a file."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                if name.startswith("langgraph") and any(part.startswith("_") for part in name.split(".")):
                    yield f"line {node.lineno}: imports {name}"
        elif isinstance(node, ast.Attribute) and node.attr in private - own:
            yield f"line {node.lineno}: reads .{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            text = node.value
            if text.startswith(("__pregel", "langgraph_", "join:")) and text not in SHOWN_TO_USERS:
                yield f"line {node.lineno}: knows {text!r}"


def test_langgraphs_private_names_stand_in_one_file() -> None:
    private = private_attributes()
    assert "_node_defaults" in private
    found = [
        f"{path.relative_to(PACKAGE)}, {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / ALLOWED
        for what in reached(path.read_text(), private)
    ]
    assert found == []


def test_that_file_has_some() -> None:
    assert list(reached((PACKAGE / ALLOWED).read_text(), private_attributes()))


@pytest.mark.parametrize(
    "planted",
    [
        "from langgraph._internal._constants import CONFIG_KEY_READ",
        "from langgraph.pregel._loop import PregelLoop",
        "import langgraph.pregel._algo as algo",
        "from langgraph.graph import _branch",
        "policy = builder._node_defaults.retry_policy",
        "class Mine(StateGraph):\n    def policy(self):\n        return self._node_defaults",
        "read = config['configurable']['__pregel_read']",
        "step = (config.get('metadata') or {}).get('langgraph_step')",
        "joined = trigger.startswith('join:')",
    ],
)
def test_a_private_name_elsewhere_is_found(planted: str) -> None:
    assert len(list(reached(planted, private_attributes()))) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        "from langgraph.graph import StateGraph",
        "class Mine:\n    def own(self):\n        self._defaults = 1\n        return self._defaults",
        "who = metadata['langgraph_node']",
        'def f():\n    """langgraph_step is LangGraph\'s."""',
    ],
)
def test_what_langgraph_promises_may_be_used_anywhere(harmless: str) -> None:
    assert not list(reached(harmless, private_attributes()))
