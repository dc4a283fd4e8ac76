"""Two models in one graph: what one has said is words to the other, and encoded by it once."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import MakeEngine
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from support.chatty import save_chatty
from support.two_models import ASKED, SHORT, WORDS, chain, entry_of, models_of, saying, seen_by, speaker

from choreo_agents import END, START, ChoreoGraph, Engine, Policy, Send, Synthesizer, send
from choreo_agents.errors import (
    ForeignHandleError,
    InvalidRequestError,
    LineageWarning,
    ProvenanceWarning,
    UnknownHandleError,
    VisibilityWarning,
)
from choreo_agents.graph.signer import Signer
from choreo_agents.graph.state import handles_of
from choreo_agents.models import LoadedModel, load_model


class Pair(NamedTuple):
    small: Engine
    large: Engine

    @property
    def named(self) -> dict[str, Engine]:
        return {"small": self.small, "large": self.large}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_chatty(tmp_path_factory.mktemp("chatty")))


@pytest.fixture
def pair(make_engine: MakeEngine, chatty: LoadedModel) -> Pair:
    return Pair(make_engine(), make_engine(chatty))


def test_a_reader_on_another_model_sees_what_it_would_see_on_one(pair: Pair) -> None:
    names = ["ann", "bob", "carl"]
    engines = {"ann": "small", "bob": "large", "carl": "small"}
    graph = chain([speaker(name, engines[name], system=f"You are {name}.") for name in names])
    by_name = {name: pair.named[engines[name]] for name in names}
    state = graph.compile(engine=pair.named).invoke(ASKED, saying(by_name))
    assert [message.text for message in state["messages"][1:]] == list(WORDS.values())
    for name in names:
        engine = by_name[name]
        alone = chain([speaker(each, engine, system=f"You are {each}.") for each in names]).compile()
        expected = alone.invoke(ASKED, saying(dict.fromkeys(names, engine)))
        assert seen_by(engine, state, name) == seen_by(engine, expected, name)


@pytest.mark.parametrize("mode", ["shared", "reencoded"])
async def test_words_are_encoded_once_for_all_readers_of_a_model(pair: Pair, mode: Any) -> None:
    graph = ChoreoGraph(system="Agents read their notes.")
    graph.add_node(speaker("ann", "small")).add_edge(START, "ann")
    for name in ("bob", "carl", "dora"):
        graph.add_node(speaker(name, "large", system=f"You are {name}."))
        graph.add_edge({"bob": "ann", "carl": "bob", "dora": "carl"}[name], name, visibility={})
        graph.set_visibility("ann", name, mode)
    by_name = {"ann": pair.small} | dict.fromkeys(("bob", "carl", "dora"), pair.large)
    words = {**WORDS, "dora": "Dora has 5 old books."}
    app = graph.compile(engine=pair.named)
    costs: dict[str, int] = {}
    async for item in app.astream(ASKED, saying(by_name, words), stream_mode="custom"):
        costs[item["agent"]] = item["tokens_of_other_models"]
    chat = pair.large.chat
    length = len(pair.large.model.encode(chat.turn("assistant", WORDS["ann"], "ann")))
    # A fresh encoding in each reader's view costs what it costs on one model: nothing is encoded beside it.
    expected = length if mode == "shared" else 0
    assert costs == {"ann": 0, "bob": expected, "carl": 0, "dora": 0}
    assert pair.large.stats().tokens_of_other_models == expected
    assert pair.small.stats().tokens_of_other_models == 0


def test_an_entry_keeps_what_each_model_has_of_it(pair: Pair) -> None:
    models = {name: engine.model.adapter.fingerprint for name, engine in pair.named.items()}
    graph = ChoreoGraph()
    for name, engine in (("ann", "small"), ("bob", "large"), ("carl", "small")):
        graph.add_node(speaker(name, engine))
    graph.add_edge(START, "ann").add_edge(START, "bob").add_edge(["ann", "bob"], "carl").add_edge("carl", END)
    engines = {"ann": pair.small, "bob": pair.large, "carl": pair.small}
    state = graph.compile(engine=pair.named).invoke(ASKED, saying(engines))
    assert len(state["handles"]) == 4
    question, *said = state["handles"]
    assert models_of([question]) == [set(models.values())], "both encoded it side by side"
    assert question["signature"].keys() == {
        "entry",
        question["handle"]["id"],
        *(h["id"] for h in question["handles_by_model"].values()),
    }
    by_author = dict(zip([each["author"] for each in said], models_of(said), strict=True))
    assert by_author == {
        "ann": {models["small"]},
        "bob": set(models.values()),
        "carl": {models["small"]},
    }
    [copy] = entry_of(state, "bob")["handles_by_model"].values()
    assert entry_of(state, "bob")["handle"]["model"] == models["large"]
    assert copy["model"] == models["small"]


def test_the_next_turn_encodes_nothing_again(pair: Pair) -> None:
    graph = chain([speaker("ann", "small", prompt="Speak."), speaker("bob", "large", prompt="Speak.")])
    engines = {"ann": pair.small, "bob": pair.large}
    app = graph.compile(InMemorySaver(), engine=pair.named)
    app.invoke(ASKED, saying(engines, thread_id="1"))
    again = {"ann": "Ann has 7 green kites.", "bob": "Bob has 9 red cups."}
    costs = {
        item["agent"]: item for item in app.stream(ASKED, saying(engines, again, thread_id="1"), stream_mode="custom")
    }
    new = len(pair.large.model.encode(pair.large.chat.turn("assistant", again["ann"], "ann")))
    assert costs["bob"]["tokens_of_other_models"] == new, "of the second message of hers, and not of the first"
    assert costs["ann"]["tokens_of_other_models"] == 0, "who does not see him"


def test_strict_keeps_the_error(pair: Pair) -> None:
    graph = chain([speaker("ann", "small"), speaker("bob", "large")])
    engines = {"ann": pair.small, "bob": pair.large}
    with pytest.raises(ForeignHandleError, match=r"'bob' runs on .* set its visibility to 'reencoded'"):
        graph.compile(engine=pair.named, strict=True).invoke(ASKED, saying(engines))
    words = chain([speaker("ann", "small"), speaker("bob", "large")], visibility="reencoded")
    state = words.compile(engine=pair.named, strict=True).invoke(ASKED, saying(engines))
    assert "red kites" in seen_by(pair.large, state, "bob"), "words were asked for"


def test_what_a_reader_may_not_see_its_model_never_gets(pair: Pair) -> None:
    graph = ChoreoGraph()
    graph.add_node(speaker("ann", "small", system="A secret.")).add_node(speaker("bob", "large"))
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility="private")
    app = graph.compile(engine=pair.named)
    state = app.invoke(ASKED, saying({"ann": pair.small, "bob": pair.large}))
    assert models_of([entry_of(state, "ann")]) == [{pair.small.model.adapter.fingerprint}]
    with pair.large._core.lock:
        held = [pair.large.model.decode(list(each.tokens)) for each in pair.large._core.table.messages()]
    assert held and not any("kites" in text or "secret" in text for text in held)


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (("small", "huge"), ("small", "large"), r"'bob' runs on engine 'huge', but the graph has 'small', 'large'"),
        (("small", None), ("small", "large"), r"'bob' names no engine.*engine='small'"),
        (("small", None), (), r"'ann' runs on engine 'small', but the graph has no named engines"),
        (("small", "twin"), ("small", "twin"), "several engines of one model"),
    ],
)
def test_engines_are_named(pair: Pair, make_engine: MakeEngine, names: Any, given: Any, message: str) -> None:
    known = {**pair.named, "twin": make_engine()}
    engine: Any = {name: known[name] for name in given} or pair.small
    graph = chain([speaker("ann", names[0]), speaker("bob", names[1])])
    with pytest.raises(InvalidRequestError, match=message):
        graph.compile(engine=engine)


@pytest.mark.parametrize("inner", [False, True])
def test_one_model_has_one_engine_whoever_brings_it(pair: Pair, make_engine: MakeEngine, inner: bool) -> None:
    """Two would replace each other's handles in turn, and an audit asks one of them about both's."""
    twin, graph = make_engine(), chain([speaker("ann", "small")])
    if inner:
        graph.add_node("team", chain([speaker("bob", None)]).compile(engine=twin))  # type: ignore[arg-type]
    else:
        graph.add_node(speaker("bob", twin))
    graph.add_edge("ann", "bob" if not inner else "team")
    with pytest.raises(InvalidRequestError, match="several engines of one model"):
        graph.compile(engine=pair.named)


def test_one_engine_may_have_many_names_and_one_name_needs_no_choice(pair: Pair) -> None:
    graph = chain([speaker("ann", "quick"), speaker("bob", "thorough")])
    app = graph.compile(engine={"quick": pair.small, "thorough": pair.small})
    state = app.invoke(ASKED, saying({"ann": pair.small, "bob": pair.small}))
    assert all("handles_by_model" not in entry for entry in state["handles"])
    alone = chain([speaker("ann", None)])  # type: ignore[arg-type]
    assert alone.compile(engine={"only": pair.small}).invoke(ASKED, saying({"ann": pair.small}))["handles"]


def test_an_agent_of_a_stock_graph_brings_its_engine_itself() -> None:
    with pytest.raises(InvalidRequestError, match="instead of the name 'small'"):
        speaker("ann", "small").invoke(ASKED)


@pytest.mark.parametrize("saver", ["memory", "sqlite"])
def test_a_thread_goes_on_on_another_model(
    make_engine: MakeEngine, tiny_path: Path, tmp_path: Path, saver: str
) -> None:
    """A changed dtype is another model: what was said is encoded again, once, and who said what stays as it was."""
    before, after = make_engine(salt="s"), make_engine(load_model(tiny_path, dtype=torch.bfloat16), salt="s")
    with ExitStack() as stack:
        path = str(tmp_path / "threads.sqlite")
        kept = InMemorySaver() if saver == "memory" else stack.enter_context(SqliteSaver.from_conn_string(path))

        def turn(engine: Engine, words: dict[str, str] = WORDS) -> Any:
            graph = chain([speaker("ann", None, prompt="Speak."), speaker("bob", None, system="Be brief.")])  # type: ignore[arg-type]
            app = graph.compile(kept, engine=engine)
            return app.invoke(ASKED, saying(dict.fromkeys(words, engine), words, thread_id="1"))

        first = turn(before)
        with pytest.warns(LineageWarning, match=r"of 'ann' \(it was made by another model, which is not served here\)"):
            second = turn(after)
        old, new = (engine.model.adapter.fingerprint for engine in (before, after))
        assert old != new
        assert [entry["author"] for entry in second["handles"]] == ["__start__", "ann", "bob"] * 2
        assert models_of(second["handles"]) == [{old, new}] * 3 + [{new}] * 3
        # What ann and bob had said, once each: input is nobody's speech.
        said = [entry["handles_by_model"][new]["length"] for entry in second["handles"][1:3]]
        assert after.stats().tokens_of_other_models == sum(said)
        assert seen_by(after, second, "bob").count("red kites") == 2
        # Back on the model of before, which knows what it had encoded.
        third = turn(before)
        assert third["handles"][:3] == second["handles"][:3]
        assert models_of(third["handles"]) == [{old, new}] * 6 + [{old}] * 3
        assert [entry["author"] for entry in third["handles"]] == ["__start__", "ann", "bob"] * 3
        assert first["handles"][1]["handle"] == third["handles"][1]["handle"]


def test_a_persona_may_speak_through_two_models(pair: Pair) -> None:
    """All that it said and was asked is its own on both; on each model it is encoded once."""
    thinks = [
        speaker(name, engine, persona="ann", prompt=f"Now {name}.", assistant_prefix=f"{name}:", system="You are Ann.")
        for name, engine in (("plan", "small"), ("act", "large"), ("check", "large"))
    ]
    engines = {"plan": pair.small, "act": pair.large, "check": pair.large}
    words = dict(zip(engines, WORDS.values(), strict=True))
    graph = ChoreoGraph()
    for at, agent in enumerate(thinks):
        graph.add_node(agent).add_edge(thinks[at - 1].name if at else START, agent.name, visibility={})
    costs = {}
    for mode, item in graph.compile(engine=pair.named).stream(
        ASKED, saying(engines, words), stream_mode=["custom", "values"]
    ):
        if mode == "values":
            state = item
        else:
            costs[item["agent"]] = item
    alone = graph.compile(engine={"small": pair.large, "large": pair.large})
    expected = alone.invoke(ASKED, saying(dict.fromkeys(engines, pair.large), words))
    for name in ("act", "check"):
        assert seen_by(pair.large, state, name) == seen_by(pair.large, expected, name)
    assert "Now plan." in seen_by(pair.large, state, "check")
    assert costs["act"]["tokens_of_other_models"] > 0 == costs["check"]["tokens_of_other_models"]
    # What it was asked on the other model is found again, too: new is what it said in between, and its own turn.
    large = pair.large.model
    own = sum(len(large.encode(large.chat.turn("user", f"Now {name}."))) for name in ("check",))
    assert costs["check"]["tokens_encoded"] == own + entry_of(state, "check")["handle"]["length"]


def test_nothing_but_words_goes_from_model_to_model(pair: Pair) -> None:
    """What ann is told reaches the encodings of her own model's readers; on the other side words alone go on."""
    graph = ChoreoGraph()
    graph.add_node(speaker("ann", "small", system="Ann's notes.")).add_node(speaker("bob", "large"))
    graph.add_node(speaker("carl", "small")).add_node(speaker("dora", "small"))
    graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "carl").add_edge("carl", "dora")
    graph.set_visibility("ann", "dora")
    app = graph.compile(engine=pair.named)
    engines = {"ann": pair.small, "bob": pair.large, "carl": pair.small, "dora": pair.small}
    state = app.invoke(ASKED, saying(engines, {**WORDS, "dora": "Dora has 5 old books."}))
    for report in (app.audit(), app.audit(state)):
        assert report.reached("bob", "encoding") == report.reached("carl", "encoding") == set()
        assert report.reached("bob", "words") == report.reached("carl", "words") == {"ann.system"}
        assert report.reached("dora", "encoding") == {"ann.system"}
    paths = {finding.reader: finding.walk() for finding in app.audit().findings if finding.channel == "words"}
    assert paths["bob"] == "ann.system -> ann =shared across models=> bob"
    blocked = {(each.reader, each.earlier, each.later) for each in app.audit().blocked}
    assert ("bob", "__start__", "ann") in blocked, "her words are encoded alone"
    # The same on one model: her notes are in the encodings that bob reads.
    alone = graph.compile(engine=dict.fromkeys(pair.named, pair.small))
    assert alone.audit().reached("bob", "encoding") == {"ann.system"}


