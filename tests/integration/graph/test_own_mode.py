"""Visibility modes that somebody else wrote: what their readers get, what audits say of them, who refuses them.

Written as a user writes it, outside of the package.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from choreo_agents import (
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    MessageHandle,
    Policy,
    RunOptions,
    Sampling,
    Send,
    VisibilityMode,
    VisibilityRule,
    send,
)
from choreo_agents.errors import VisibilityError

PLAN = "I have 3 red kites and 12 blue cups. I shall keep 4 of them."
QUESTION = {"messages": [("user", "Ann has 3 kites.")]}


def first_sentence(words: str) -> str:
    return words.partition(".")[0] + "."


REDACTED = VisibilityMode("redacted", "words", transform=lambda words: re.sub(r"\d", "#", words))
BRIEF = VisibilityMode("first sentence", "words", transform=first_sentence)
LONGER = VisibilityMode("twice", "words", transform=lambda words: f"{words} {words}")
SEALED = VisibilityMode("sealed", "nothing", keeps_out=True)
PLAINLY = VisibilityMode("plainly", "encoding")
SHOWN = {
    REDACTED: "I have # red kites and ## blue cups. I shall keep # of them.",
    BRIEF: "I have 3 red kites and 12 blue cups.",
    PLAINLY: PLAN,
}


def saying(engine: Engine, words: str) -> Sampling:
    """Says just this."""
    return Sampling(forced_token_ids=tuple(engine.model.encode(f" {words}")))


def pair(engine: Engine, rule: Any, *, policy: Policy | None = None, **options: Any) -> ChoreoGraph:
    """ann, who has orders and plans aloud, then bob, who sees her by a rule."""
    graph = ChoreoGraph(system="Root.", policy=policy)
    graph.add_node(Agent("ann", system="Hide what you have.", confidential=True, sampling=saying(engine, PLAN)))
    graph.add_node(Agent("bob", system="Listen.", sampling=saying(engine, "Well."), **options))
    return graph.add_edge(START, "ann").add_edge("ann", "bob", visibility=rule)


class Listening(BaseCallbackHandler):
    """Notes what each agent was shown, and which texts it attended to, while these are there."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shown: list[list[str]] = []
        self.attended: dict[str, list[tuple[str, str]]] = {}
        """By reader, the author and text of all that reached it as an encoding."""

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.shown += [[str(message.text) for message in given] for given in messages]

    def on_llm_end(self, response: Any, **_: Any) -> None:
        [[generation]] = response.generations
        noted = generation.message.response_metadata["choreo"]
        made = MessageHandle(id=noted["handle"], model=noted["model"], length=noted["length"])
        [lineage] = self.engine.inspect.audit([made]).messages
        self.attended[noted["author"]] = [
            (author, self.engine.text(each.handle))
            for each in lineage.ancestors
            if "encoding" in each.channels or self.engine.method != "choreo"
            for author in each.authors
        ]

    def texts(self, reader: str, source: str = "ann") -> list[str]:
        """What a reader attended to of a source."""
        return [text for author, text in self.attended[reader] if author == source]


def run(graph: ChoreoGraph, engine: Engine, **options: Any) -> tuple[dict[str, Any], Listening]:
    listening, config = Listening(engine), {"choreo": RunOptions(**options)}
    app = graph.compile(engine=engine)
    return app.invoke(QUESTION, {"callbacks": [listening], "configurable": config}), listening


@pytest.mark.parametrize("mode", SHOWN, ids=repr)
def test_its_reader_gets_what_it_makes_of_the_words(engine: Engine, mode: VisibilityMode) -> None:
    state, heard = run(pair(engine, mode), engine, trace_confidential=True)
    [text] = heard.texts("bob")
    assert text == engine.chat.header("ann").text + f" {SHOWN[mode]}{engine.chat.turn_end}"
    read = ["Root.", "Listen.", "Ann has 3 kites.", SHOWN[mode]]
    assert heard.shown[-1] == read, "what is traced is what was shown"
    assert [message.text for message in state["messages"]][1:] == [PLAN, "Well."], "who said it said it so"


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_it_is_the_same_under_every_method(make_engine: Any, method: str) -> None:
    engine = make_engine(method=method)
    _, heard = run(pair(engine, REDACTED), engine)
    assert SHOWN[REDACTED] in heard.texts("bob")[0]


