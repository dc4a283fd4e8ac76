"""The layout of random steps against a brute-force account of what each token sees."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.attention.layout import Layout
from choreo_agents.kv.blocks import Run
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.step import Row, make_step

BLOCK = 3


@st.composite
def segment_sets(draw: st.DrawFn) -> list[Segment]:
    """Up to six segments of one to three runs each, scattered over one pool."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    blocks = iter(draw(st.permutations(range(sum(counts)))))
    return [
        Segment(tuple(Run(BLOCK * next(blocks), BLOCK) for _ in range(count)), draw(st.integers(0, 40)))
        for count in counts
    ]


@st.composite
def row_sets(draw: st.DrawFn) -> list[Row]:
    """Some segments are being filled by a row each, the others are read."""
    segments = draw(segment_sets())
    filling = draw(st.integers(1, len(segments)))
    rows = []
    for number, own in enumerate(segments[:filling]):
        first = draw(st.integers(0, own.capacity - 1))
        count = draw(st.integers(1, own.capacity - first))
        view = []
        for other in draw(st.lists(st.sampled_from(segments[filling:]), max_size=4)) if segments[filling:] else []:
            skipped = draw(st.integers(0, other.capacity - 1))
            shown, offset = draw(st.integers(1, other.capacity - skipped)), draw(st.integers(0, 40))
            view.append(Piece(other, skipped, shown, offset))
        tokens = tuple(100 * number + first + i for i in range(count))
        rows.append(Row(number, tokens, first, own, tuple(view), draw(st.booleans())))
    return rows


def slots_of(segment: Segment) -> list[int]:
    return [slot for run in segment.runs for slot in range(run.start, run.end)]


def seen(layout: Layout, token: int) -> Counter[tuple[int, int]]:
    """How often a token meets each (slot, shift)."""
    met: Counter[tuple[int, int]] = Counter()
    for read in layout.reads:
        for span in read.spans:
            if span.first <= token < span.first + span.count:
                length = token - span.first + 1 if read.causal else read.length
                met.update((read.start + i, span.shift) for i in range(length))
    return met


@given(row_sets())
def test_every_token_sees_its_view_and_its_own_message_up_to_itself(rows: list[Row]) -> None:
    layout = make_step(rows).layout
    token = 0
    for row in rows:
        own = slots_of(row.segment)
        for i in range(len(row.tokens)):
            view = Counter(
                (slot, piece.offset - piece.segment.native_offset)
                for piece in row.view
                for slot in slots_of(piece.segment)[piece.first : piece.first + piece.count]
            )
            earlier = Counter((slot, 0) for slot in own[: row.first + i + 1])
            assert seen(layout, token) == view + earlier
            assert layout.write_slots[token] == own[row.first + i]
            assert layout.positions[token] == row.segment.native_offset + row.first + i
            token += 1
    assert token == len(layout.positions) == len(layout.write_slots)


@given(row_sets())
def test_tokens_and_wanted_logits_follow_the_rows(rows: list[Row]) -> None:
    step = make_step(rows)
    assert step.rows == tuple(rows)
    assert step.tokens == tuple(token for row in rows for token in row.tokens)
    assert [step.tokens[i] for i in step.logits_at] == [row.tokens[-1] for row in rows if row.samples]


@given(row_sets())
def test_a_run_is_read_once_for_all_its_readers(rows: list[Row]) -> None:
    layout = make_step(rows).layout
    runs = [(read.start, read.length) for read in layout.reads if not read.causal]
    assert len(set(runs)) == len(runs)
    for read in layout.reads:
        assert read.queries == sum(span.count for span in read.spans) > 0
