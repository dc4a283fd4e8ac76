"""Lists of tests: every entry names tests that are there, and the list of those that depend on time only shrinks."""

from __future__ import annotations

import ast

import pytest
from gate.plugin import ROOT, names_of, read_list, reason_in

MOST_TIMING = 78
"""Entries of `tests/timing.toml`: a change lowers this number, and does not raise it."""


def exists(entry: str) -> bool:
    """Tell whether there is such a file or folder, and in it the function, or the class whose method it may inherit."""
    path, _, test = entry.partition("::")
    if not test:
        return (ROOT / path).exists()
    defining = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, defining)}
    return test.partition("::")[0].partition("[")[0] in names


@pytest.mark.parametrize("name", ["timing", "nightly", "skips"])
def test_every_entry_names_something_and_says_why(name: str) -> None:
    entries = read_list(name)
    assert [entry for entry in entries if not exists(entry)] == []
    assert [entry for entry, reason in entries.items() if len(reason) < 10] == []


def test_no_test_is_in_two_lanes() -> None:
    nightly = read_list("nightly")
    assert [entry for entry in read_list("timing") if reason_in(nightly, entry)] == []


def test_the_list_of_tests_that_depend_on_time_does_not_grow() -> None:
    assert len(read_list("timing")) == MOST_TIMING, "lower the number with the list"


def test_a_list_names_tests_by_id_by_function_by_file_and_by_folder() -> None:
    names = ["tests/a/test_b.py::test_c[d]", "tests/a/test_b.py::test_c", "tests/a/test_b.py", "tests/a", "tests", "."]
    assert list(names_of(names[0])) == names
    assert reason_in({"tests/a": "slow"}, names[0]) == "slow" and reason_in({"tests/a/test": "slow"}, names[0]) is None
