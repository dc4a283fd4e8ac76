"""Where a node's call stands in a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from choreo_agents import RunOptions
from choreo_agents.graph.run_context import TaskPlace
from choreo_agents.graph.view.call_id import CallId


def place(agent: str = "pro", **metadata: object) -> CallId:
    return CallId.of({"metadata": metadata, "configurable": {"thread_id": "t"}}, agent)


def test_a_place_is_read_from_langgraphs_config() -> None:
    found = place(langgraph_node="pro", langgraph_path=("__pregel_push", 3, False), langgraph_checkpoint_ns="pro:1")
    assert (found.author, found.branch, found.task) == ("pro", 3, "pro:1")
    pulled = place(langgraph_node="pro", langgraph_path=("__pregel_pull", "pro"))
    assert pulled.branch == 0


def test_a_node_of_a_subgraph_knows_the_nodes_around_it() -> None:
    found = place(langgraph_node="judge", langgraph_checkpoint_ns="team:1|2|judge:3")
    assert (found.author, found.node) == ("team|judge", "judge")


def test_outside_langgraph_everything_is_default() -> None:
    found = CallId.of({}, "alone")
    assert (found.author, found.branch, found.call, found.seed, found.idempotency_key(1)) == ("alone", 0, 0, None, None)
    assert found.message_id(1) != found.message_id(1)


def test_call_seeds_depend_on_all_that_names_a_call_but_ids_of_tasks() -> None:
    one = place(langgraph_node="pro", langgraph_path=("__pregel_push", 3, False), langgraph_checkpoint_ns="pro:2")
    others = [
        place(langgraph_node="pro", langgraph_path=("__pregel_push", 4, False)),
        place(langgraph_checkpoint_ns="con:2", langgraph_path=("__pregel_push", 3, False)),
        place("beta", langgraph_node="pro", langgraph_path=("__pregel_push", 3, False)),
        replace(one, call=1),
        replace(one, around=(TaskPlace("team 0 sent 0"),)),
        replace(one, around=(TaskPlace("team 0 sent 1"),)),
    ]
    seeds = [one.call_seed(0, 1), one.call_seed(1, 1), one.call_seed(0, 2), *(o.call_seed(0, 1) for o in others)]
    assert len(set(seeds)) == len(seeds)
    assert replace(one, task="pro:3", thread="u").call_seed(0, 1) == seeds[0]


def test_calls_of_a_kept_thread_are_named_by_their_places() -> None:
    one = replace(place(langgraph_checkpoint_ns="pro:1"), thread="t", step=None)
    others = [
        replace(one, thread="u"),
        replace(one, author="con"),
        replace(one, agent="x"),
        replace(one, call=1),
        replace(one, path="('__pregel_push', 1, False)"),
        replace(one, around=(TaskPlace("team 0 sent 0"),)),
        replace(one, step=4),
    ]
    for named in ({one.idempotency_key(1), one.idempotency_key(2)}, {one.message_id(1), one.message_id(2)}):
        assert len(named) == 2
    assert len({one.idempotency_key(1), *(other.idempotency_key(1) for other in others)}) == 1 + len(others)
    assert len({one.message_id(1), *(other.message_id(1) for other in others)}) == 1 + len(others)
    again = replace(one, task="pro:2")
    assert (again.idempotency_key(1), again.message_id(1)) == (one.idempotency_key(1), one.message_id(1))


def test_calls_that_no_thread_keeps_are_named_by_their_tasks() -> None:
    one = place(langgraph_checkpoint_ns="pro:1")
    assert one.thread is None, "an id alone keeps nothing"
    others = [replace(one, task="pro:2"), replace(one, agent="x"), replace(one, call=1)]
    assert len({one.idempotency_key(1), *(other.idempotency_key(1) for other in others)}) == 4
    assert len({one.message_id(1), *(other.message_id(1) for other in others)}) == 4


def test_a_runs_own_seed_replaces_the_engines() -> None:
    with_seed = CallId.of({"configurable": {"choreo": RunOptions(seed=5)}}, "alone")
    assert with_seed.call_seed(0, 1) == with_seed.call_seed(99, 1)


def test_calls_of_one_task_are_counted_and_start_again_with_the_next() -> None:
    def read() -> None: ...

    def read_again() -> None: ...

    config = {"configurable": {"__pregel_read": read}}
    assert [CallId.of(config, "alone").call for _ in range(3)] == [0, 1, 2]
    assert CallId.of({"configurable": {"__pregel_read": read_again}}, "alone").call == 0


def test_options_may_be_of_a_programs_own_kind() -> None:
    @dataclass(frozen=True)
    class Own(RunOptions):
        user: str = "ann"

    assert CallId.of({"configurable": {"choreo": Own(seed=5)}}, "alone").seed == 5
