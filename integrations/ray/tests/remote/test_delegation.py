"""Internal names that remote engines need of the product are listed in one module, and the list only shrinks."""

from __future__ import annotations

import ast
from pathlib import Path

import choreo_ray

from choreo_agents.engine import delegation

PACKAGE = Path(choreo_ray.__file__).parent
NAMES = 10
"""That are listed: whoever makes them fewer writes down how many they are."""


def _imported(path: Path, module: str | None = None) -> set[str]:
    """Names that a file imports, from any module or this one."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if module in (None, node.module) for alias in node.names}


def test_each_listed_name_is_needed_and_they_grow_no_longer() -> None:
    listed = _imported(Path(delegation.__file__))
    assert set().union(*(_imported(path, delegation.__name__) for path in PACKAGE.rglob("*.py"))) == listed
    assert len(listed) == NAMES
