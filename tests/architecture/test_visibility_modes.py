"""What a visibility mode means is said by the mode: nobody else asks what it is called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from choreo_agents.graph.visibility import ModeName

PACKAGE = Path(__file__).parents[2] / "choreo_agents"
NAMES = set(get_args(ModeName))
BUILT_IN = {"PRIVATE", "SHARED", "REENCODED"}


def _is_named(node: ast.AST) -> bool:
    """Whether something is, or holds, the name of a mode, or one of those that have names."""
    if isinstance(node, ast.Constant):
        return node.value in NAMES
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_named, node.elts))
    return (isinstance(node, ast.Name) and node.id in BUILT_IN) or (
        isinstance(node, ast.Attribute) and node.attr in BUILT_IN
    )


def compared(source: str) -> Iterator[str]:
    """Every place of a file where something is compared with a mode's name, or with the mode itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(map(_is_named, (node.left, *node.comparators))):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.MatchValue) and _is_named(node.value):
            yield f"line {node.value.lineno}: case {ast.unparse(node.value)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = f"{ast.unparse(node)}"
            if node.func.attr in ("startswith", "endswith") and any(map(_is_named, node.args)):
                yield f"line {node.lineno}: {called}"


def test_modes_are_told_apart_by_no_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}, {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in compared(path.read_text())
    ]
    assert found == [], "ask the mode: shows, shares_kv, encodes_again, keeps_out, opens"


@pytest.mark.parametrize(
    "planted",
    [
        'if rule.mode == "shared": pass',
        'if "private" != mode.name: pass',
        'seen = mode in ("shared", "reencoded")',
        "cheap = rule.mode is SHARED",
        "cheap = rule.mode == visibility.REENCODED",
        'match mode:\n    case "private":\n        pass',
        'cheap = label.startswith("shared")',
    ],
)
def test_a_comparison_is_found(planted: str) -> None:
    assert len(list(compared(planted))) == 1


@pytest.mark.parametrize(
    "harmless", ['rule = VisibilityRule("private")', "seen = rule.mode.shows", 'how = {"private": 1}']
)
def test_naming_a_mode_is_no_comparison(harmless: str) -> None:
    assert not list(compared(harmless))
