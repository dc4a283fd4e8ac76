"""Pieces of text that add up to what is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.chat.output_stream import ShownText

LETTERS = st.text("ab \n<e>", max_size=4)


def pieces_of(texts: list[str], whole: str, ending: str) -> list[str]:
    shown = ShownText(ending)
    return [*map(shown.add, texts), shown.rest(whole)]


@given(st.lists(LETTERS, max_size=12), st.sampled_from(["", "\n", "<e>", " <e>\n", "aab"]), st.booleans())
def test_they_add_up_with_the_ending_and_without(texts: list[str], ending: str, ends: bool) -> None:
    said = "".join(texts)
    come = [*texts, *ending] if ends else texts
    # What only looks like the ending was said: only the model's tokens tell, and so it must be held back until then.
    for whole in {said.strip(), said.removesuffix(ending).strip() if not ends else said.strip()}:
        assert "".join(pieces_of(come, whole, ending)) == whole


def test_nothing_is_held_back_for_longer_than_it_must() -> None:
    assert pieces_of(["Well", ",", " it", " ", "is <", "b", ">"], "Well, it is <b>", "<e>") == [
        "Well",
        ",",
        " it",
        "",
        " is",
        " <b",
        ">",
        "",
    ]


def test_what_was_shown_is_not_taken_back() -> None:
    shown = ShownText()
    assert not shown and shown.add("Well") == "Well" and shown
    assert shown.rest("Other words") == ""
