"""Scopes, personas, prompts, positions, sends and policies, as runs have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from support.adapters import save_adapter
from support.graphs import QUESTION, agent
from support.lineage import parents_of, record_of

from choreo_agents import END, START, ChoreoGraph, Engine, MessageHandle, Policy, Sampling, Send, VisibilityRule, send
from choreo_agents.errors import (
    ContextLengthError,
    InvalidRequestError,
    UnknownHandleError,
    VisibilityError,
    VisibilityWarning,
)
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.workflows.graphs.prisoners_dilemma import prisoners_dilemma


def pair(rule: VisibilityRule | str = "shared", policy: Policy | None = None, **options: Any) -> ChoreoGraph:
    """ann speaks, then bob, who sees her by a rule; both have secrets, ann's plan is confidential."""
    graph = ChoreoGraph(system="Root.", policy=policy, **options)
    graph.add_node("ann.plan", agent("ann", system="Ann has 3 red kites.", persona="ann", confidential=True))
    graph.add_node("ann", agent("ann", system="Ann has 3 red kites.", persona="ann"))
    graph.add_node("bob", agent("bob", system="Bob has 7 blue cups."))
    graph.add_edge(START, "ann.plan").add_edge("ann.plan", "ann").add_edge("ann", "bob", visibility=rule)
    return graph


def entries_of(state: dict[str, Any], author: str) -> list[Any]:
    return [entry for entry in state["handles"] if entry["author"] == author]


def handle_of(state: dict[str, Any], author: str) -> MessageHandle:
    return MessageHandle.model_validate(entries_of(state, author)[-1]["handle"])


def ancestors(engine: Engine, handle: MessageHandle) -> set[str]:
    """Authors of all that a message's encoding attended to."""
    [lineage] = engine.inspect.audit([handle]).messages
    return {author for ancestor in lineage.through("encoding") for author in ancestor.authors}