def test_what_a_persona_was_asked_goes_on_in_what_it_says_on_its_other_model(pair: Pair) -> None:
    plan = speaker("plan", "small", persona="ann", prompt="Now plan.")
    graph = ChoreoGraph().add_node(plan).add_node(speaker("act", "large", persona="ann"))
    graph.add_node(speaker("bob", "large")).add_edge(START, "plan").add_edge("plan", "act", visibility={})
    app = graph.add_edge("act", "bob", visibility="shared").compile(engine=pair.named)
    engines = {"plan": pair.small, "act": pair.large, "bob": pair.large}
    state = app.invoke(ASKED, saying(engines, dict(zip(engines, WORDS.values(), strict=True))))
    for report in (app.audit(), app.audit(state)):
        assert report.reached("bob", "encoding") == {"ann.system"}


def test_a_promise_about_words_is_kept_across_models(pair: Pair) -> None:
    """Which encodings cannot break, words can: the other engine is asked what they were made of."""
    engines = {"ann": pair.small, "bob": pair.large, "carl": pair.small}
    graph = ChoreoGraph(policy=Policy(confidential={"ann.system": frozenset({"bob"})}, on_violation="warn"))
    graph.add_node(speaker("ann", "small", system="Ann's notes."))
    graph.add_node(speaker("bob", "large")).add_node(speaker("carl", "small"))
    graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "carl")
    graph.compile(engine=pair.named).invoke(ASKED, saying(engines))  # nobody has forbidden words
    words = Policy(confidential={"ann.system": frozenset({"bob"})}, channels=frozenset({"words"}), on_violation="warn")
    with pytest.warns(VisibilityWarning, match="text derived from it would reach it"):
        app = graph.with_policy(words).compile(engine=pair.named)
    with pytest.warns(VisibilityWarning, match="the text of 'bob' may be derived from it"):
        app.invoke(ASKED, saying(engines))


