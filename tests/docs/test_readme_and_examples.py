"""What the README and the examples show runs, and says what it should."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_readme_shows_the_first_example() -> None:
    assert BLOCKS[0] == EXAMPLES[0].read_text()
    assert EXAMPLES[0].read_text().count("\n") <= 25


def test_the_captain_learns_from_the_scout(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES[0]), run_name="__main__")
    out = capsys.readouterr().out
    assert "scout: Bob has 5 blue boats." in out
    assert "captain: Bob has 5 blue boats." in out


def test_the_readmes_engine_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in BLOCKS[1:]:
        exec(compile(block, "README.md", "exec"), {})
    assert "Ann has 3 red kites." in capsys.readouterr().out


def test_the_page_on_serving_many_callers_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "serve-many-callers.md").read_text()
    folder = "/var/tmp/choreo-kv"
    assert folder in page
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace(folder, str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(code, "serve-many-callers.md", "exec"), names)
    names["engine"].check()
    names["engine"].close()
    assert len(names["four"]) == 4 and capsys.readouterr().out


def test_the_page_on_who_sees_what_runs() -> None:
    page = (ROOT / "docs" / "explanation" / "visibility.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "visibility.md", "exec"), names)
    assert names["policy"].confidential == {"alice.plan": {"alice"}}
    entries = [{"message_id": each, "handle": {"id": each}, "author": each, "superstep": 1} for each in "abc"]
    [sent] = names["route"]({"handles": entries})
    selected = [(each["message_id"], each["select"]) for each in sent.arg["handles"]]
    assert selected == [("b", "shared"), ("c", "reencoded")]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
