"""Who reads everyone, and what beats that."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility import (
    EVERYONE,
    START_SOURCE,
    VisibilityMode,
    VisibilityRule,
    VisibilityTable,
    rule_between,
    rules_of,
)

NODES = ("b", "a", "c", "me")


def test_what_is_declared_beats_everyone_and_everyone_an_edge() -> None:
    table = VisibilityTable(default=VisibilityRule("reencoded"))
    table.declare("b", "me", VisibilityRule("private"))
    table.declare("c", "me", VisibilityRule(), explicit=False)
    assert table.reads("me", NODES) == {
        START_SOURCE: VisibilityRule(),
        "a": VisibilityRule("reencoded"),
        "b": VisibilityRule("private"),
        "c": VisibilityRule("reencoded"),
    }
    assert table.undeclared("me", NODES) == ("a", "c")


def test_a_readers_own_word_on_everyone_beats_the_graphs() -> None:
    table = VisibilityTable(default=VisibilityRule("reencoded"))
    table.declare(EVERYONE, "me", VisibilityRule("shared", "last"))
    assert table.reads("me", NODES)["a"] == VisibilityRule("shared", "last")
    assert table.reads("a", NODES)["me"] == VisibilityRule("reencoded")


def test_without_a_default_only_who_is_named_is_read() -> None:
    table = VisibilityTable()
    table.declare("b", "me", VisibilityRule(), explicit=False)
    assert table.reads("me", NODES) == {START_SOURCE: VisibilityRule(), "b": VisibilityRule()}
    assert table.undeclared("me", NODES) is None


def test_what_a_policy_has_changed_stays_without_secrets() -> None:
    table = VisibilityTable(default=VisibilityRule())
    table.change("a", "me", VisibilityRule("reencoded"))
    assert table.reads("me", NODES)["a"] == VisibilityRule("reencoded")
    assert table.undeclared("me", NODES) == ("a", "b", "c")


def test_an_edge_behind_what_a_policy_has_changed_is_still_no_word_of_everyone() -> None:
    table = VisibilityTable(default=VisibilityRule())
    table.change("a", "me", VisibilityRule("private"))
    table.declare("a", "me", VisibilityRule("reencoded"), explicit=False)
    assert table.reads("me", NODES)["a"] == VisibilityRule("reencoded")
    assert table.undeclared("me", NODES) == ("a", "b", "c")


def test_what_somebody_has_changed_for_a_pair_is_said_of_it() -> None:
    table = VisibilityTable(default=VisibilityRule())
    table.change("a", "me", VisibilityRule("reencoded"), explicit=True)
    assert table.reads("me", NODES)["a"] == VisibilityRule("reencoded")
    assert table.undeclared("me", NODES) == ("b", "c"), "a secret of a's is declared, too"
    table.change(EVERYONE, "me", VisibilityRule("private"))
    assert table.reads("me", NODES)["b"] == VisibilityRule("private")


def test_everyone_is_declared_once() -> None:
    table = VisibilityTable()
    table.declare(EVERYONE, "me", VisibilityRule("private"))
    table.declare(EVERYONE, "me", VisibilityRule("private"))
    with pytest.raises(VisibilityError, match=r"of '\*' to .* is declared twice"):
        table.declare(EVERYONE, "me", VisibilityRule())
    assert table.reads("me", NODES)["a"] == VisibilityRule("private")


@pytest.mark.parametrize(("source", "reader"), [(EVERYONE, "mee"), ("a", EVERYONE)])
def test_who_reads_everyone_is_a_node(source: str, reader: str) -> None:
    table = VisibilityTable()
    table.declare("a", "me", VisibilityRule())
    table.declare(EVERYONE, "b", VisibilityRule())
    table.require_nodes(NODES)
    table.declare(source, reader, VisibilityRule())
    with pytest.raises(VisibilityError, match="which is not a node"):
        table.require_nodes(NODES)


def test_what_is_encoded_for_everyone_is_encoded_in_contexts_that_there_are() -> None:
    scoped = VisibilityRule("reencoded", scope=("a.system",))
    table = VisibilityTable()
    table.declare(EVERYONE, "me", scoped)
    for declared in (table, VisibilityTable(default=scoped)):
        declared.require_contexts(["a.system"])
        with pytest.raises(
            VisibilityError, match=r"'a\.system', which is not a private context: there are 'b\.system'"
        ):
            declared.require_contexts(["b.system"])


def test_a_copy_is_its_own() -> None:
    table = VisibilityTable(default=VisibilityRule())
    copied = table.copy()
    copied.declare(EVERYONE, "me", VisibilityRule("reencoded"))
    copied.change("a", "b", VisibilityRule("reencoded"))
    assert table.reads("me", NODES)["a"] == table.reads("b", NODES)["a"] == VisibilityRule()
    assert copied.reads("me", NODES)["a"] == copied.reads("b", NODES)["a"] == VisibilityRule("reencoded")


def test_the_table_of_declarations_says_what_holds_of_each_pair() -> None:
    table = VisibilityTable(default=VisibilityRule("reencoded"))
    table.declare("a", "me", VisibilityRule(), explicit=False)
    table.declare("b", "me", VisibilityRule("private"))
    declared = table.declared(NODES)
    for reader in NODES:
        for source, rule in table.reads(reader, NODES).items():
            if source != START_SOURCE:
                assert rule_between(declared, source, reader) == rule
    assert rule_between(declared, START_SOURCE, "me") is None


def test_an_asterisk_is_short_for_everyone_shared() -> None:
    assert rules_of("*") == {EVERYONE: VisibilityRule()} == rules_of({"*": "shared"})


@pytest.mark.parametrize("reads", ["pro", ["pro"], 3])
def test_what_does_not_say_how_is_refused(reads: object) -> None:
    with pytest.raises(VisibilityError, match="reads must be"):
        rules_of(reads)  # type: ignore[arg-type]


QUOTED, CITED = VisibilityMode("quoted", "words"), VisibilityMode("cited", "words")
HISTORIES: Any = st.sampled_from(["all", 1, 2])
SCOPES: Any = st.sampled_from(["reader", "public", ("a.system",), ("a.system", "b.system"), ("b.system", "a.system")])
RULES = st.builds(VisibilityRule, st.sampled_from(["shared", "private"]), HISTORIES) | st.builds(
    VisibilityRule, st.sampled_from(["reencoded", QUOTED, CITED]), HISTORIES, SCOPES
)
PAIRS = st.dictionaries(
    st.tuples(st.sampled_from("abxyz"), st.sampled_from("rxyz")).filter(lambda pair: pair[0] != pair[1]), RULES
)


@given(PAIRS)
def test_what_silent_nodes_pass_on_is_the_narrowest_of_all_ways(rules: dict[tuple[str, str], VisibilityRule]) -> None:
    table = VisibilityTable()
    table.describe(silent="xyz", confidential="b")
    for (source, reader), rule in rules.items():
        table.declare(source, reader, rule, explicit=False)
    seen = table.reads("r")
    ways = [edges for edges in _ways(rules, "a", "r") if len(edges) > 1]
    on_the_way = [rules[edge] for edges in ways for edge in edges]
    if ("a", "r") in rules:
        assert seen["a"] == rules["a", "r"]
    elif not on_the_way:
        assert "a" not in seen
    else:
        modes = {rule.mode.name for rule in on_the_way}
        limits = [rule.history for rule in on_the_way if rule.history != "all"]
        assert seen["a"].mode.shows == ("private" not in modes) and not seen["a"].mode.keeps_out
        if seen["a"].mode.shows:
            assert seen["a"].mode.encodes_again == any(rule.mode.encodes_again for rule in on_the_way)
            assert seen["a"].history == min(limits, default="all")
            scopes = [{*rule.contexts} for rule in on_the_way if rule.scope != "reader"]
            assert seen["a"].scope == "reader" if not scopes else {*seen["a"].contexts} == set.intersection(*scopes)
    assert "b" not in seen or ("b", "r") in rules


SECRETS = "public", ("b.system",)


@pytest.mark.parametrize(("one", "other"), [SECRETS, SECRETS[::-1], [("a.system",), ("b.system",)]])
def test_what_two_scopes_in_a_loop_narrow_is_encoded_in_what_is_in_both(one: Any, other: Any) -> None:
    """s1 and s2 stand in one, s3 beside it hands back: whichever scope came last once held, and was narrowed again."""
    table = VisibilityTable()
    table.describe(silent=["s1", "s2", "s3"])
    for source, reader in (("b", "s2"), ("s1", "s2"), ("s2", "s1"), ("s3", "s2"), ("s2", "r")):
        table.declare(source, reader, VisibilityRule(), explicit=False)
    table.declare("s1", "s3", VisibilityRule("reencoded", scope=one))
    table.declare("s2", "s3", VisibilityRule("reencoded", scope=other))
    assert table.reads("r")["b"] == VisibilityRule("reencoded", scope="public")


def test_of_two_modes_that_do_the_same_one_holds_in_either_order() -> None:
    found = {VisibilityRule(one).narrowed(VisibilityRule(other)) for one, other in ((QUOTED, CITED), (CITED, QUOTED))}
    assert len(found) == 1


def _ways(rules: Collection[tuple[str, str]], source: str, reader: str) -> Iterator[list[tuple[str, str]]]:
    """Yield all walks from one to the other through silent nodes, by their edges, that take none of these twice."""
    open_ways = [[edge] for edge in rules if edge[0] == source]
    for way in open_ways:
        if way[-1][1] == reader:
            yield way
        elif way[-1][1] in "xyz":
            open_ways += [[*way, edge] for edge in rules if edge[0] == way[-1][1] and edge not in way]


def test_what_two_ways_re_word_must_be_declared() -> None:
    loud, brief = (
        VisibilityMode(name, "words", transform=word) for name, word in (("loud", str.upper), ("low", str.lower))
    )
    table = VisibilityTable()
    table.describe(silent="x")
    table.declare("a", "x", VisibilityRule(loud))
    table.declare("x", "r", VisibilityRule())
    assert table.reads("r")["a"] == VisibilityRule(loud)
    table.declare("x", "s", VisibilityRule(brief))
    with pytest.raises(VisibilityError, match=r"how 's' sees 'a' through 'x' is ambiguous.*Declare this pair"):
        table.reads("s")
    table.declare("a", "s", VisibilityRule(brief))
    assert table.reads("s")["a"] == VisibilityRule(brief)


@pytest.mark.parametrize("mode", ["shared", "private"])
def test_what_is_said_of_input_holds_whether_an_edge_comes_before_or_behind(mode: Any) -> None:
    for turn in (1, -1):
        table = VisibilityTable()
        table.describe(personas={"me": "me"})
        edge: dict[str, Any] = {"rule": VisibilityRule(), "explicit": False, "has_mode": False}
        for said in [edge, {"rule": VisibilityRule(mode)}][::turn]:
            table.declare(START_SOURCE, "me", **said)
        assert table.reads("me", NODES)[START_SOURCE] == VisibilityRule(mode)


def test_a_mode_that_is_said_beside_a_history_holds_of_input() -> None:
    table = VisibilityTable()
    table.describe(personas={"me": "me"})
    table.declare(START_SOURCE, "me", VisibilityRule("shared", "last"), has_mode=False)
    assert table.reads("me", NODES)[START_SOURCE] == VisibilityRule("reencoded", "last")
    table.declare(START_SOURCE, "me", VisibilityRule("shared", "last"))
    assert table.reads("me", NODES)[START_SOURCE] == VisibilityRule("shared", "last")
