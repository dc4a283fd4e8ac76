"""Each promise of the page on security names tests, and these are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "security.md"
CITED = re.compile(r"`((?:integrations|tests)/[^`\s]+?\.py)::(\w+)`")


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions of a file that pytest runs."""
    found = ast.parse(path.read_text()).body if path.is_file() else []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(each.name for each in found if isinstance(each, kinds) and each.name.startswith("test_"))


def promises(page: str) -> list[list[str]]:
    """The cells of all rows of tables that end with a column of tests."""
    rows: list[list[str]] = []
    of_tests = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            of_tests = False
        elif cells[-1].strip() == "tests":
            of_tests = True
        elif of_tests and not set(line) <= set("|- "):
            rows.append(cells)
    return rows


def missing(page: str) -> list[str]:
    """What a page cites and is not there, and promises that cite nothing."""
    gone = [f"{path}::{name}" for path, name in CITED.findall(page) if name not in names_in(ROOT / path)]
    return gone + [row[-2] for row in promises(page) if not CITED.search(row[-1])]


def test_each_promise_has_tests_that_are_there() -> None:
    page = PAGE.read_text()
    assert missing(page) == []
    assert len(promises(page)) > 40 and page.count("::") == len(CITED.findall(page)), "all of them are understood"


def test_a_test_that_is_gone_is_named() -> None:
    here = "tests/docs/test_security_page.py"
    page = f"""
| promise | tests |
|---|---|
| One | `{here}::test_a_test_that_is_gone_is_named`<br>`{here}::test_gone` |
| Two | `{here}::missing` |
| Three | trust us |

| attacker | what he has |
|---|---|
| a client | input, and `tests/no_file.py::test_it` |
"""
    assert missing(page) == [f"{here}::test_gone", f"{here}::missing", "tests/no_file.py::test_it", "Three"]


def test_the_page_and_how_to_report_are_found() -> None:
    for start, linked in (
        ("README.md", "docs/explanation/security.md"),
        ("README.md", "SECURITY.md"),
        ("SECURITY.md", "docs/explanation/security.md"),
        ("CONTRIBUTING.md", "SECURITY.md"),
        ("docs/explanation/security.md", "../../SECURITY.md"),
        ("docs/explanation/visibility.md", "security.md"),
        ("docs/how-to/serve-many-callers.md", "../explanation/security.md"),
    ):
        text = (ROOT / start).read_text()
        assert f"]({linked})" in text and ((ROOT / start).parent / linked).is_file(), start