def test_a_public_scope_encodes_words_once_for_all_its_readers(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    for name in ("pro", "one", "two"):
        graph.add_node(agent(name, system=f"Notes of {name}."))
    graph.add_edge(START, "pro")
    for reader in ("one", "two"):
        graph.add_edge("pro", reader, visibility="reencoded", scope="public")
    state = graph.compile(engine=engine).invoke(QUESTION)
    copies = []
    for reader in ("one", "two"):
        [lineage] = engine.inspect.audit([handle_of(state, reader)]).messages
        copies += [
            ancestor.handle
            for ancestor in lineage.through("encoding")
            if "pro" in ancestor.authors and ancestor.handle != handle_of(state, "pro")
        ]
        assert "pro.system" not in ancestors(engine, handle_of(state, reader))
    assert len(copies) == 2 and copies[0] == copies[1]
    assert engine.inspect.audit([copies[0]]).messages[0].authors == {"pro"}
    assert ancestors(engine, copies[0]) == {"public root"}


@pytest.mark.parametrize(
    ("scope", "seen", "unseen"),
    [
        (["ann.system"], {"ann.system"}, {"ann.plan"}),
        (["ann.plan"], {"ann.plan"}, {"ann.system"}),
        (["ann.system", "ann.plan"], {"ann.system", "ann.plan"}, set()),
        ("public", set(), {"ann.system", "ann.plan"}),
        ("reader", {"bob.system"}, {"ann.system", "ann.plan"}),
    ],
    ids=["system", "plan", "both", "public", "reader"],
)
def test_fresh_encodings_attend_to_what_their_scope_names(engine: Engine, scope: Any, seen: set, unseen: set) -> None:
    state = pair(VisibilityRule("reencoded", scope=scope)).compile(engine=engine).invoke(QUESTION)
    found = ancestors(engine, handle_of(state, "bob"))
    assert seen <= found and not unseen & found
    app = pair(VisibilityRule("reencoded", scope=scope)).compile(engine=engine)
    assert app.audit().reached("bob", "encoding") == seen - {"bob.system"}


def test_a_persona_sees_what_its_nodes_said_and_were_asked_and_nobody_else_does(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    graph.add_node("ann.plan", agent("ann", persona="ann", prompt="What is your plan?"))
    graph.add_node("ann", agent("ann", persona="ann", prompt=lambda state: f"{len(state['messages'])} said."))
    graph.add_node(agent("bob"))
    graph.add_edge(START, "ann.plan").add_edge("ann.plan", "ann", visibility={}).add_edge("ann", "bob")
    graph.set_visibility("ann.plan", "bob")
    state = graph.compile(engine=engine).invoke(QUESTION)
    prompts = [MessageHandle.model_validate(entries_of(state, name)[0]["prompt"]) for name in ("ann.plan", "ann")]
    assert [engine.text(prompt) for prompt in prompts] == [
        engine.chat.turn("user", "What is your plan?").text,
        engine.chat.turn("user", "2 said.").text,
    ]
    parents = parents_of(engine, handle_of(state, "ann"))
    assert [parent.handle for parent in parents[-3:]] == [prompts[0], handle_of(state, "ann.plan"), prompts[1]]
    seen = [parent.handle for parent in parents_of(engine, handle_of(state, "bob"))]
    assert not {*prompts} & {*seen} and handle_of(state, "ann.plan") in seen


def test_parallel_positions_put_siblings_at_one_offset(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.", positions="parallel")
    for name in ("pro", "con", "judge", "press"):
        # The first of the siblings is the longer one: what follows must not start where the second ends.
        said = Sampling(max_tokens=2 if name == "con" else 9, stop_tokens=())
        graph.add_node(agent(name, system=f"Notes of {name}: {'long ' * len(name)}.", sampling=said))
    graph.add_edge(START, "pro").add_edge(START, "con").add_edge(["pro", "con"], "judge").add_edge("judge", "press")
    graph.set_visibility("pro", "press", "reencoded").set_visibility("con", "press", "reencoded")
    state = graph.compile(engine=engine).invoke(QUESTION)
    for reader in ("judge", "press"):
        message, parents = record_of(engine, handle_of(state, reader)), parents_of(engine, handle_of(state, reader))
        starts = message.offsets
        lengths = [len(parent.tokens) for parent in parents]
        siblings = [i for i, parent in enumerate(parents) if parent.author in ("pro", "con")]
        [one, two] = siblings
        assert starts[one] == starts[two] == starts[one - 1] + lengths[one - 1]
        after = max(starts[i] + lengths[i] for i in siblings)
        assert (starts[two + 1] if two + 1 < len(starts) else message.position) == after
        if reader == "press":
            assert parents[one].handle not in parents[two].parents, "siblings do not see each other"


def test_positions_of_a_graph_can_be_an_agents_own(make_engine: Any) -> None:
    for method in ("choreo", "baseline"):
        engine = make_engine(method=method)
        graph = ChoreoGraph(system="Root.", positions="parallel")
        for name in ("pro", "con"):
            graph.add_node(agent(name))
            graph.add_edge(START, name)
        graph.add_node(agent("judge", positions="sequential")).add_edge(["pro", "con"], "judge")
        state = graph.compile(engine=engine).invoke(QUESTION)
        message = record_of(engine, handle_of(state, "judge"))
        starts = message.offsets
        assert method != "choreo" or sorted(set(starts)) == [*starts]
    for wrong in (lambda: ChoreoGraph(positions="side by side"), lambda: agent("pro", positions="")):
        with pytest.raises((VisibilityError, InvalidRequestError), match="positions must be"):
            wrong()


def branching(shared: str = "", reencoded: str = "", rule: str = "shared") -> ChoreoGraph:
    """pro and con speak; the router sends a worker some of what they said."""
    graph = ChoreoGraph(system="Root.")
    for name in ("pro", "con", "worker"):
        graph.add_node(agent(name))
    graph.add_edge(START, "pro").add_edge(START, "con")
    graph.add_node("router", lambda state: None)
    graph.add_edge(["pro", "con"], "router", visibility={})
    graph.set_visibility("pro", "worker", rule)

    def route(state: Any) -> list[Send]:
        chosen = {
            mode: [entry for entry in state["handles"] if entry["author"] in authors.split()]
            for mode, authors in (("shared", shared), ("reencoded", reencoded))
        }
        return [send("worker", state, **chosen, messages=[("user", "Count them.")]) for _ in range(2)]

    graph.add_conditional_edges("router", route, ["worker"], visibility={})
    return graph


def test_a_send_selects_among_what_its_target_may_read(engine: Engine) -> None:
    state = branching(shared="pro").compile(engine=engine).invoke(QUESTION)
    for entry in entries_of(state, "worker"):
        handle = MessageHandle.model_validate(entry["handle"])
        authors = ancestors(engine, handle)
        assert "pro" in authors and "con" not in authors
        assert handle_of(state, "pro") in engine.inspect.ancestors(handle)
    assert len(entries_of(state, "worker")) == 2
    state = branching(reencoded="pro").compile(engine=engine).invoke(QUESTION)
    worker = handle_of(state, "worker")
    assert handle_of(state, "pro") not in engine.inspect.ancestors(worker) and "pro" in ancestors(engine, worker)
    state = branching().compile(engine=engine).invoke(QUESTION)
    assert "pro" not in ancestors(engine, handle_of(state, "worker"))


@pytest.mark.parametrize(
    ("chosen", "rule", "says"),
    [
        ({"shared": "con"}, "shared", "'con' to 'worker' as 'shared', but it may see nothing of it"),
        ({"reencoded": "con"}, "shared", "'con' to 'worker' as 'reencoded', but it may see nothing of it"),
        ({"shared": "pro"}, "reencoded", "'pro' to 'worker' as 'shared', but it may see reencoded of it"),
        ({"shared": "pro"}, "private", "'pro' to 'worker' as 'shared', but it may see nothing of it"),
    ],
    ids=str,
)
def test_a_send_never_widens_what_its_target_may_read(engine: Engine, chosen: Any, rule: str, says: str) -> None:
    with pytest.raises(VisibilityError, match=says):
        branching(**chosen, rule=rule).compile(engine=engine).invoke(QUESTION)


def test_a_send_names_messages_that_there_are_and_each_once(engine: Engine) -> None:
    state = pair().compile(engine=engine).invoke(QUESTION)
    entry = state["handles"][-1]
    same = MessageHandle.model_validate(entry["handle"]), entry["message_id"], entry
    sent = [send("bob", state, shared=[one]).arg["handles"] for one in same]
    assert sent[0] == sent[1] == sent[2] == [{**entry, "select": "shared", "behind": 0}]
    assert [message.id for message in send("bob", state, reencoded=[entry]).arg["messages"]] == [entry["message_id"]]
    with pytest.raises(UnknownHandleError, match="no message 'nobody'"):
        send("bob", state, shared=["nobody"])
    with pytest.raises(InvalidRequestError, match="sent twice"):
        send("bob", state, shared=[entry], reencoded=[entry])
    with pytest.raises(InvalidRequestError, match="handles="):
        send("bob", state, handles=[])


async def test_a_bound_engine_refuses_what_it_was_not_granted(engine: Engine) -> None:
    known, hidden, words = [await engine.aprefill(text) for text in ("Ann has", "Bob has", "Cleo has")]
    bound = BoundEngine(engine, "bob")
    bound.grant(known)
    bound.grant(words, words_only=True)
    assert bound.tokens(words) == engine.tokens(words)
    from choreo_agents import Prefill

    [made] = await bound.aprefill([Prefill("3 kites", [known])])
    assert [item async for item in bound.astream("Yes", [known, made])]
    with pytest.raises(VisibilityError, match="'bob' may not read"):
        bound.tokens(hidden)
    for handle, may in ((hidden, "not read it"), (words, "read its text only")):
        with pytest.raises(VisibilityError, match=f"may not attend to handle .*{may}"):
            await bound.aprefill([Prefill("3 kites", [handle])])
        with pytest.raises(VisibilityError, match="may not attend"):
            bound.astream("Yes", [known, handle])
    for handle in (known, hidden, words):
        engine.release(handle)


KEEP_PLAN = {"confidential": {"ann.plan": {"ann"}}}


def test_a_policy_keeps_an_unsafe_graph_from_compiling(engine: Engine) -> None:
    unsafe = pair("shared", Policy(**KEEP_PLAN))
    says = (
        "the policy keeps 'ann.plan' from 'bob', but an encoding that attended to it would reach it: "
        "ann.plan -> ann =shared=> bob. Set the visibility of 'ann' to 'bob' to 'reencoded'"
    )
    with pytest.raises(VisibilityError, match=re.escape(says)):
        unsafe.compile(engine=engine)
    pair("reencoded", Policy(**KEEP_PLAN)).compile(engine=engine)
    pair("shared", Policy(confidential={"ann.plan": {"ann", "bob"}})).compile(engine=engine)


def test_words_are_kept_back_on_request(engine: Engine) -> None:
    both = Policy(**KEEP_PLAN, channels={"encoding", "words"})
    with pytest.raises(
        VisibilityError, match=r"text derived from it would reach it.*Remove the visibility of 'ann' to 'bob'"
    ):
        pair("reencoded", both).compile(engine=engine)
    with pytest.raises(ValueError, match="cannot re-encode for the words channel"):
        Policy(**KEEP_PLAN, channels={"words"}, on_violation="reencode")


def test_a_policy_may_reencode_what_would_leak(engine: Engine) -> None:
    app = pair("shared", Policy(**KEEP_PLAN, on_violation="reencode")).compile(engine=engine)
    assert [(hop.source, hop.reader) for hop in app.audit().changed] == [("ann", "bob")]
    state = app.invoke(QUESTION)
    assert "ann.plan" not in ancestors(engine, handle_of(state, "bob"))
    assert app.audit(state).reached("bob", "encoding") == set()
    assert app.audit(state).reached("bob", "words") == {"ann.system", "ann.plan"}
    assert pair("shared").compile(engine=engine).audit().reached("bob", "encoding") == {"ann.system", "ann.plan"}


def test_a_policy_may_only_warn(engine: Engine) -> None:
    graph = pair("shared", Policy(**KEEP_PLAN, on_violation="warn"))
    with pytest.warns(
        VisibilityWarning, match=r"'ann.plan' from 'bob'.*Set the visibility of 'ann' to 'bob' to 'reencoded'"
    ) as told:
        app = graph.compile(engine=engine)
    assert {warning.filename for warning in told if warning.category is VisibilityWarning} == {__file__}
    with pytest.warns(VisibilityWarning, match="the policy keeps 'ann.plan' from 'bob', but the encoding"):
        state = app.invoke(QUESTION)
    [broken] = app.audit(state).violations
    assert (broken.context, broken.reader, broken.channel) == ("ann.plan", "bob", "encoding")


def test_a_policy_that_an_edge_contradicts_is_refused(engine: Engine) -> None:
    graph = pair("reencoded", Policy(**KEEP_PLAN, on_violation="reencode")).set_visibility(
        "ann.plan", "bob", "reencoded"
    )
    with pytest.raises(
        VisibilityError, match="The edge itself violates it: remove the edge, or allow 'bob' to read it"
    ):
        graph.compile(engine=engine)


@pytest.mark.parametrize(
    ("confidential", "says"),
    [
        (
            {"ann.pln": {"ann"}},
            "'ann.pln' of the policy is not a private context. The graph has: ann.plan, ann.system, bob.system",
        ),
        ({"ann.plan": {"anne"}}, "lets 'ann.plan' reach 'anne', which is not a persona of the graph: ann, bob"),
    ],
    ids=str,
)
def test_a_policy_names_what_there_is(engine: Engine, confidential: Any, says: str) -> None:
    with pytest.raises(VisibilityError, match=re.escape(says)):
        pair("shared", Policy(confidential=confidential)).compile(engine=engine)


def test_a_policy_holds_at_call_time_where_the_graph_cannot_tell(engine: Engine) -> None:
    """A function hands bob's graph a message that it has from elsewhere."""
    other = pair().compile(engine=engine).invoke(QUESTION)
    leaked = entries_of(other, "ann")
    graph = pair("shared", Policy(confidential={"ann.plan": {"ann", "bob"}}))
    app = graph.with_policy(Policy(confidential={"ann.plan": {"ann", "bob"}, "ann.system": {"ann", "bob"}}))
    app.compile(engine=engine).invoke({**QUESTION, "handles": leaked})
    only = ChoreoGraph(system="Root.", policy=Policy(confidential={"ann": {"carl"}}))
    only.add_node("ann", agent("ann", confidential=True))
    only.add_node("bob", agent("bob"))
    only.add_node("carl", agent("carl"))
    only.add_edge(START, "ann").add_edge("ann", "carl").add_edge("carl", "bob", visibility={})
    compiled = only.compile(engine=engine)
    # carl's message of another run, in which he read ann, gets into one where bob may read carl.
    state = compiled.invoke(QUESTION)
    bob = only.set_visibility("carl", "bob", "shared")
    with pytest.raises(VisibilityError, match="the policy keeps 'ann' from 'bob'"):
        bob.compile(engine=engine)
    rules = compiled.builder.nodes["bob"].runnable
    rules._reader_rules.sources["carl"] = VisibilityRule()
    with pytest.raises(VisibilityError, match="the encoding that 'carl' shares attended to it"):
        compiled.invoke(
            {"messages": [("user", "Again?")], "handles": state["handles"]} | {"messages": state["messages"]}
        )


def test_a_private_path_is_refused_when_the_graph_is_compiled(engine: Engine) -> None:
    graph = pair("shared").set_visibility("ann.plan", "bob", "private")
    says = "'ann.plan' is declared private to 'bob', but an encoding that attended to it would reach it"
    with pytest.raises(VisibilityError, match=re.escape(says)):
        graph.compile(engine=engine)


def test_under_methods_that_hand_on_no_encodings_only_words_can_leak(make_engine: Any) -> None:
    engine = make_engine(method="baseline")
    app = pair("shared", Policy(**KEEP_PLAN)).compile(engine=engine)
    state = app.invoke(QUESTION)
    assert app.audit(state).reached("bob", "encoding") == set()
    assert app.audit(state).reached("bob", "words") == {"ann.system", "ann.plan"}


@pytest.mark.parametrize("wrong", ["everyone", [], "ann.system", [""], 3, [1]], ids=str)
def test_a_scope_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(VisibilityError, match="scope must be"):
        VisibilityRule("reencoded", scope=wrong)


def test_scopes_are_for_words_and_name_contexts_that_there_are(engine: Engine) -> None:
    with pytest.raises(VisibilityError, match="'shared' encodes none"):
        VisibilityRule("shared", scope="public")
    with pytest.raises(VisibilityError, match="scope 'public' conflicts with"):
        ChoreoGraph().add_edge("a", "b", visibility=VisibilityRule("reencoded"), scope="public")
    with pytest.raises(
        VisibilityError,
        match=r"names 'ann.sys', which is not a private context: there are .*'ann.system', 'bob.system'",
    ):
        pair(VisibilityRule("reencoded", scope=("ann.sys",))).compile(engine=engine)


def endless(history: Any = "all", *, ends: bool = False) -> ChoreoGraph:
    graph = ChoreoGraph()
    graph.add_node(agent("ann"))
    graph.add_node(agent("bob"))
    graph.add_edge(START, "ann").add_edge("ann", "bob", history=history).add_edge("bob", "ann", history=history)
    if ends:
        graph.add_conditional_edges("bob", lambda state: END, ["ann", END], visibility={})
    return graph


def test_a_loop_that_nothing_ends_is_refused(engine: Engine) -> None:
    for history in ("all", "last"):
        with pytest.raises(VisibilityError, match=r"in a loop without an exit.*Add an exit"):
            endless(history).compile(engine=engine)
    endless(ends=True).compile(engine=engine)


def test_a_view_that_outgrows_the_context_says_which_edge_to_change(engine: Engine) -> None:
    app = endless(ends=True).compile(engine=engine)
    with pytest.raises(ContextLengthError, match=r"In the view of '(ann|bob)', \d+ tokens are .*: "):
        app.invoke({"messages": [("user", "kites " * 40)]}, {"recursion_limit": 400})


@pytest.fixture
def played(engine: Engine) -> Iterator[dict[str, Any]]:
    strategies = {"Alice": "Always defect.", "Bob": "Do what the other says."}
    game = prisoners_dilemma(strategies, game="Points.", talks=2, sampling=Sampling(max_tokens=6))
    yield game.compile(engine=engine).invoke({"messages": []})


def test_the_dilemma_is_played_in_turns_and_decided_at_once(played: dict[str, Any], engine: Engine) -> None:
    order = [entry["author"] for entry in sorted(played["handles"], key=lambda each: each["superstep"])]
    assert order == ["alice.plan", "bob.plan", "alice", "bob", "alice", "bob", "alice", "bob"]
    decisions = [entry for entry in played["handles"] if entry["author"] in ("alice", "bob")][-2:]
    assert decisions[0]["superstep"] == decisions[1]["superstep"]
    asked = [engine.text(MessageHandle.model_validate(e["prompt"])) for e in entries_of(played, "alice") if e["prompt"]]
    assert ["Tell the other" in asked[0], "What do you do?" in asked[1], len(asked)] == [True, True, 2]
    assert ["alice.plan" in ancestors(engine, handle_of(played, "bob"))] == [True]


@pytest.mark.parametrize(
    ("strategies", "talks"), [({"A": ""}, 1), ({"A": "", "B": "", "C": ""}, 1), ({"A": "", "B": ""}, 0)]
)
def test_a_dilemma_of_another_kind_is_refused(strategies: dict[str, str], talks: int) -> None:
    with pytest.raises(ValueError, match=r"two players|at least once"):
        prisoners_dilemma(strategies, game="", talks=talks)


def test_input_that_is_private_to_a_reader_is_so_through_others(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    graph.add_node(agent("ann")).add_node(agent("bob"))
    graph.add_edge(START, "ann").add_edge("ann", "bob").set_visibility(START, "bob", "private")
    with pytest.raises(VisibilityError, match=r"'__start__' is declared private to 'bob'.*__start__ =shared=> ann"):
        graph.compile(engine=engine)
    graph.with_rule("ann", "bob", "reencoded").compile(engine=engine).invoke(QUESTION)


def test_a_prompt_whose_answer_fails_is_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("ann", prompt="Tell.")).add_edge(START, "ann")
    app = graph.compile(engine=engine)
    app.invoke(QUESTION)
    leases = engine.stats().leases
    monkeypatch.setattr(BoundEngine, "astream", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        app.invoke(QUESTION)
    assert engine.stats().leases == leases + 2, "this run's root and question are its thread's"


def test_a_policy_cannot_change_what_a_subgraph_was_compiled_with(engine: Engine) -> None:
    inner = ChoreoGraph()
    inner.add_node(agent("ann", system="Ann has 3 red kites.")).add_node(agent("bob"))
    inner.add_edge(START, "ann").add_edge("ann", "bob")
    kept = Policy(confidential={"team|ann.system": {"press"}}, on_violation="reencode")
    graph = ChoreoGraph(policy=kept)
    graph.add_node("team", inner.compile(engine=engine)).add_node(agent("press"))
    graph.add_edge(START, "team").add_edge("team", "press")
    with pytest.raises(VisibilityError, match=r"keeps 'team\|ann.system' from 'team\|bob'"):
        graph.compile(engine=engine)
    outer = Policy(confidential={"team|ann.system": {"team|bob"}}, on_violation="reencode")
    app = graph.with_policy(outer).compile(engine=engine)
    assert [(hop.source, hop.reader) for hop in app.audit().changed] == [("team", "press")]
    state = app.invoke(QUESTION)
    assert app.audit(state).reached("press", "encoding") == set()


def test_a_message_that_comes_without_its_handle_is_still_its_authors(engine: Engine) -> None:
    """A plain Send that leaves the handles out does not make input of what an agent said."""
    graph = ChoreoGraph(system="Root.")
    graph.add_node("ann", agent("ann", confidential=True)).add_node(agent("bob")).add_node(agent("carl"))
    graph.add_edge(START, "ann").add_edge("bob", "carl", visibility={}).set_visibility("ann", "bob", "private")
    route = lambda state: [Send("bob", {"messages": state["messages"]})]  # noqa: E731
    graph.add_conditional_edges("ann", route, ["bob"], visibility={})
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    [ann] = entries_of(state, "ann")
    assert ann["confidential"] and [entry["author"] for entry in state["handles"]].count(START) == 1
    for reader in ("bob", "carl"):
        assert "ann" not in ancestors(engine, handle_of(state, reader))
    assert engine.logprobs(handle_of(state, "ann")), "the handle that was decoded stays, not a copy of its words"


def test_an_edited_message_stays_confidential_and_its_personas(engine: Engine) -> None:
    from langgraph.checkpoint.memory import InMemorySaver

    app = pair("shared").compile(checkpointer=InMemorySaver(), engine=engine, interrupt_before=["ann"])
    config: Any = {"configurable": {"thread_id": "1"}}
    stopped = app.invoke(QUESTION, config)
    plan = stopped["messages"][-1]
    app.update_state(config, {"messages": [plan.model_copy(update={"content": "Another plan."})]})
    state = app.invoke(None, config)
    [entry] = entries_of(state, "ann.plan")
    assert entry["confidential"] and entry["persona"] == "ann"
    assert "ann.plan" in ancestors(engine, handle_of(state, "ann"))
    assert "ann.plan" in app.audit(state).reached("bob", "encoding")


@pytest.mark.parametrize("adapter", [None, "own"])
def test_what_an_edited_message_was_made_of_is_known(
    engine: Engine, tiny_path: Path, tmp_path: Path, adapter: str | None
) -> None:
    from langgraph.checkpoint.memory import InMemorySaver

    engine.load_adapter(save_adapter(tmp_path / "own", tiny_path))
    graph = pair("reencoded")
    graph.nodes["ann"].runnable.adapter = adapter
    app = graph.compile(checkpointer=InMemorySaver(), engine=engine, interrupt_before=["bob"])
    config: Any = {"configurable": {"thread_id": "1"}}
    said = app.invoke(QUESTION, config)["messages"][-1]
    app.update_state(config, {"messages": [said.model_copy(update={"content": f"{said.content} (mended)"})]})
    state = app.invoke(None, config)
    [lineage] = engine.inspect.audit([handle_of(state, "bob")]).messages
    assert "ann.plan" in {author for each in lineage.through("words") for author in each.authors}
    assert "ann.plan" in app.audit(state).reached("bob", "words")


def test_what_somebody_who_may_be_heard_says_too_is_no_secret(engine: Engine) -> None:
    """ann and bob have the same notes: carl, who may not learn ann's, may read bob."""
    graph = ChoreoGraph(system="Root.", policy=Policy(confidential={"ann.system": frozenset()}))
    for name in ("ann", "bob"):
        graph.add_node(agent(name, system="Ann has 3 red kites."))
    graph.add_node(agent("carl"))
    graph.add_edge(START, "ann").add_edge(START, "bob").add_edge("ann", "carl", visibility={}).add_edge("bob", "carl")
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    assert not app.audit().violations and not app.audit(state).violations


def test_agents_in_sequences_are_refused() -> None:
    from langchain_core.runnables import RunnableLambda

    with pytest.raises(InvalidRequestError, match="inside a sequence of runnables"):
        ChoreoGraph().add_node("bob", RunnableLambda(lambda state: state) | agent("bob"))


def test_a_subgraphs_policy_holds_in_the_graph_around_it(engine: Engine) -> None:
    inner = ChoreoGraph(policy=Policy(confidential={"ann": {"ann"}}))
    inner.add_node("ann", agent("ann", confidential=True)).add_edge(START, "ann")
    graph = ChoreoGraph()
    graph.add_node("team", inner.compile(engine=engine)).add_node(agent("press"))
    graph.add_edge(START, "team").add_edge("team", "press")
    with pytest.raises(VisibilityError, match=r"the policy keeps 'team\|ann' from 'press'"):
        graph.compile(engine=engine)


def test_a_send_does_not_widen_history_and_its_branches_speak_after_what_was_said(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    for name in ("pro", "again", "worker", "judge"):
        graph.add_node(agent(name, persona="pro" if name == "again" else None))
    graph.add_node("router", lambda state: None)
    graph.add_edge(START, "pro").add_conditional_edges(
        "pro", lambda state: "pro" if len(state["handles"]) < 3 else "router", ["pro", "router"], visibility={}
    )
    chosen = {"index": 0}
    graph.set_visibility("pro", "worker", "shared", history="last").set_visibility("worker", "judge").set_visibility(
        "pro", "judge"
    )

    def route(state: Any) -> list[Send]:
        said = entries_of(state, "pro")
        return [send("worker", state, shared=[said[chosen["index"]]])]

    graph.add_conditional_edges("router", route, ["worker"], visibility={})
    graph.add_edge("worker", "judge", visibility={})
    app = graph.compile(engine=engine)
    with pytest.raises(VisibilityError, match="'pro' to 'worker' as 'shared', but it may see nothing of it"):
        app.invoke(QUESTION)
    chosen["index"] = 1
    state = app.invoke(QUESTION)
    assert entries_of(state, "worker")[0]["superstep"] > entries_of(state, "pro")[1]["superstep"]
    assert all("select" not in entry and "behind" not in entry for entry in state["handles"])


async def test_a_prompt_may_be_made_asynchronously(engine: Engine) -> None:
    async def ask(state: Any) -> str:
        return "Tell."

    graph = ChoreoGraph()
    graph.add_node(agent("ann", prompt=ask)).add_edge(START, "ann")
    state = await graph.compile(engine=engine).ainvoke(QUESTION)
    assert "Tell." in engine.text(MessageHandle.model_validate(entries_of(state, "ann")[0]["prompt"]))


def test_a_copy_of_a_graph_is_its_own(engine: Engine) -> None:
    graph = pair()
    other = graph.with_policy(Policy())
    other.add_node(agent("carl")).add_edge("bob", "carl")
    assert "carl" not in graph.nodes and ("bob", "carl") not in graph.edges
    graph.compile(engine=engine)


def test_a_second_route_leaves_the_first_one_alone() -> None:
    graph = ChoreoGraph()
    for name in ("a", "b", "c"):
        graph.add_node(agent(name))
    graph.add_conditional_edges("a", lambda state: "b", ["b"])

    def elsewhere(state: Any) -> str:
        return "c"

    graph.add_conditional_edges("a", elsewhere, ["c"], visibility="private")
    assert {reader: rules["a"].mode.name for reader, rules in graph.visibility_table().items()} == {
        "b": "shared",
        "c": "private",
    }


def test_words_are_kept_back_at_call_time_too(engine: Engine) -> None:
    both = Policy(**KEEP_PLAN, channels={"encoding", "words"}, on_violation="warn")
    with pytest.warns(VisibilityWarning):
        app = pair("reencoded", both).compile(engine=engine)
    with pytest.warns(
        VisibilityWarning, match="the text of 'ann' may be derived from it: remove the visibility of 'ann' to 'bob'"
    ):
        app.invoke(QUESTION)


def words(state: dict[str, Any], engine: Engine, author: str) -> list[str]:
    """What an author's last message attended to, by author."""
    return [str(parent.author) for parent in parents_of(engine, handle_of(state, author))]


def test_a_conversation_handed_on_as_messages_keeps_its_order(engine: Engine) -> None:
    app = pair("shared").compile(engine=engine)
    first = app.invoke(QUESTION)
    again = app.invoke({"messages": [*first["messages"], ("user", "And Bob?")]})
    assert words(again, engine, "ann")[:5] == ["public root", "ann.system", START, "ann.plan", "ann"]
    assert words(again, engine, "ann")[5] == START
    said = sorted(again["handles"], key=lambda each: each["superstep"])
    assert [e["author"] for e in said] == [START, "ann.plan", "ann", "bob", START, "ann.plan", "ann", "bob"]


def test_what_agents_of_another_graph_said_openly_is_input(engine: Engine) -> None:
    first = pair("shared").compile(engine=engine).invoke(QUESTION)
    other = ChoreoGraph(system="Root.")
    other.add_node(agent("zoe")).add_edge(START, "zoe")
    state = other.compile(engine=engine).invoke({"messages": first["messages"]})
    # ann's plan is confidential: it stays hers. Her open words, and bob's, are read as text.
    assert words(state, engine, "zoe") == ["public root", START, START, START]


def test_the_audit_of_a_run_does_not_depend_on_other_runs(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    same = Sampling(forced_token_ids=(40, 41, 42))
    graph.add_node("plan", agent("ann", confidential=True, sampling=same))
    graph.add_node("talk", agent("ann", sampling=same))
    graph.add_node(agent("bob"))
    graph.add_conditional_edges(START, lambda state: state["messages"][-1].text, ["plan", "talk"])
    # Neither sees the question: they say the same in the same place.
    graph.set_visibility(START, "plan", "private").set_visibility(START, "talk", "private")
    graph.set_visibility("plan", "bob").set_visibility("talk", "bob").add_edge("plan", "bob", visibility={})
    graph.add_edge("talk", "bob", visibility={})
    app = graph.compile(engine=engine)
    state = app.invoke({"messages": [("user", "plan")]})
    alone = app.audit(state).reached("bob", "encoding")
    other = app.invoke({"messages": [("user", "talk")]})
    assert handle_of(other, "talk") == handle_of(state, "plan")
    assert app.audit(state).reached("bob", "encoding") == alone == {"plan"}


def test_two_secrets_of_one_text_are_both_reported(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    for name in ("ann", "bob"):
        graph.add_node(agent(name, system="Ann has 3 red kites."))
    graph.add_node(agent("carl")).add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "carl")
    app = graph.compile(engine=engine)
    assert app.audit(app.invoke(QUESTION)).reached("carl", "encoding") == {"ann.system", "bob.system"}


def test_a_send_counts_what_is_still_said(engine: Engine) -> None:
    state = branching(shared="pro").compile(engine=engine).invoke(QUESTION)
    [entry] = entries_of(state, "pro")
    removed = {**entry, "superstep": 9, "message_id": "removed"}
    sent = send("worker", {**state, "handles": [*state["handles"], removed]}, shared=[entry])
    assert sent.arg["handles"][0]["behind"] == 0


def test_a_subgraph_that_only_warns_can_stand_in_a_graph_that_raises(engine: Engine) -> None:
    inner = ChoreoGraph(policy=Policy(confidential={"ann": {"ann"}}, on_violation="warn"))
    inner.add_node("ann", agent("ann", confidential=True)).add_node(agent("bob"))
    inner.add_edge(START, "ann").add_edge("ann", "bob")
    with pytest.warns(VisibilityWarning):
        team = inner.compile(engine=engine)
    graph = ChoreoGraph()
    graph.add_node("team", team).add_edge(START, "team")
    graph.compile(engine=engine)


def test_loops_that_a_function_interrupts_are_not_endless(engine: Engine) -> None:
    """Its edges stay in the loop, which goes on as long as somebody answers."""
    graph = ChoreoGraph().add_node(agent("ann")).add_edge(START, "ann").add_edge("ann", "ask").add_edge("ask", "ann")
    graph.add_node("ask", lambda _: {"messages": [("user", interrupt("and?"))]})
    app, thread = graph.compile(InMemorySaver(), engine=engine), {"configurable": {"thread_id": "t"}}
    for given in (QUESTION, Command(resume="More."), Command(resume="More.")):
        said = app.invoke(given, thread)
    assert [message.type for message in said["messages"]] == ["human", "ai"] * 3 and "__interrupt__" in said


def test_loops_that_people_interrupt_are_not_endless(engine: Engine) -> None:
    graph = ChoreoGraph()
    graph.add_node(agent("ann")).add_edge(START, "ann").add_edge("ann", "ann")
    with pytest.raises(VisibilityError, match="in a loop without an exit"):
        graph.compile(engine=engine)
    graph.compile(engine=engine, interrupt_after=["ann"])
    graph.compile(engine=engine, interrupt_before="*")
    with pytest.raises(VisibilityError, match="in a loop without an exit"):
        graph.add_edge("ann", END).compile(engine=engine)


def test_equal_words_of_a_source_that_is_not_private_are_no_breach(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    same = Sampling(forced_token_ids=(40, 41, 42))
    for name in ("a", "b"):
        graph.add_node(name, agent("same", sampling=same))
        graph.add_edge(START, name)
    graph.add_node(agent("c")).add_node(agent("carl"))
    graph.add_edge("a", "c").add_edge("b", "c", visibility={}).add_edge("c", "carl").set_visibility(
        "b", "carl", "private"
    )
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert handle_of(state, "a") == handle_of(state, "b") in engine.inspect.ancestors(handle_of(state, "carl"))


@pytest.mark.parametrize("first", ["node", "edge"])
def test_who_has_a_system_prompt_reads_the_question_behind_it(engine: Engine, first: str) -> None:
    """Unless its edge from START says otherwise, or none leads to it from there."""
    graph = ChoreoGraph()
    names = ("ann", "bob", "carl", "dora")
    agents = {name: agent(name, system=f"Notes of {name}.") for name in names} | {"eve": agent("eve")}
    for name, options in {"ann": {}, "bob": {"visibility": "shared"}, "carl": {"visibility": {}}, "eve": {}}.items():
        if first == "node":
            graph.add_node(agents[name])
        graph.add_edge(START, name, **options)
        if first == "edge":
            graph.add_node(agents[name])
    graph.add_node(agents["dora"]).add_edge("eve", "dora")
    app = graph.compile(engine=engine)
    state = app.invoke(QUESTION)
    views = {name: parents_of(engine, handle_of(state, name)) for name in agents}
    systems = {name: [each.handle for each in views[name] if each.author == f"{name}.system"] for name in agents}
    asked = {name: next(each for each in views[name] if each.author == START) for name in agents}
    assert [name for name in agents if {*systems[name]} & {*asked[name].parents}] == ["ann"], "who attended to notes"
    drawn = {edge.target: edge.data for edge in app.get_graph().edges if edge.source == START}
    assert drawn == {"ann": "reencoded", "bob": "shared", "carl": "shared", "eve": "shared"}


@pytest.mark.parametrize("first", ["node", "edge"])
def test_how_much_of_the_input_is_read_says_not_how(first: str) -> None:
    """All nodes of a persona read it alike; a scope is one of words that are encoded again."""
    graph, nodes = ChoreoGraph(), [agent("ann", system="Notes."), agent("eve"), agent("dora", system="Notes.")]
    for node in nodes if first == "node" else ():
        graph.add_node(node)
    graph.add_edge(START, "ann", history=3).add_edge(START, "eve", history=3).add_edge(START, "dora", scope="public")
    for node in nodes if first == "edge" else ():
        graph.add_node(node)
    graph.add_node("ann.later", agent("ann", system="Notes.", persona="ann")).add_edge("eve", "ann.later")
    read = {node.name: node.rules[START].words() for node in graph.chart().nodes}
    assert read == {
        "ann": "reencoded, last 3",
        "eve": "shared, last 3",
        "dora": "reencoded in public",
        "ann.later": "reencoded",
    }
    shared = graph.with_rule(START, "ann", VisibilityRule(history=3)).chart()
    assert (
        shared.by_name["ann"].rules[START] == VisibilityRule(history=3)
        and shared.by_name["ann.later"].rules[START] == VisibilityRule()
    )