def test_the_audit_says_what_no_engine_can_tell(pair: Pair) -> None:
    graph = chain([speaker("ann", "small", system="Notes."), speaker("bob", "large")])
    app = graph.compile(engine=pair.named)
    state = app.invoke(ASKED, saying({"ann": pair.small, "bob": pair.large}))
    report = app.audit(state, engine=pair.large)
    model = pair.small.model.adapter.fingerprint
    assert report.outside == (f"what reached 1 messages of model {model!r}, which no engine here runs",)


def _rounds(pair: Pair, **options: Any) -> Any:
    return chain([speaker("ann", "small"), speaker("bob", "large")]).compile(engine=pair.named, **options)


@pytest.mark.parametrize("salts", [("", ""), ("s", ""), ("", "s"), ("s", "s")])
def test_one_key_seals_a_conversation(make_engine: MakeEngine, chatty: LoadedModel, salts: tuple[str, str]) -> None:
    """Whoever serves a node: all that was said is known for what it is."""
    pair = Pair(make_engine(salt=salts[0]), make_engine(chatty, salt=salts[1]))
    engines, kept = {"ann": pair.small, "bob": pair.large}, InMemorySaver()
    config = saying(engines, thread_id="1")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProvenanceWarning)
        _rounds(pair, checkpointer=kept).invoke(ASKED, config)
        state = _rounds(pair, checkpointer=kept).invoke(ASKED, config)
    assert [entry["author"] for entry in state["handles"]] == ["__start__", "ann", "bob"] * 2
    assert not any("unverified_author" in entry for entry in state["handles"])
    if salts == ("s", "s"):
        # In another process, whose graph names its engines in another order.
        others = Pair(make_engine(salt="s"), make_engine(chatty, salt="s"))
        turned = chain([speaker("ann", "small"), speaker("bob", "large")])
        app = turned.compile(kept, engine={"large": others.large, "small": others.small})
        state = app.invoke(ASKED, saying({"ann": others.small, "bob": others.large}, thread_id="1"))
        assert [entry["author"] for entry in state["handles"]] == ["__start__", "ann", "bob"] * 3


