"""What simulated engines do: reckoned by hand, compared with theory, and conserved on random traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traced import COSTS, Spoken, Waited, costs_of, lone_calls, random_traces, trace_of, with_limits

from choreo_agents.engine.elsewhere import CallToPlace, Costs, EngineAhead, Route, route
from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.simulating.rules import RULES
from choreo_agents.lab.simulating.simulation import Setting, simulate
from choreo_agents.lab.simulating.trace import RecordedTrace, TracedCall

SETTING = Setting(COSTS)


def test_one_call_takes_what_its_steps_take() -> None:
    """Four tokens of a header and the first sample in one step, seven more samples, and the last two tokens at once."""
    found = simulate([lone_calls(1)], 1, SETTING)
    prompt, decode, end = 0.01 + 3 / 1000, 7 * 0.01, 0.01 + 1 / 1000
    assert found.makespan_s == pytest.approx(0.002 + prompt + decode + end)
    assert found.first_token_s == (pytest.approx(0.002 + prompt),)
    assert (found.calls, found.samples, found.steps, found.tokens_decoded) == (1, 8, 9, 13)
    assert found.engines_busy_s == (pytest.approx(prompt + decode + end),)


def test_what_rows_attend_to_is_counted() -> None:
    """Two calls over one message of 30 tokens: it counts once, as a segment twice, and their own tokens for each."""
    run = [Spoken(["doc"], samples=2, closing=0), Spoken(["doc"], samples=2, closing=0)]
    costs = costs_of(attended_s=1e-4, segment_s=1e-3)
    trace = trace_of([run], {"doc": (30, [])})
    found = simulate([trace], 1, Setting(costs))
    # The document and both headers share the first step: the document is a row, too.
    first = 0.01 + 2 * 0.001 + (30 + 4 + 4 - 3) / 1000 + 1e-4 * 30 + 2e-3
    second, third = (0.01 + 0.001 + 1e-4 * (30 + own) + 2e-3 for own in (8, 10))
    assert found.makespan_s == pytest.approx(0.002 + first + second + third)


def test_a_step_encodes_no_more_than_it_may() -> None:
    """A document of 100 tokens takes a step of 64 and one of 36, which the header of the reader shares."""
    trace = trace_of([[Spoken(["doc"], samples=1, closing=0)]], {"doc": (100, [])})
    found = simulate([trace], 1, SETTING)
    first, second, end = 0.01 + 63 / 1000, 0.01 + 0.001 + (36 + 4 - 2) / 1000, 0.01
    assert found.makespan_s == pytest.approx(0.002 + first + second + end)
    assert (found.steps, found.tokens_first, found.tokens_again) == (3, 100, 0)


def test_calls_wait_for_what_they_come_after() -> None:
    lone = simulate([lone_calls(1)], 1, SETTING).makespan_s
    tasks = [Spoken(), Waited(0.5, [0]), Spoken(["said 0.0"], after=[1])]
    assert simulate([trace_of([tasks])], 1, SETTING).makespan_s == pytest.approx(2 * lone + 0.5)
    runs = trace_of([[Spoken()], [Spoken()]], threads=["one", "one"])
    assert simulate([runs], 1, SETTING).makespan_s == pytest.approx(2 * lone), "runs of a thread follow each other"
    assert simulate([lone_calls(2)], 2, SETTING).makespan_s == pytest.approx(lone), "others do not"


def test_a_front_does_all_that_it_has_to_do_side_by_side() -> None:
    costs = costs_of(front_s=0.05, answer_s=0.02, token_s=0.001, call_s=0.0)
    lone = simulate([lone_calls(1)], 1, Setting(costs_of(call_s=0.0))).makespan_s
    found = simulate([lone_calls(3)], 3, Setting(costs))
    assert found.makespan_s == pytest.approx(3 * 0.05 + lone + 3 * 0.028)
    assert found.front_busy_s == pytest.approx(3 * 0.078)
    assert found.first_token_s == (pytest.approx(0.15 + 0.01 + 3 / 1000),) * 3
    assert simulate([lone_calls(3)], 3, Setting(costs, fronts=3)).front_busy_s == pytest.approx(3 * 0.078)


def test_who_comes_later_shares_what_is_left() -> None:
    """One call is due at once, and one when half of its 0.1 s are done: then both go half as fast."""
    runs = [[Spoken()], [Waited(0.05), Spoken(after=[0])]]
    found = simulate([trace_of(runs)], 2, Setting(costs_of(front_s=0.1, call_s=0.0)))
    step = 0.01 + 3 / 1000
    assert found.first_token_s == (pytest.approx(0.05 + 0.1 + step), pytest.approx(0.05 + 0.05 + 0.05 + step))


class RecordedRouting:
    """Places each call where it is told, by the product's own way to bring what is lacking there."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = list(names)
        self.routes: list[Route] = []

    def __call__(self, call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        if self._names:
            name = self._names.pop(0)
            engines = [engine for engine in engines if engine.name == name]
        self.routes.append(route(call, engines, costs))
        return self.routes[-1]


def test_kv_is_copied_over_one_link_after_the_other() -> None:
    """A document of 600 tokens is encoded by one engine and copied to two: 0.004 s, and 0.06 s each, one by one."""
    run = [Spoken(["doc"]), Waited(5.0, [0]), Spoken(["doc"], after=[1]), Spoken(["doc"], after=[1])]
    routing = RecordedRouting(["engine 0", "engine 1", "engine 2"])
    found = simulate([trace_of([run], {"doc": (600, [])})], 3, Setting(COSTS, routing=routing))
    alone = 0.002 + 0.01 + 3 / 1000
    assert found.first_token_s[1:] == (
        pytest.approx(0.004 + 0.06 + alone),
        pytest.approx(0.004 + 0.12 + alone),
    )
    assert (found.bytes_moved, found.copies, found.copies_refused) == (120_000, 2, 0)
    assert (found.tokens_first, found.tokens_again, found.calls_moved) == (600, 0, 2)


def test_what_is_not_there_yet_is_not_copied() -> None:
    """The second call is sent at once: the engine that is to give the document has only begun with it."""
    routing = RecordedRouting(["engine 0", "engine 1"])
    costs = costs_of(encode_tokens_per_s=100.0)
    run = [Spoken(["doc"]), Spoken(["doc"])]
    found = simulate([trace_of([run], {"doc": (600, [])})], 2, Setting(costs, routing=routing))
    assert not found.copies and not found.copies_refused
    assert (found.tokens_first, found.tokens_again) == (600, 600)


def test_two_calls_wait_for_one_copy() -> None:
    run = [Spoken(["doc"]), Waited(5.0, [0]), Spoken(["doc"], after=[1]), Spoken(["doc"], after=[1])]
    routing = RecordedRouting(["engine 0", "engine 1", "engine 1"])
    found = simulate([trace_of([run], {"doc": (600, [])})], 2, Setting(COSTS, routing=routing))
    assert (found.bytes_moved, found.copies, found.tokens_again) == (60_000, 1, 0)
    assert found.first_token_s[1] == found.first_token_s[2]


def test_what_a_call_has_brought_is_to_be_had_while_it_still_speaks() -> None:
    run = [Spoken(["doc"], samples=900), Waited(3.0), Spoken(["doc"], after=[1])]
    routing = RecordedRouting(["engine 0", "engine 1"])
    found = simulate([trace_of([run], {"doc": (600, [])})], 2, Setting(COSTS, routing=routing))
    assert found.makespan_s > 9.0 and (found.copies, found.tokens_again) == (1, 0)


def test_an_engine_takes_one_copy_after_the_other() -> None:
    """Two documents of 500 tokens come from two engines to a third: 0.05 s each."""
    run = [Spoken(["x"]), Spoken(["y"]), Waited(5.0, [0, 1]), Spoken(["x"], after=[2]), Spoken(["y"], after=[2])]
    routing = RecordedRouting(["engine 0", "engine 1", "engine 2", "engine 2"])
    trace = trace_of([run], {"x": (500, []), "y": (500, [])})
    *_, one, other = simulate([trace], 3, Setting(COSTS, routing=routing)).first_token_s
    first = 0.004 + 0.05 + 0.002 + 0.01 + 3 / 1000
    assert one == pytest.approx(first)
    assert first + 0.04 < other < first + 0.07


def test_what_another_thread_needs_stays() -> None:
    runs = [[Spoken(["root"])], [Waited(9.0), Spoken(["root"], after=[0])]]
    found = simulate([trace_of(runs, {"root": (500, [])}, common=["root"])], 1, SETTING)
    assert (found.tokens_first, found.tokens_again) == (500, 0)


def test_an_answer_that_was_thought_out_is_encoded_behind_its_thoughts() -> None:
    trace = trace_of([[Spoken(samples=20), Spoken(["answer"], after=[0])]], {"answer": (9, [])})
    [run] = trace.runs
    thinking, reader = run.tasks
    assert isinstance(thinking, TracedCall)
    trace = replace(trace, runs=(replace(run, tasks=(replace(thinking, made="answer"), reader)),))
    found = simulate([trace], 1, SETTING)
    assert found.tokens_decoded == (4 + 20 + 1) + 9 + (4 + 8 + 1)
    assert not found.tokens_first and not found.tokens_again, "it is there when it is read"


def test_copies_have_messages_of_their_own_but_for_what_all_are_told() -> None:
    trace = trace_of([[Spoken(["root", "question"])]], {"root": (20, []), "question": (10, ["root"])}, common=["root"])
    found = simulate([trace], 1, Setting(COSTS, copies=5))
    assert (found.calls, found.tokens_first, found.tokens_again) == (5, 20 + 5 * 10, 0)


def test_fronts_tell_each_other_by_the_directory_where_messages_are() -> None:
    runs = [[Spoken(["root"]), Waited(20.0)], [Waited(9.0), Spoken(["root"], after=[0])]]
    trace = trace_of(runs, {"root": (500, [])}, common=["root"])
    found = simulate([trace], 2, Setting(costs_of(lookup_s=0.001), fronts=2))
    assert found.tokens_first == 500 and not found.tokens_again and not found.bytes_moved
    # Each front asks for the root, and says that an engine has it, has an answer, and has neither any more.
    assert found.directory_ids == 2 * (1 + 2 + 2)
    assert found.directory_busy_s == pytest.approx(0.001 * found.directory_ids)


@given(random_traces(), st.integers(1, 5), st.sampled_from(sorted(RULES)), st.integers(1, 2), st.data())
def test_nothing_is_lost_and_nothing_done_twice(
    trace: RecordedTrace, engines: int, rule: str, fronts: int, data: st.DataObject
) -> None:
    copies, rate = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 5.0]))
    costs = costs_of(
        front_s=0.001, lookup_s=1e-4, attended_s=1e-6, segment_s=1e-5, cores=data.draw(st.sampled_from([None, 1.0]))
    )
    routes: list[Route] = []

    def routing(call: CallToPlace, ahead: Sequence[EngineAhead], product: Costs) -> Route:
        routes.append(RULES[rule](call, ahead, product))
        return routes[-1]

    setting = Setting(costs, copies, rate, seed=1, fronts=fronts, routing=routing)
    done: list[int] = []
    found = simulate([trace], engines, setting, done.append)
    calls = [call for _ in range(copies) for call in trace.calls]
    assert done == list(range(1, len(calls) + 1)) and found.calls == len(routes) == len(calls)
    assert found.tokens_decoded == sum(trace.messages[call.made].tokens for call in calls)
    assert len(found.first_token_s) == sum(call.samples > 0 for call in calls)
    assert all(0 < waited < found.makespan_s for waited in found.first_token_s)
    placed = sum(each.bytes_copied for each in routes)
    assert found.bytes_moved == placed if not found.copies_refused else found.bytes_moved <= placed
    if engines == 1:
        assert not found.bytes_moved and not found.calls_moved
    if rule == "no-copies":
        assert not found.bytes_moved
    assert all(busy <= found.makespan_s + 1e-9 for busy in found.engines_busy_s)
    read = {name for call in trace.calls for name in call.reads}
    said = {call.made for call in trace.calls}
    behind, waiting = set(read), list(read)
    while waiting:
        for parent in trace.messages[waiting.pop()].parents:
            if parent not in behind:
                behind.add(parent)
                waiting.append(parent)
    least = sum(trace.messages[name].tokens * (1 if trace.messages[name].is_common else copies) for name in read - said)
    most = sum(trace.messages[name].tokens * (1 if trace.messages[name].is_common else copies) for name in behind)
    assert least <= found.tokens_first <= most
    assert simulate([trace], engines, setting).as_object() == found.as_object(), "the same again"


