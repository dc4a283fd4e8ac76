"""What cannot hold for engines elsewhere is listed, each test once, and the list only shrinks."""

from __future__ import annotations

import re

from support.listed import TESTS, listed

MOST_FILES, MOST_TESTS = 9, 99
"""That were on the list when it was begun."""


def test_the_list_names_what_there_is_and_grows_no_longer() -> None:
    names = listed()
    for name in names:
        file, _, test = name.partition("::")
        text = (TESTS / file).read_text()
        assert not test or re.search(rf"^(async )?def {test}\b", text, re.MULTILINE), f"there is no {name}"
    files = [name for name in names if "::" not in name]
    assert len(files) <= MOST_FILES and len(names) - len(files) <= MOST_TESTS