def test_engines_of_two_tenants_serve_no_graph(make_engine: MakeEngine, chatty: LoadedModel) -> None:
    pair = Pair(make_engine(salt="one"), make_engine(chatty, salt="other"))
    with pytest.raises(InvalidRequestError, match="different salts, but a graph runs for one tenant"):
        _rounds(pair)


def test_a_client_cannot_put_an_encoding_in_anothers_place(pair: Pair) -> None:
    """What was not sealed for these words is no encoding of them; the rest of the entry stands."""
    engines = {"ann": pair.small, "bob": pair.large}
    app = _rounds(pair, checkpointer=InMemorySaver())
    config = saying(engines, thread_id="1")
    state = app.invoke(ASKED, config)
    small, large = (engine.model.adapter.fingerprint for engine in pair)
    question, ann, bob = state["handles"]
    forged = {**ann, "handles_by_model": {large: bob["handle"]}}
    signature = {**question["signature"], **ann["signature"]}
    swapped = {**ann, "handles_by_model": {large: question["handles_by_model"][large]}, "signature": signature}
    signer = Signer(pair.small.lineage.seals, [app.name, "1"])
    assert signer.proven(forged) == {**forged, "handles_by_model": {}} and signer.proven(swapped) == {
        **swapped,
        "handles_by_model": {},
    }
    assert signer.proven(ann) == ann and ann["handles_by_model"].keys() == {large}
    assert signer.proven({**ann, "handle": bob["handle"]}) is None, "the speaker's own"
    app.update_state(config, {"handles": [forged]}, as_node="bob")
    state = app.invoke({"messages": [("user", "And now?")]}, config)
    assert "kites" in seen_by(pair.large, state, "bob")
    assert models_of([state["handles"][1]]) == [{small, large}]
    assert bob["handle"]["id"] not in {each.id for each in handles_of(state["handles"][1])}


