"""What a visibility mode says of itself, and which cannot be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility import PRIVATE, REENCODED, SHARED, VisibilityMode, VisibilityRule, mode_of

BRIEF = VisibilityMode("brief", "words", transform=lambda words: words[:3])
PLAIN = VisibilityMode("plain", "encoding")
UNSEEN = VisibilityMode("unseen", "nothing")


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (SHARED, (True, True, False, False)),
        (REENCODED, (True, False, True, False)),
        (PRIVATE, (False, False, False, True)),
        (BRIEF, (True, False, True, False)),
        (PLAIN, (True, True, False, False)),
        (UNSEEN, (False, False, False, False)),
    ],
    ids=repr,
)
def test_a_mode_says_what_its_reader_has(mode: VisibilityMode, says: tuple[bool, ...]) -> None:
    assert (mode.shows, mode.shares_kv, mode.encodes_again, mode.keeps_out) == says


@pytest.mark.parametrize("mode", [SHARED, REENCODED, PRIVATE, BRIEF, PLAIN, UNSEEN], ids=repr)
def test_a_mode_opens_no_channel_that_its_source_has_not(mode: VisibilityMode) -> None:
    """What is there as words only comes no nearer; what is seen comes by some channel."""
    for presence in ("text", "encoding", "words"):
        opened = mode.opens(presence)  # type: ignore[arg-type]
        assert bool(opened) == mode.shows
        if presence == "words":
            assert "encoding" not in opened
        if mode.encodes_again and presence == "encoding":
            assert opened == ("words",)
        if mode.shares_kv and presence != "words":
            assert opened == ("encoding",)


def test_what_is_encoded_again_of_a_text_is_kv_of_it_in_whatever_words() -> None:
    assert REENCODED.opens("text") == BRIEF.opens("text") == ("encoding", "words")


def test_a_send_narrows_and_never_widens() -> None:
    narrowed = {(mode.name, to.name): mode.narrowed(to) for mode, to in product((SHARED, PLAIN, BRIEF), repeat=2)}
    assert narrowed["shared", "shared"] == SHARED and narrowed["plain", "shared"] == PLAIN
    assert narrowed["shared", "brief"] == narrowed["plain", "brief"] == BRIEF
    assert narrowed["brief", "shared"] is None and narrowed["brief", "plain"] is None
    assert BRIEF.narrowed(REENCODED) == BRIEF
    assert all(mode.narrowed(PRIVATE) is None for mode in (SHARED, BRIEF, PRIVATE))
    assert all(PRIVATE.narrowed(to) is None for to in (SHARED, REENCODED, BRIEF))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "must consist of letters"),
        ({"name": 3}, "must consist of letters"),
        ({"name": "a|b"}, "must consist of letters"),
        ({"name": 'a"b'}, "must consist of letters"),
        ({"name": "a --> b"}, "must consist of letters"),
        ({"name": "last, 2"}, "must consist of letters"),
        ({"name": "line\nbreak"}, "must consist of letters"),
        ({"name": "own"}, "another name"),
        ({"name": "state"}, "another name"),
        ({"attends_to": "everything"}, "'encoding', 'words' or 'nothing', not 'everything'"),
        ({"attends_to": "encoding"}, "has a transform: it must attend to 'words'"),
        ({"attends_to": "nothing"}, "has a transform: it must attend to 'words'"),
        ({"keeps_out": True}, "cannot show a source and keep it out"),
    ],
    ids=str,
)
def test_a_mode_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(VisibilityError, match=says):
        replace(BRIEF, **options)


def test_the_names_that_there_are_mean_one_thing() -> None:
    assert mode_of("shared") is SHARED and mode_of(SHARED) is SHARED
    with pytest.raises(VisibilityError, match="another visibility mode 'shared': choose another name"):
        VisibilityRule(VisibilityMode("shared", "words"))


def test_what_no_text_is_made_of_is_refused() -> None:
    nothing: Any = replace(BRIEF, transform=lambda words: None)
    with pytest.raises(VisibilityError, match="'brief' must return text, not NoneType"):
        nothing.apply("Ann has 3 red kites.")


def test_a_rule_of_a_mode_of_ones_own_reads_like_any_other() -> None:
    assert VisibilityRule(BRIEF, "last", "public").words() == "brief in public, last"
    assert VisibilityRule(PLAIN, 2).words() == "plain, last 2" and VisibilityRule(UNSEEN, 2).words() == "unseen"
    assert str(VisibilityRule(BRIEF)) == "VisibilityRule(mode='brief', history='all', scope='reader')"
    assert VisibilityRule(BRIEF) == VisibilityRule(BRIEF) != VisibilityRule(replace(BRIEF, transform=str.upper))
    assert replace(VisibilityRule(BRIEF, "last"), mode=REENCODED) == VisibilityRule("reencoded", "last")
    with pytest.raises(VisibilityError, match="applies to text that is encoded again, but 'plain' encodes none"):
        VisibilityRule(PLAIN, scope="public")


@pytest.mark.parametrize(
    "rule", [VisibilityRule(), VisibilityRule(PLAIN, "last"), VisibilityRule(BRIEF, 3, ("ann.system",))], ids=str
)
def test_a_channel_is_closed_by_what_opens_none_of_it(rule: VisibilityRule) -> None:
    assert rule.without("encoding") == VisibilityRule("reencoded", rule.history)
    assert rule.without("words") == VisibilityRule("private")
