"""Each page of docs/benchmarks says by which commit and versions its figures were measured, and these are today's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/benchmarks/*.md"))
COUNTED = {"ported-programs.md"}
"""Pages that a test computes again."""
ELSEWHERE = {"gpu.md"}
"""Pages of machines that bring versions of their own."""


def versions_of(page: Path) -> list[tuple[str, str]]:
    """Read the names and versions of what a page says that it was measured with."""
    made_by = [line for line in page.read_text().splitlines() if re.search(r"\bcommit [0-9a-f]{12}\b(?!\*)", line)]
    return [pair for line in made_by for pair in re.findall(r"\b([a-z]+) (\d+(?:\.\d+)+)", line)]


@pytest.mark.parametrize("page", [each for each in PAGES if each.name not in COUNTED], ids=lambda page: page.name)
def test_a_page_of_figures_says_what_has_made_them(page: Path) -> None:
    said = versions_of(page)
    assert {"torch", "transformers"} <= {name for name, _ in said}
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    others = [(name, version) for name, version in said if name in pinned and version != pinned[name]]
    assert not others or page.name in ELSEWHERE, f"measure it again: {others}, not {pinned}"