async def test_each_tenant_has_its_own_words_on_every_model(make_engine: MakeEngine, chatty: LoadedModel) -> None:
    pair = Pair(make_engine(), make_engine(chatty))
    app = _rounds(pair, tenant=lambda config: config["configurable"]["who"])
    engines = {"ann": pair.small, "bob": pair.large}
    states = {who: await app.ainvoke(ASKED, saying(engines, who=who)) for who in ("one", "other")}
    tokens = set()
    for who, state in states.items():
        own = {name: engine.tenant(who) for name, engine in pair.named.items()}
        assert "kites" in seen_by(own["large"], state, "bob")
        report = app.audit(state, engine=own)
        assert report.outside == ()
        tokens.add(own["large"].stats().tokens_of_other_models)
        # Neither finds what the other has encoded.
        with pytest.raises(UnknownHandleError):
            seen_by(pair.large.tenant({"one": "other", "other": "one"}[who]), state, "bob")
    assert len(tokens) == 1 and tokens.pop() > 0


@pytest.mark.parametrize("strategy", ["sequential", "parallel", "text", "summary"])
async def test_branches_of_another_model_are_merged_from_their_words(pair: Pair, strategy: Any) -> None:
    graph = ChoreoGraph(system="Agents read their notes.")
    for name, engine in (("ann", "small"), ("bob", "large"), ("carl", "small")):
        graph.add_node(speaker(name, engine)).add_edge(START, name).add_edge(name, "judge", visibility={})
    judge = Synthesizer("judge", merges=["ann", "bob", "carl"], strategy=strategy, engine="large", sampling=SHORT)
    graph.add_node(judge).add_edge("judge", END)
    engines = {"ann": pair.small, "bob": pair.large, "carl": pair.small, "judge": pair.large}
    words = {**WORDS, "judge": "All have things."}
    state = await graph.compile(engine=pair.named).ainvoke(ASKED, saying(engines, words))
    seen = seen_by(pair.large, state, "judge")
    if strategy != "summary":
        assert [name for name in WORDS if WORDS[name] in seen] == list(WORDS)
    expected = (
        0
        if strategy == "text"
        else sum(
            len(pair.large.model.encode(pair.large.chat.turn("assistant", WORDS[name], name)))
            for name in ("ann", "carl")
        )
    )
    assert pair.large.stats().tokens_of_other_models == expected


