"""The tutorial on porting runs as it is written, and is found."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tutorials/port-a-graph.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)


def test_the_page_is_found() -> None:
    for start, linked in (
        ("README.md", "docs/tutorials/port-a-graph.md"),
        ("README.md", "docs/benchmarks/ported-programs.md"),
        ("docs/benchmarks/ported-programs.md", "../tutorials/port-a-graph.md"),
    ):
        assert f"]({linked})" in (ROOT / start).read_text(), start
