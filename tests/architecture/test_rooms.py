"""How many files stand side by side, and which classes have one name: failing checks that can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("rooms", Path(__file__).with_name("rooms.py"))
assert spec is not None and spec.loader is not None
rooms = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rooms)


def test_the_package_confuses_nobody() -> None:
    assert list(rooms.confusing(rooms.PACKAGE)) == []


@pytest.fixture
def nothing_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "CROWDED", {})
    monkeypatch.setattr(rooms, "NAMED_TWICE", frozenset())


def fill(folder: Path, files: int) -> None:
    folder.mkdir()
    for number in range(files):
        (folder / f"file{number}.py").touch()


def test_a_folder_with_too_many_files_is_named(nothing_excepted: None, tmp_path: Path) -> None:
    fill(tmp_path / "roomy", 20)
    assert list(rooms.confusing(tmp_path)) == []
    fill(tmp_path / "full", 21)
    assert list(rooms.confusing(tmp_path)) == ["full: 21 files side by side, at most 20: make rooms"]


def test_two_classes_of_one_name_are_named(nothing_excepted: None, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text("class Message:\n    class Inner:\n        pass\n")
    found = list(rooms.confusing(tmp_path))
    assert found[1] == "one.py and other.py: 2 classes are called Message: name each for what it is"
    assert "Inner" in found[0], "wherever it stands"


def test_exceptions_only_shrink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rooms, "CROWDED", {"full": 25})
    monkeypatch.setattr(rooms, "NAMED_TWICE", frozenset({"Message"}))
    fill(tmp_path / "full", 22)
    (tmp_path / "one.py").write_text("class Message:\n    pass\n")
    less, once = rooms.confusing(tmp_path)
    assert less == "full: 22 files side by side: say so in CROWDED, which only shrinks"
    assert once == "one class or none is called Message: take it off NAMED_TWICE, which only shrinks"
    fill(tmp_path / "full" / "within", 26)
    assert any("full/within: 26 files" in each for each in rooms.confusing(tmp_path))
