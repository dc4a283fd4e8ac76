"""Lists of tests: every entry names tests that are there, and the list of those that depend on time only shrinks."""

from __future__ import annotations

import ast

import pytest
from gate.plugin import ROOT, names_of, read_list, reason_in

MOST_TIMING = 106
"""Entries of `tests/timing.toml`: a change may lower this number."""


def exists(entry: str) -> bool:
    """Tell whether there is such a file or folder, or such a test function in the file."""
    path, _, test = entry.partition("::")
    if not test:
        return (ROOT / path).exists()
    names = {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.AST) and hasattr(node, "name")
    }
    return test.partition("[")[0].rpartition("::")[2] in names


@pytest.mark.parametrize("name", ["timing", "nightly", "skips"])
def test_every_entry_names_something_and_says_why(name: str) -> None:
    entries = read_list(name)
    assert [entry for entry in entries if not exists(entry)] == []
    assert [entry for entry, reason in entries.items() if len(reason) < 10] == []


def test_no_test_is_in_two_lanes() -> None:
    nightly = read_list("nightly")
    assert [entry for entry in read_list("timing") if reason_in(nightly, entry)] == []


def test_the_list_of_tests_that_depend_on_time_does_not_grow() -> None:
    assert len(read_list("timing")) <= MOST_TIMING


def test_a_list_names_tests_by_id_by_function_by_file_and_by_folder() -> None:
    names = ["tests/a/test_b.py::test_c[d]", "tests/a/test_b.py::test_c", "tests/a/test_b.py", "tests/a", "tests", "."]
    assert list(names_of(names[0])) == names
    assert reason_in({"tests/a": "slow"}, names[0]) == "slow" and reason_in({"tests/a/test": "slow"}, names[0]) is None
