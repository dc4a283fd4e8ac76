"""Runs the programs, stock and ported, and says what became of them.

`PYTHONPATH=.:tests python -m integration.langgraph_docs.porting` writes docs/benchmarks/ported-programs.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from integration.langgraph_docs.programs import PROGRAMS
from support.ported_views import View, seen_view, sent_views
from support.scripted_chat import ScriptedChat

from choreo_agents import Engine
from choreo_agents.testing import Script

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs/benchmarks/ported-programs.md"
Kind = Literal["stock", "ported"]


@cache
def program(kind: Kind, name: str) -> Callable[[Any], Any]:
    """What builds a program's graph over a chat model, or over an engine."""
    made: Callable[[Any], Any] = import_module(f"integration.langgraph_docs.{kind}.{name}").program
    return made


def stock_views(name: str) -> list[View]:
    """What each call of the stock program is sent."""
    model = ScriptedChat(lines=dict(PROGRAMS[name].lines))
    PROGRAMS[name].run(program("stock", name)(model))
    return sent_views(model)


@cache
def ported(name: str) -> tuple[list[View], int]:
    """What each call of the ported program sees, and how many tokens were encoded."""
    script, calls = Script(PROGRAMS[name].lines), []

    def heard(call: Any) -> Any:
        sampler = script.model.sampler(call)  # type: ignore[misc]
        calls.append(call)
        return sampler

    app = program("ported", name)
    with Engine.load(replace(script.model, sampler=heard)) as engine:
        PROGRAMS[name].run(app(engine))
        decode, nodes = engine.model.decode, {path.partition("|")[0] for path in _authors(calls)}
        views = [seen_view(call, one.said, decode, nodes) for call, one in zip(calls, script.calls, strict=True)]
        engine.check()
        return views, engine.stats().tokens_encoded


def _authors(calls: list[Any]) -> set[str]:
    return {str(author) for call in calls for author in (call.author, *(each for each, _ in call.view))}


@cache
def encoded(name: str, method: Literal["baseline", "naive"]) -> int:
    """The tokens that the same calls encode as text, with a prefix cache or without."""
    with Script(PROGRAMS[name].lines).load(method=method) as engine:
        PROGRAMS[name].run(program("ported", name)(engine))
        return engine.stats().tokens_encoded


@dataclass(frozen=True)
class Changes:
    """Lines of a ported program that its stock one has not, and those that are gone."""

    nodes: list[str]
    """One for each agent."""
    functions: list[str]
    """Of functions: routes, and what is handed on."""
    graphs: list[str]
    """The state, the graph, the engine."""
    imports: list[str]
    gone: int


_WRAPPED = re.compile(r"\(\n +(.*[^,(])\n +\)\n")
"""A call that the formatter has wrapped for its length: it counts as the one line that was written."""
_KINDS = (
    ("imports", re.compile(r"(from|import) .*")),
    ("nodes", re.compile(r".*graph\.add_node\(Agent\(.*\)\)$")),
    ("graphs", re.compile(r"class \w+\(ChoreoState\):|def \w+\(engine.*|.* = (ChoreoGraph|team)\(.*|.*\.compile\(.*")),
    ("functions", re.compile(r"\s*(def \w+\(.*|return .*|\w+ = .*)")),
)


def changes(name: str) -> Changes:
    """What porting a program has changed in its lines, without empty ones."""
    texts = ((HERE / kind / f"{name}.py").read_text() for kind in ("stock", "ported"))
    stock, now = (_WRAPPED.sub(r"(\1)\n", text).splitlines() for text in texts)
    found: dict[str, list[str]] = {kind: [] for kind, _ in _KINDS}
    gone = 0
    for line in difflib.unified_diff(stock, now, n=0, lineterm=""):
        if line.startswith(("---", "+++", "@@")) or not line[1:].strip():
            continue
        if line.startswith("-"):
            gone += 1
            continue
        kind = next((kind for kind, pattern in _KINDS if pattern.fullmatch(line[1:])), None)
        assert kind is not None, f"{name} has a line that is not expected in a ported program: {line}"
        found[kind].append(line[1:].strip())
    return Changes(**found, gone=gone)


def page() -> str:
    """The page on what they cost."""
    rows = []
    for name in PROGRAMS:
        made = changes(name)
        naive, baseline, choreo = encoded(name, "naive"), encoded(name, "baseline"), ported(name)[1]
        rows.append(
            f"| {name.replace('_', ' ')} | {len(PROGRAMS[name].lines)} | {len(made.nodes)} | {len(made.functions)} "
            f"| {len(made.graphs)} | {made.gone} | {naive} | {baseline} | {choreo} | {naive / choreo:.2f}x |"
        )
    return _PAGE.format(rows="\n".join(rows))


_PAGE = """# LangGraph programs, before and after

Twelve programs shaped like LangGraph's documentation, stock and with our nodes
([both](../../tests/integration/langgraph_docs/)), run on one script. The tests compare what each call of the one is
sent with what each call of the other sees; [how to port a graph](../tutorials/port-a-graph.md) has what maps to what.

`PYTHONPATH=.:tests python -m integration.langgraph_docs.porting` writes this page, and a test compares it.

| program | agents | lines: nodes | functions | graphs | gone | tokens: naive | baseline | choreo | naive / choreo |
|---|---|---|---|---|---|---|---|---|---|
{rows}

*Lines* are those of the ported file that the stock file has not, without imports and empty lines: `nodes`, one for
each `add_node(Agent(...))`; `functions`, of routes that stay functions (`on_output=`) and of what functions hand on;
`graphs`, the state's class, `ChoreoGraph`, and the engine instead of the model; `gone`, lines of the stock file that
are not needed any more.

*Tokens* are those that the engine encoded, of the script's tokenizer, for the calls of the ported program: `naive`,
each call encodes all that it sees, as a stock program with a local model has it; `baseline`, as text with a prefix
cache; `choreo`, from the cache. Conversations are short here, so that tests are quick, and most of what is encoded is
each agent's own system prompt: the longer what is shared, the larger the ratio ([with messages of 256
tokens](workflows.md)). Where nothing is shared a prefix cache can do better: in *long term memory* every call is in a
thread of its own, and a prefix cache finds the first words of a system prompt again where we find whole messages.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
