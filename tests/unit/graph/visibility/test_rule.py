"""Rules and the table of who may see whom."""

import pytest

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility import START_SOURCE, VisibilityRule, VisibilityTable, rules_of

SHARED, PRIVATE, LAST = VisibilityRule(), VisibilityRule("private"), VisibilityRule("shared", "last")


def test_a_source_is_shared_in_full_unless_said_otherwise() -> None:
    assert (SHARED.mode.name, SHARED.history) == ("shared", "all")


@pytest.mark.parametrize("mode", ["public", "", "Shared", None, 1])
def test_an_unknown_mode_is_refused_with_those_there_are(mode) -> None:
    with pytest.raises(VisibilityError, match="'private', 'shared', 'reencoded'"):
        VisibilityRule(mode)


@pytest.mark.parametrize("history", [0, -1, True, False, 1.0, 2.5, "first", "1", None])
def test_an_impossible_history_is_refused(history) -> None:
    with pytest.raises(VisibilityError, match="history must be"):
        VisibilityRule("shared", history)


@pytest.mark.parametrize("history", ["all", "last", 1, 7])
def test_a_possible_history_is_taken(history) -> None:
    assert VisibilityRule("reencoded", history).history == history


def test_an_explicit_declaration_beats_an_edges_default_in_either_order() -> None:
    for order in ((True, False), (False, True)):
        table = VisibilityTable()
        for explicit in order:
            table.declare("a", "b", PRIVATE if explicit else SHARED, explicit=explicit)
        assert table.reads("b")["a"] == PRIVATE


def test_saying_the_same_twice_is_no_conflict() -> None:
    table = VisibilityTable()
    table.declare("a", "b", PRIVATE)
    table.declare("a", "b", VisibilityRule("private"))
    assert table.reads("b")["a"] == PRIVATE


def test_two_explicit_declarations_that_differ_are_refused() -> None:
    table = VisibilityTable()
    table.declare("a", "b", PRIVATE)
    with pytest.raises(VisibilityError, match=r"of 'a' to 'b' is declared twice.*private.*last"):
        table.declare("a", "b", LAST)
    assert table.reads("b")["a"] == PRIVATE


def test_a_pair_has_a_direction() -> None:
    table = VisibilityTable()
    table.declare("a", "b", PRIVATE)
    assert "b" not in table.reads("a") and "a" in table.reads("b")


def test_input_is_shared_first_unless_declared() -> None:
    table = VisibilityTable()
    table.declare("a", "b", LAST)
    assert list(table.reads("b").items()) == [(START_SOURCE, SHARED), ("a", LAST)]
    assert table.reads("nobody") == {START_SOURCE: SHARED}
    table.declare(START_SOURCE, "b", PRIVATE)
    assert table.reads("b")[START_SOURCE] == PRIVATE


def test_sources_keep_the_order_in_which_they_were_first_declared() -> None:
    table = VisibilityTable()
    for source in ("c", "a", "b"):
        table.declare(source, "reader", SHARED, explicit=False)
    table.declare("a", "reader", LAST)
    assert [source for source in table.reads("reader") if source != START_SOURCE] == ["c", "a", "b"]


def test_a_declaration_that_names_no_node_is_refused() -> None:
    table = VisibilityTable()
    table.declare("a", "b", SHARED)
    table.require_nodes(["a", "b"])
    with pytest.raises(VisibilityError, match=r"names 'a', which is not a node\. Nodes: b"):
        table.require_nodes(["b"])
    with pytest.raises(VisibilityError, match="names 'b', which is not a node"):
        table.require_nodes(["a"])


def test_input_is_a_source_and_needs_no_node() -> None:
    table = VisibilityTable()
    table.declare(START_SOURCE, "b", SHARED)
    table.require_nodes(["b"])
    assert table.reads("b") == {START_SOURCE: SHARED}


@pytest.mark.parametrize("source", ["b", START_SOURCE])
def test_input_is_no_reader(source: str) -> None:
    table = VisibilityTable()
    with pytest.raises(VisibilityError):
        table.declare(source, START_SOURCE, SHARED)
        table.require_nodes(["b"])


def test_a_rule_about_ones_own_messages_is_refused() -> None:
    for declare in (VisibilityTable().declare, VisibilityTable().change):
        with pytest.raises(VisibilityError, match="'a' always sees its own"):
            declare("a", "a", PRIVATE)


def test_a_reads_argument_may_mix_modes_and_rules() -> None:
    assert rules_of({"a": "private", "b": LAST}) == {"a": PRIVATE, "b": LAST}
    with pytest.raises(VisibilityError):
        rules_of({"a": "public"})
