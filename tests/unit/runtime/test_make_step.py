"""How rows become one layout, by example."""

from choreo_agents.attention.layout import QuerySpan, Read
from choreo_agents.kv.blocks import Run
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.runtime.step import Row, make_step


def test_a_prefill_reads_itself_causally() -> None:
    own = Segment((Run(16, 16),), native_offset=5)
    step = make_step([Row(0, (7, 8, 9), 0, own, (), samples=True)])
    assert step.tokens == (7, 8, 9)
    assert step.layout.positions == (5, 6, 7)
    assert step.layout.write_slots == (16, 17, 18)
    assert step.layout.reads == (Read(16, 3, 5, (QuerySpan(0, 3, 0),), causal=True),)
    assert step.logits_at == (2,)


def test_a_decode_reads_all_of_itself_as_one_run() -> None:
    own = Segment((Run(16, 16),), native_offset=5, encoded=4)
    step = make_step([Row(0, (7,), 4, own, (), samples=True)])
    assert step.layout.positions == (9,) and step.layout.write_slots == (20,)
    assert step.layout.reads == (Read(16, 5, 5, (QuerySpan(0, 1, 0),)),)


def test_a_chunk_across_two_runs_is_causal_in_each() -> None:
    own = Segment((Run(32, 4), Run(8, 4)), native_offset=0, encoded=2)
    step = make_step([Row(0, (1, 2, 3, 4, 5), 2, own, (), samples=False)])
    assert step.layout.write_slots == (34, 35, 8, 9, 10)
    assert set(step.layout.reads) == {
        Read(32, 2, 0, (QuerySpan(0, 5, 0),)),
        Read(34, 2, 2, (QuerySpan(0, 2, 0),), causal=True),
        Read(34, 2, 2, (QuerySpan(2, 3, 0),)),
        Read(8, 3, 4, (QuerySpan(2, 3, 0),), causal=True),
    }
    assert step.logits_at == ()


def test_rows_that_share_a_message_read_it_once() -> None:
    shared = Segment((Run(0, 8),), native_offset=10, encoded=8)
    one, two = Segment((Run(16, 4),), 18), Segment((Run(20, 4),), 40)
    rows = [
        Row(0, (1,), 0, one, (Piece(shared, 0, 8, 10),), samples=True),
        Row(1, (2, 3), 0, two, (Piece(shared, 0, 8, 32),), samples=True),
    ]
    step = make_step(rows)
    assert step.layout.reads[0] == Read(0, 8, 10, (QuerySpan(0, 1, 0), QuerySpan(1, 2, 22)))
    assert [read for read in step.layout.reads if read.start == 0] == [step.layout.reads[0]]
    assert step.layout.positions == (18, 40, 41)
    assert step.logits_at == (0, 2)


def test_only_the_rows_that_sample_want_logits() -> None:
    segments = [Segment((Run(8 * i, 8),), 0) for i in range(3)]
    rows = [Row(i, (1, 2), 0, segment, (), samples=i != 1) for i, segment in enumerate(segments)]
    assert make_step(rows).logits_at == (1, 5)


def test_no_rows_make_an_empty_step() -> None:
    step = make_step([])
    assert (step.tokens, step.logits_at, step.layout.positions, step.layout.reads) == ((), (), (), ())