def spelled(engine: Engine, spelling: str) -> ChoreoGraph:
    reads: dict[str, Any] = {
        "on the node": {"ann": REDACTED},
        "as a rule": {"ann": VisibilityRule(REDACTED, history=1)},
    }
    graph = pair(engine, REDACTED if spelling == "on the edge" else {}, reads=reads.get(spelling))
    if spelling == "without control flow":
        graph.set_visibility("ann", "bob", REDACTED)
    if spelling == "in a dict":
        graph.add_edge("ann", "bob", visibility={"ann": REDACTED})
    return graph.with_rule("ann", "bob", REDACTED) if spelling == "afterwards" else graph


@pytest.mark.parametrize(
    "spelling", ["on the edge", "in a dict", "on the node", "as a rule", "without control flow", "afterwards"]
)
def test_it_stands_wherever_a_mode_is_declared(engine: Engine, spelling: str) -> None:
    graph = spelled(engine, spelling)
    assert graph.visibility_table()["bob"]["ann"].mode == REDACTED
    _, heard = run(graph, engine)
    assert [SHOWN[REDACTED] in text for text in heard.texts("bob")] == [True]


def test_its_scope_says_what_the_words_are_encoded_in(engine: Engine) -> None:
    for scope, sees_orders in ((["ann.system"], True), ("public", False)):
        graph = pair(engine, VisibilityRule(REDACTED, scope=scope))
        _, heard = run(graph, engine)
        assert [SHOWN[REDACTED] in text for text in heard.texts("bob")] == [True]
        assert bool(heard.texts("bob", "ann.system")) == sees_orders
        assert ("ann.system" in graph.audit().reached("bob", "encoding")) == sees_orders


@pytest.mark.parametrize("rule", [REDACTED, BRIEF, "reencoded"], ids=repr)
def test_the_audit_tells_of_what_is_encoded_again(engine: Engine, rule: Any) -> None:
    """Of her orders only words get there; of her plan, in whatever words, a fresh encoding."""
    app = pair(engine, rule).compile(engine=engine)
    for report in (app.audit(), app.audit(app.invoke(QUESTION))):
        assert report.reached("bob", "encoding") == {"ann"}
        assert report.reached("bob", "words") == {"ann", "ann.system"}


def test_the_audit_tells_of_what_is_handed_on(engine: Engine) -> None:
    app = pair(engine, PLAINLY).compile(engine=engine)
    for report in (app.audit(), app.audit(app.invoke(QUESTION))):
        assert report.reached("bob", "encoding") == {"ann", "ann.system"} and not report.reached("bob", "words")
    [plan] = [found for found in app.audit().findings if (found.context, found.reader) == ("ann.system", "bob")]
    assert plan.walk() == "ann.system -> ann =plainly=> bob" and plan.cut == (("ann", "bob"),)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            Policy(confidential={"ann": {"ann"}}),
            "'ann' from 'bob', but an encoding.*ann =redacted=> bob. The edge itself",
        ),
        (
            Policy(confidential={"ann.system": {"ann"}}, channels={"words"}),
            "text derived from it.*Remove the visibility of 'ann' to 'bob'",
        ),
    ],
    ids=["encoding", "words"],
)
def test_a_policy_refuses_it(engine: Engine, policy: Policy, says: str) -> None:
    with pytest.raises(VisibilityError, match=says):
        pair(engine, REDACTED, policy=policy).compile(engine=engine)


