"""Internal names that remote engines need of the product are listed in one module, and the list only shrinks."""

from __future__ import annotations

import ast
from pathlib import Path

import choreo_ray

from choreo_agents.engine import delegation

PACKAGE = Path(choreo_ray.__file__).parent
NAMES = 40
"""That are listed: whoever makes them fewer writes down how many they are."""


def test_each_listed_name_is_needed_and_they_grow_no_longer() -> None:
    imports = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == delegation.__name__
    ]
    assert {alias.name for node in imports for alias in node.names} == set(delegation.__all__)
    assert len(delegation.__all__) == NAMES


def test_the_docstring_names_them_all() -> None:
    assert delegation.__doc__ is not None
    words = delegation.__doc__.replace(",", " ").split()
    assert [name for name in delegation.__all__ if name not in words] == []
