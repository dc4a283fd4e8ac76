"""The house's own rules are failing checks, and they can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("size_budget", Path(__file__).with_name("size_budget.py"))
assert spec is not None and spec.loader is not None
size_budget = importlib.util.module_from_spec(spec)
spec.loader.exec_module(size_budget)


def test_the_package_keeps_within_its_budget() -> None:
    assert list(size_budget.too_large(size_budget.PACKAGE)) == []


@pytest.mark.parametrize(
    ("source", "complaint"), [("x = 1\n" * 401, "401 lines"), ("class A:\n" + "    x = 1\n" * 250, "class A has 251")]
)
def test_what_is_too_large_is_named(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "room.py").write_text(source)
    [found] = size_budget.too_large(tmp_path)
    assert complaint in found


def test_a_class_counts_with_its_bases_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class A:\n" + "    x = 1\n" * 99 + "class B(A):\n" + "    x = 1\n" * 99)
    assert list(size_budget.too_large(tmp_path)) == []
    (tmp_path / "two.py").write_text("import one\nclass C(one.B[int], Exception):\n" + "    x = 1\n" * 50)
    assert list(size_budget.too_large(tmp_path)) == ["two.py: class C has 251 lines with its bases B, A, at most 250"]


def test_no_room_is_called_by_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [path for path in size_budget.PACKAGE.rglob("*") if path.stem in vague]
