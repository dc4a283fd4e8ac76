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
    assert list(size_budget.over_budget(size_budget.PACKAGE)) == []


@pytest.mark.parametrize(
    ("source", "complaint"), [("x = 1\n" * 401, "401 lines"), ("class A:\n" + "    x = 1\n" * 250, "class A has 251")]
)
def test_what_is_too_large_is_named(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "room.py").write_text(source)
    [found] = size_budget.too_large(tmp_path)
    assert complaint in found


@pytest.fixture
def nothing_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_budget, "CROWDED", {})
    monkeypatch.setattr(size_budget, "NAMED_TWICE", frozenset())


def fill(folder: Path, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        (folder / f"file{number}.py").touch()


def test_a_folder_with_too_many_files_is_named(nothing_excepted: None, tmp_path: Path) -> None:
    fill(tmp_path / "roomy", 20)
    assert list(size_budget.over_budget(tmp_path)) == []
    fill(tmp_path / "full", 21)
    assert list(size_budget.over_budget(tmp_path)) == ["full: 21 files side by side, at most 20: make rooms"]


def test_two_classes_of_one_name_are_named(nothing_excepted: None, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text("class Message:\n    class Inner:\n        pass\n")
    found = list(size_budget.over_budget(tmp_path))
    assert found[1] == "one.py and other.py: 2 classes are called Message: name each for what it is"
    assert "Inner" in found[0], "wherever it stands"


def test_exceptions_only_shrink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(size_budget, "CROWDED", {"full": 25})
    monkeypatch.setattr(size_budget, "NAMED_TWICE", frozenset({"Message"}))
    fill(tmp_path / "full", 22)
    (tmp_path / "one.py").write_text("class Message:\n    pass\n")
    less, once = size_budget.over_budget(tmp_path)
    assert less == "full: 22 files side by side: say so in CROWDED, which only shrinks"
    assert once == "one class or none is called Message: take it off NAMED_TWICE, which only shrinks"
    fill(tmp_path / "full" / "within", 26)
    assert any("full/within: 26 files" in each for each in size_budget.over_budget(tmp_path))


def test_no_room_is_called_by_a_name_that_says_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [path for path in size_budget.PACKAGE.rglob("*") if path.stem in vague]