def test_branches_are_placed_also_if_their_model_never_read_the_input(pair: Pair) -> None:
    graph = ChoreoGraph(system="Agents read their notes.")
    graph.add_node(speaker("ann", "small")).add_edge(START, "ann")
    for name in ("bob", "carl"):
        graph.add_node(speaker(name, "large")).add_edge("ann", name).set_visibility(START, name, "private")
    graph.add_node(Synthesizer("judge", merges=["bob", "carl"], strategy="parallel", engine="large", sampling=SHORT))
    graph.add_edge(["bob", "carl"], "judge").set_visibility(START, "judge", "private").add_edge("judge", END)
    state = graph.compile(engine=pair.named).invoke(ASKED)
    assert models_of(state["handles"][:1]) == [{pair.small.model.adapter.fingerprint}]
    assert entry_of(state, "judge")


def test_an_edited_message_is_edited_on_every_model(pair: Pair) -> None:
    engines = {"ann": pair.small, "bob": pair.large}
    app = _rounds(pair, checkpointer=InMemorySaver())
    config = saying(engines, thread_id="1")
    state = app.invoke(ASKED, config)
    [ann] = [message for message in state["messages"] if message.name == "ann"]
    edited = ann.model_copy(update={"content": "Ann has 9 white boats."})
    fork = app.update_state(config, {"messages": [edited]}, as_node="ann")
    again = app.invoke(None, saying(engines, thread_id="1", checkpoint_id=fork["configurable"]["checkpoint_id"]))
    seen = seen_by(pair.large, again, "bob")
    assert "white boats" in seen and "kites" not in seen
    [entry] = [entry for entry in again["handles"] if entry["message_id"] == ann.id]
    assert entry["author"] == "ann" and entry["edited"]
    assert set(entry["earlier"]) >= {each.id for each in handles_of(entry_of(state, "ann"))}
    # Whose words these were before is known on the other model.
    assert app.audit(again).outside == ()


