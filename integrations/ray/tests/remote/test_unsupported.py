"""What cannot hold for engines elsewhere is listed, each test once, and the list only shrinks."""

from __future__ import annotations

import re

from remote_support.unsupported import TESTS, listed

FILES, TESTS_OF_OTHERS = 9, 164
"""That are on the list."""


def test_the_list_names_what_there_is_and_grows_no_longer() -> None:
    names = listed()
    for name in names:
        file, _, test = name.partition("::")
        text = (TESTS / file).read_text()
        assert not test or re.search(rf"^ *(async )?def {test}\b", text, re.MULTILINE), f"there is no {name}"
    files = [name for name in names if "::" not in name]
    # Whoever makes it shorter writes down how long it is now: there it stays, or shrinks.
    assert (len(files), len(names) - len(files)) == (FILES, TESTS_OF_OTHERS)