@given(random_traces(), st.integers(1, 3))
def test_steps_that_are_alike_are_taken_at_once(trace: RecordedTrace, engines: int) -> None:
    """With cores to share each step is looked at by itself: with more of them than engines, it takes as long."""
    costs = costs_of(attended_s=1e-5, front_s=0.003)
    one_by_one = simulate([trace], engines, Setting(costs_of(attended_s=1e-5, front_s=0.003, cores=99.0)))
    at_once = simulate([trace], engines, Setting(costs))
    assert at_once.makespan_s == pytest.approx(one_by_one.makespan_s)
    assert at_once.first_token_s == pytest.approx(one_by_one.first_token_s)
    assert at_once.steps == one_by_one.steps


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=30), st.integers(1, 4))
def test_more_engines_do_not_take_longer(shapes: list[tuple[int, int]], engines: int) -> None:
    """Calls that know nothing of each other end no later with one engine more, but for the longest one of them.

    Placing them is greedy, and what a call is expected to sample is guessed: so one may come late to a full engine.
    """
    trace = trace_of([[Spoken(header=header, samples=samples)] for header, samples in shapes])
    fewer, more = (simulate([trace], count, SETTING).makespan_s for count in (engines, engines + 1))
    longest = max(
        simulate([trace_of([[Spoken(header=header, samples=samples)]])], 1, SETTING).makespan_s
        for header, samples in shapes
    )
    assert more <= fewer + longest


