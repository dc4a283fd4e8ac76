"""What any reader sees of any history of messages."""

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.graph.state import HandleEntry, merge_entries
from choreo_agents.graph.view.view import visible
from choreo_agents.graph.visibility import EVERYONE, START_SOURCE, VisibilityRule, VisibilityTable

AUTHORS = ("a", "b", "c", "me", START_SOURCE)
rules_by_source = st.dictionaries(
    st.sampled_from(AUTHORS),
    st.builds(
        VisibilityRule,
        st.sampled_from(["private", "shared", "reencoded"]),
        st.sampled_from(["all", "last"]) | st.integers(1, 3),
    ),
)


@st.composite
def histories(draw: st.DrawFn, ids: st.SearchStrategy[str] | None = None) -> list[HandleEntry]:
    what = st.tuples(st.sampled_from(AUTHORS), st.integers(0, 4), st.integers(0, 2), st.booleans())
    said = draw(st.lists(what, max_size=12))
    names = [str(i) for i in range(len(said))] if ids is None else [draw(ids) for _ in said]
    return [
        HandleEntry(
            handle={},
            author=author,
            superstep=superstep,
            branch=branch,
            confidential=secret,
            message_id=name,
            digest="",
        )
        for (author, superstep, branch, secret), name in zip(said, names, strict=True)
    ]


repeating = histories(st.sampled_from("123"))


@given(histories(), rules_by_source, st.randoms(use_true_random=False))
def test_a_view_does_not_depend_on_the_order_of_entries(entries, rules: dict[str, VisibilityRule], random) -> None:
    shuffled = random.sample(entries, len(entries))
    assert visible(shuffled, "me", rules) == visible(entries, "me", rules)


@given(histories(), rules_by_source)
def test_exactly_what_the_rules_allow_is_seen_once(entries, rules: dict[str, VisibilityRule]) -> None:
    wanted = {}
    for entry in entries:
        source = entry["author"]
        rule = VisibilityRule() if source == "me" else rules.get(source, VisibilityRule("private"))
        later = {e["superstep"] for e in entries if e["author"] == source and e["superstep"] > entry["superstep"]}
        kept = {"all": len(entries), "last": 1}.get(rule.history, rule.history)
        if rule.mode.shows and len(later) < kept:
            wanted[entry["message_id"]] = rule.mode
    found = visible(entries, "me", rules)
    assert {entry["message_id"]: rule.mode for entry, rule in found} == wanted
    assert len(found) == len(wanted)


@given(histories(), rules_by_source)
def test_a_view_is_sorted_by_superstep_then_input_own_and_declared_sources(
    entries, rules: dict[str, VisibilityRule]
) -> None:
    order = [START_SOURCE, "me", *(source for source in rules if source not in (START_SOURCE, "me"))]
    found = [entry for entry, _ in visible(entries, "me", rules)]
    keys = [(entry["superstep"], order.index(entry["author"]), entry["branch"]) for entry in found]
    assert keys == sorted(keys)


@given(repeating, repeating)
def test_merging_again_changes_nothing(left: list[HandleEntry], right: list[HandleEntry]) -> None:
    merged = merge_entries(left, right)
    assert merge_entries(merged, right) == merge_entries(merged, merged) == merged
    assert len({entry["message_id"] for entry in merged}) == len(merged)


@given(repeating, repeating, repeating)
def test_it_does_not_matter_what_is_merged_first(one, two, three) -> None:
    assert merge_entries(merge_entries(one, two), three) == merge_entries(one, merge_entries(two, three))


@given(repeating, repeating)
def test_the_later_entry_of_a_message_stands(left: list[HandleEntry], right: list[HandleEntry]) -> None:
    last = {entry["message_id"]: entry for entry in (*left, *right)}
    assert {entry["message_id"]: entry for entry in merge_entries(left, right)} == last


@given(histories(), rules_by_source, st.builds(VisibilityRule, st.sampled_from(["shared", "reencoded"])))
def test_who_reads_everyone_reads_each_as_declared_and_the_others_without_their_secrets(
    entries, rules: dict[str, VisibilityRule], usual: VisibilityRule
) -> None:
    table = VisibilityTable(default=usual)
    for source in sorted(rules.keys() - {"me"}):
        table.declare(source, "me", rules[source])
    reads, undeclared = table.reads("me", "abc"), table.undeclared("me", "abc")
    found = visible(entries, "me", reads, undeclared=undeclared)
    open_to_all = [
        e for e in entries if e["author"] in {*table.rules.get("me", ()), START_SOURCE, "me"} or not e["confidential"]
    ]
    spelled = {"a": usual, "b": usual, "c": usual, START_SOURCE: VisibilityRule(), **table.rules.get("me", {})}
    expected = visible(open_to_all, "me", spelled)
    assert {e["message_id"]: rule for e, rule in found} == {e["message_id"]: rule for e, rule in expected}
    keys = [(e["superstep"], e["author"] != START_SOURCE, e["author"], e["branch"]) for e, _ in found]
    assert keys == sorted(keys)
    # In a stock graph nobody knows the nodes: whoever is not named is meant.
    stock = {START_SOURCE: VisibilityRule(), **table.rules.get("me", {}), EVERYONE: usual}
    assert visible(entries, "me", stock, undeclared={EVERYONE}) == found
