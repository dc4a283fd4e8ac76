"""What cannot hold for engines elsewhere is listed, each test once, and the list only shrinks."""

from __future__ import annotations

import re

import pytest
from remote_support.unsupported import TESTS, listed


@pytest.mark.parametrize(("engine", "files", "tests_of_others"), [("ray", 9, 128), ("loopback", 9, 101)])
def test_the_list_names_what_there_is_and_grows_no_longer(engine: str, files: int, tests_of_others: int) -> None:
    names = listed(engine)
    for name in names:
        file, _, test = name.partition("[")[0].partition("::")
        text = (TESTS / file).read_text()
        assert not test or re.search(rf"^ *(async )?def {test}\b", text, re.MULTILINE), f"there is no {name}"
    whole = [name for name in names if "::" not in name]
    # Whoever makes it shorter writes down how long it is now: there it stays, or shrinks.
    assert (len(whole), len(names) - len(whole)) == (files, tests_of_others)