def test_a_queue_is_as_long_as_theory_says() -> None:
    """M/D/1: one call at a time, each of two steps, at six tenths of what the engine can do."""
    header = with_limits(rows=1, step_tokens=64)
    costs = costs_of(call_s=0.0)
    trace = lone_calls(4000, header, samples=1, closing=1)
    service = 0.01 + 3 / 1000 + 0.01 + 1 / 1000
    load = 0.6
    found = simulate([trace], 1, Setting(costs, rate=load / service, seed=7))
    waited = sum(found.first_token_s) / 4000 - (0.01 + 3 / 1000)
    assert waited == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)
    assert found.utilisation == pytest.approx(load, rel=0.05)


def test_shared_cores_slow_each_other_down() -> None:
    alone = simulate([lone_calls(1)], 1, Setting(costs_of(cores=1.0))).makespan_s
    both = simulate([lone_calls(2)], 2, Setting(costs_of(cores=1.0))).makespan_s
    assert alone == pytest.approx(simulate([lone_calls(1)], 1, SETTING).makespan_s)
    assert both - 0.002 == pytest.approx(2 * (alone - 0.002), rel=0.1)


def test_another_seed_is_another_begin() -> None:
    trace = lone_calls(5)
    one, same, other = (simulate([trace], 1, Setting(COSTS, rate=3.0, seed=seed)) for seed in (1, 1, 2))
    assert one == same and one.makespan_s != other.makespan_s


