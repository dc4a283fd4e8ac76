"""Where branches stand, at random; and merging in whichever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.synthesis.placing import STRATEGIES, anchored

lengths = st.lists(st.integers(1, 40), max_size=6)


@given(lengths, lengths, st.sampled_from(STRATEGIES), st.data())
def test_branches_stand_after_what_they_have_seen_and_before_what_follows(
    trunk: list[int], branches: list[int], strategy: str, data: st.DataObject
) -> None:
    depths = data.draw(st.none() | st.tuples(*(st.integers(1, max(1, len(trunk))) for _ in branches)))
    placed = anchored(strategy, trunk, branches, depths and [min(depth, len(trunk)) for depth in depths])  # type: ignore[arg-type]
    ends = [start + length for start, length in zip(placed.trunk, trunk, strict=True)]
    assert placed.trunk == tuple([0, *ends][: len(trunk)]), "a trunk without gaps"
    after = [start + length for start, length in zip(placed.branches, branches, strict=True)]
    assert placed.end == max([0, *ends, *after]), "what follows collides with nothing"
    whole = sum(trunk)
    if strategy != "parallel":
        assert list(placed.branches) == [whole, *after][: len(branches)], "one after the other"
    else:
        seen = [len(trunk)] * len(branches) if depths is None else [min(depth, len(trunk)) for depth in depths]
        assert list(placed.branches) == [sum(trunk[:depth]) for depth in seen]
        assert placed.end <= whole + max([0, *branches])


@given(lengths, st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_in_parallel_no_branch_depends_on_the_others(
    trunk: list[int], branches: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(branches))))
    depths = [data.draw(st.integers(0, len(trunk))) for _ in branches]
    placed = anchored("parallel", trunk, branches, depths)
    other = anchored("parallel", trunk, [branches[i] for i in order], [depths[i] for i in order])
    assert other.branches == tuple(placed.branches[i] for i in order)
    assert (other.trunk, other.end) == (placed.trunk, placed.end)
    alone = [anchored("parallel", trunk, [n], [d]).branches[0] for n, d in zip(branches, depths, strict=True)]
    assert tuple(alone) == placed.branches