def test_a_policy_lets_pass_what_it_keeps_back(engine: Engine) -> None:
    orders = Policy(confidential={"ann.system": {"ann"}})
    pair(engine, REDACTED, policy=orders).compile(engine=engine).invoke(QUESTION)
    with pytest.raises(
        VisibilityError, match=r"ann =plainly=> bob. Set the visibility of 'ann' to 'bob' to 'reencoded'"
    ):
        pair(engine, PLAINLY, policy=orders).compile(engine=engine)


def test_a_policy_may_reencode_what_it_hands_on(engine: Engine) -> None:
    orders = Policy(confidential={"ann.system": {"ann"}}, on_violation="reencode")
    app = pair(engine, PLAINLY, policy=orders).compile(engine=engine)
    assert [(hop.source, hop.reader, hop.by) for hop in app.audit().changed] == [("ann", "bob", "reencoded")]
    assert "ann.system" not in app.audit(app.invoke(QUESTION)).reached("bob", "encoding")


def test_what_it_keeps_out_is_promised_through_everybody(engine: Engine) -> None:
    graph = pair(engine, "shared")
    graph.add_node(Agent("carl")).add_edge("bob", "carl").set_visibility("ann", "carl", SEALED)
    with pytest.raises(VisibilityError, match=r"'ann' is declared private to 'carl'.*ann =shared=> bob =shared=> carl"):
        graph.compile(engine=engine)
    _, heard = run(graph.with_rule("bob", "carl", "reencoded"), engine)
    assert heard.texts("carl", "bob") and not heard.texts("carl", "ann")


def test_a_drawing_shows_it(engine: Engine) -> None:
    app = pair(engine, VisibilityRule(BRIEF, history="last")).compile(engine=engine)
    drawn = app.get_graph().draw_mermaid().replace("&nbsp;", "")
    assert "ann -- first sentence, last --> bob" in drawn
    table = app.builder.visibility_table()
    assert {source: rule.words() for source, rule in table["bob"].items()} == {"ann": "first sentence, last"}


def branching(engine: Engine, rule: Any, how: str = "") -> ChoreoGraph:
    """ann, then bob, who is sent some of what she said."""
    graph = pair(engine, {})
    graph.edges -= {("ann", "bob")}
    graph.set_visibility("ann", "bob", rule)

    def route(state: ChoreoState) -> list[Send]:
        [said] = [entry for entry in state["handles"] if entry["author"] == "ann"]
        if how:
            return [send("bob", state, **{how: [said]})]
        return [Send("bob", {"handles": state["handles"]})]

    return graph.add_conditional_edges("ann", route, ["bob"], visibility={})


def test_a_send_hands_on_what_it_shows_and_no_more(engine: Engine) -> None:
    _, heard = run(branching(engine, REDACTED, "reencoded"), engine)
    assert [SHOWN[REDACTED] in text for text in heard.texts("bob")] == [True]
    with pytest.raises(VisibilityError, match="as 'shared', but it may see redacted of it"):
        run(branching(engine, REDACTED, "shared"), engine)
    for how, orders in (("shared", True), ("reencoded", False)):
        _, heard = run(branching(engine, PLAINLY, how), engine)
        assert [PLAN in text for text in heard.texts("bob")] == [True]
        assert bool(heard.texts("bob", "ann.system")) == orders


def test_words_that_were_not_sent_are_not_shown_as_they_were(engine: Engine) -> None:
    """A plain Send of handles alone: there is nothing to make other words of."""
    with pytest.raises(VisibilityError, match=r"'ann' is to be transformed .redacted., but only its handle was sent"):
        run(branching(engine, REDACTED), engine)


def test_input_may_be_re_worded_too(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    graph.add_node(Agent("ann", sampling=saying(engine, PLAN))).add_edge(START, "ann", visibility=REDACTED)
    _, heard = run(graph, engine)
    assert heard.texts("ann", START) == [engine.chat.turn("user", "Ann has # kites.").text]