def test_what_a_front_by_itself_reads_is_looked_up_nowhere() -> None:
    trace = trace_of([[Spoken(["doc"])]], {"doc": (30, [])})
    costly = costs_of(lookup_s=0.5, directory_s=0.25)
    assert simulate([trace], 1, Setting(costly)) == simulate([trace], 1, SETTING)


def test_to_ask_the_directory_takes_a_way_there_and_back() -> None:
    """One of two fronts has a call that reads: its first token comes later by the way and by the directory's work."""
    trace = trace_of([[Spoken(["doc"])], [Waited(9.0), Spoken(after=[0])]], {"doc": (30, [])})
    costs = costs_of(call_s=0.2, lookup_s=0.01, directory_s=0.05)
    alone, two = (simulate([trace], 1, Setting(costs, fronts=fronts)).first_token_s for fronts in (1, 2))
    assert two[0] - alone[0] == pytest.approx(0.2 + 0.01 + 0.05)
    assert two[1] == pytest.approx(alone[1]), "who reads nothing asks nothing"


def test_it_is_counted_how_much_an_engine_holds_at_most() -> None:
    """A document of 30 tokens and 13 said of it, later another one of 20: together only if one is there still."""
    documents: dict[str, tuple[int, list[str]]] = {"doc": (30, []), "other": (20, [])}
    first, later = [Spoken(["doc"])], [Waited(5.0), Spoken(["other"], after=[0])]
    for thread, held in (((None, None), 30 + 13), (("one", "one"), 30 + 13 + 20 + 13)):
        found = simulate([trace_of([first, later], documents, threads=thread)], 1, SETTING)
        assert found.most_tokens_held == held
    at_once = trace_of([first, [Spoken(["other"])]], documents)
    assert simulate([at_once], 1, SETTING).most_tokens_held == 30 + 13 + 20 + 13
    assert simulate([at_once], 2, SETTING).most_tokens_held == 30 + 13, "by the one that holds most"


def test_time_counts_from_the_first_begin() -> None:
    """A call that begins by itself, however late, takes as long and keeps its engine as busy as one at time 0."""
    alone = simulate([lone_calls(1)], 1, SETTING)
    late = simulate([lone_calls(1)], 1, replace(SETTING, rate=1e-3))
    assert late.makespan_s == pytest.approx(alone.makespan_s)
    assert late.calls_per_s == pytest.approx(alone.calls_per_s)
    assert late.utilisation == pytest.approx(alone.utilisation)


def test_threads_begin_at_a_rate_and_their_runs_follow() -> None:
    """Ten runs of one thread begin once: the second when the first has ended, whatever the rate."""
    trace = trace_of([[Spoken()]] * 10, threads=["one"] * 10)
    rare, often = (simulate([trace], 1, replace(SETTING, rate=rate)) for rate in (1e-3, 1e3))
    assert rare.makespan_s == pytest.approx(often.makespan_s) == pytest.approx(sum(often.run_s))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [({"copies": 0}, "copies must be 1 or more"), ({"rate": 0.0}, "above 0"), ({"fronts": 0}, "fronts must be 1")],
)
def test_settings_are_checked(wrong: dict[str, float], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        Setting(COSTS, **wrong)  # type: ignore[arg-type]


def test_there_must_be_engines_and_bytes() -> None:
    with pytest.raises(InvalidRequestError, match="0"):
        simulate([lone_calls(1)], 0, SETTING)
    with pytest.raises(InvalidRequestError, match="bytes"):
        Setting(costs_of(bytes_per_token=None))