def test_a_subgraph_may_run_on_another_model(pair: Pair) -> None:
    team = chain([speaker("bob", None)]).compile(engine=pair.large, name="team")  # type: ignore[arg-type]
    graph = ChoreoGraph(system="Agents read their notes.")
    graph.add_node(speaker("ann", None)).add_node("team", team)  # type: ignore[arg-type]
    graph.add_node(speaker("carl", None))  # type: ignore[arg-type]
    graph.add_edge(START, "ann").add_edge("ann", "team").add_edge("team", "carl").add_edge("carl", END)
    engines = {"ann": pair.small, "bob": pair.large, "carl": pair.small}
    app = graph.compile(engine=pair.small)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProvenanceWarning)
        state = app.invoke(ASKED, saying(engines))
    assert [entry["author"] for entry in state["handles"]] == ["__start__", "ann", "team|bob", "carl"]
    assert "blue cups" in seen_by(pair.small, state, "carl")
    assert app.audit(state).outside == ()


def test_scopes_of_all_engines_give_back_all_that_a_run_took(pair: Pair) -> None:
    engines = {"ann": pair.small, "bob": pair.large}
    with pair.small.scope(), pair.large.scope():
        _rounds(pair).invoke(ASKED, saying(engines))
        assert pair.small.stats().leases and pair.large.stats().leases
    assert pair.small.stats().leases == pair.large.stats().leases == 0


def test_a_handle_without_its_words_is_nothing_to_another_model(pair: Pair) -> None:
    graph = ChoreoGraph()
    graph.add_node(speaker("ann", "small")).add_node(speaker("bob", "large"))
    graph.add_edge(START, "ann").set_visibility("ann", "bob")
    graph.add_conditional_edges("ann", lambda state: [Send("bob", {"handles": state["handles"]})], ["bob"])
    app = graph.compile(engine=pair.named)
    with pytest.raises(ForeignHandleError, match="its text is not in the graph's state"):
        app.invoke(ASKED, saying({"ann": pair.small, "bob": pair.large}))


def test_a_branch_is_sent_what_another_model_has_said(pair: Pair) -> None:
    """Whichever handle names it, and only in the mode that it was sent in."""
    graph = ChoreoGraph()
    graph.add_node(speaker("ann", "small")).add_node(speaker("bob", "large")).add_node(speaker("carl", "large"))
    graph.add_edge(START, "ann").set_visibility("ann", "bob").set_visibility("ann", "carl").add_edge(
        "bob", "carl", visibility={}
    )

    def route(state: Any) -> Any:
        return [send("bob", state, reencoded=[next(handles_of(entry_of(state, "ann")))])]

    graph.add_conditional_edges("ann", route, ["bob"], visibility="shared")
    engines = {"ann": pair.small, "bob": pair.large, "carl": pair.large}
    state = graph.compile(engine=pair.named).invoke(ASKED, saying(engines))
    assert "kites" in seen_by(pair.large, state, "bob") and "kites" in seen_by(pair.large, state, "carl")
    ann = entry_of(state, "ann")
    assert "select" not in ann and models_of([ann]) == [{e.model.adapter.fingerprint for e in pair}]
