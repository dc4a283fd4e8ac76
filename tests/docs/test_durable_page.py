"""The page on runs that last runs as it is written, and its table of `durability` has a test for each line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from integration.graph.durable.test_durability import CASES

from choreo_agents.graph.durable.finding import open_store

PAGE = (Path(__file__).parents[2] / "docs/how-to/durable-runs.md").read_text()


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recwarn: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "durable-runs.md", "exec"), names)
    resumed, lost = capsys.readouterr().out.splitlines()
    assert int(resumed.split()[-1]) > 0 and "The result is right." in resumed
    assert lost.startswith("Alice [") and "its inputs are not recorded" in lost
    assert [str(each.category.__name__) for each in names["warned"]].count("LineageWarning") >= 1
    lineage = tmp_path / "runs.sqlite.lineage"
    assert lineage.exists() and open_store(lineage).search(("choreo",)) == [], "what was forgotten is gone"


def test_each_line_on_durability_is_tested() -> None:
    told = re.findall(r'^\| `"(\w+)"`', PAGE, re.MULTILINE)
    assert told == [*dict.fromkeys(durability for durability, _ in CASES)] == ["sync", "async", "exit"]
