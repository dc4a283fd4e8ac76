"""Agents that are told by modules of a schema: encoded once for all of them, seen by nobody else, and audited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import MakeEngine
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from support.graphs import QUESTION, agent
from support.visible_graphs import Forced, heard

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    HandleEntry,
    Memory,
    MessageHandle,
    Policy,
    Prompt,
    RunOptions,
    Sampling,
    Scheduling,
    Schema,
    SchemaLibrary,
    Synthesizer,
    VisibilityRule,
    Worker,
)
from choreo_agents.errors import ContextLengthError, InvalidRequestError, PMLError, VisibilityError
from choreo_agents.graph.signer import Signer
from choreo_agents.graph.view.imported_prompt import ImportedPrompt
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.step_trace import StepTrace

SCHEMA = """
<schema name="trip">
  You plan.
  <module name="plan">
    Plan <parameter name="days" length="4"/> days.
    <union>
      <module name="miami">Go to Miami.</module>
      <module name="paris">Go to Paris.</module>
    </union>
  </module>
  <module name="now" cache="false">It is late.</module>
  <module name="budget" confidential="true">
    Spend {money} dollars. <module name="limit">Stop at {money}.</module>
  </module>
  <module name="tools">Look it up.</module>
  <module name="diary">Write <parameter name="words" length="6"/></module>
</schema>
"""
MODULES, TOLD = "<plan><miami/></plan><tools/>", "<plan days='3'><miami/></plan><tools/><system>Be brief.</system>"
SHARING = Sampling(max_tokens=6, stop_tokens=())


def schema(money: int = 5) -> Schema:
    return Schema.from_text(SCHEMA.format(money=money))


def prompt(text: str = MODULES, money: int = 5) -> Prompt:
    return schema(money).prompt(text)


def one(name: str = "ann", told: Any = None, public: str | None = "Root.", **options: Any) -> ChoreoGraph:
    """A graph of one agent."""
    graph = ChoreoGraph(system=public)
    graph.add_node(agent(name, prompt=told or prompt(), **options))
    graph.add_edge(START, name)
    return graph


def pair(told: Prompt, rule: Any = "shared", policy: Policy | None = None, public: str | None = "Root.") -> ChoreoGraph:
    """ann is told by modules; bob, who is told nothing, reads her."""
    graph = ChoreoGraph(system=public, policy=policy)
    graph.add_node(agent("ann", prompt=told))
    graph.add_node(agent("bob", system="Bob has 7 blue cups."))
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility=rule)
    return graph


def handle_of(state: dict[str, Any], author: str) -> MessageHandle:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return MessageHandle.model_validate(entry["handle"])


def seen(engine: Engine, state: dict[str, Any], author: str = "ann") -> list[str]:
    """The texts of an agent's view, in order."""
    records = {each.handle: each for each in engine.inspect.records([handle_of(state, author)])}
    tokens = [records[parent].tokens for parent in records[handle_of(state, author)].parents]
    texts = [engine.model.decode(list(each)).replace("<|end|>", "").strip() for each in tokens]
    return [text for text in texts if text]


def ancestors(engine: Engine, state: dict[str, Any], author: str) -> set[str]:
    [lineage] = engine.inspect.audit([handle_of(state, author)]).messages
    return {name for ancestor in lineage.through("encoding") for name in ancestor.authors}


def encoded(engine: Engine, app: Any, given: Any = QUESTION, config: Any = None) -> tuple[int, dict[str, Any]]:
    before = engine.stats().tokens_encoded
    state = app.invoke(given, config)
    return engine.stats().tokens_encoded - before, state


def module_tokens(engine: Engine, author: str = "trip") -> int:
    """Tokens of the schema's messages that are leased, whoever leases them."""
    found = engine.kv.memory_map().authors.items()
    return sum(sum(each.tokens.values()) for name, each in found if name.startswith(author))


# --- where it stands, and what it costs ---


def test_modules_stand_where_a_system_prompt_does_each_at_its_place(engine: Engine) -> None:
    state = one(told=prompt(TOLD)).compile(engine=engine).invoke(QUESTION)
    assert seen(engine, state) == [
        "<s><|system|> Root.",
        "<s>You plan.",
        "Plan",
        "3",
        "days.",
        "Go to Miami.",
        "Look it up.",
        "<|system|> Be brief.",
        "<|user|> What does Ann have?",
    ]


def test_a_root_without_words_is_not_said_twice(engine: Engine) -> None:
    state = one(public=None).compile(engine=engine).invoke(QUESTION)
    assert "".join(seen(engine, state)).count("<s>") == 1
    plain = ChoreoGraph().add_node(agent("bob", system="Bob.")).add_edge(START, "bob").compile(engine=engine)
    assert "".join(seen(engine, plain.invoke(QUESTION), "bob")).count("<s>") == 1


@pytest.mark.parametrize("told", [MODULES, "<plan days='3'><miami/></plan><diary words='kites'/>", "<now/><diary/>"])
def test_a_view_in_a_graph_is_what_the_library_assembles(make_engine: MakeEngine, told: str) -> None:
    """The same tokens at the same places: the same logits as a prompt of the library."""
    forced = Sampling(forced_token_ids=(5, 6, 7), logprobs=5)
    graph = ChoreoGraph().add_node(Agent("ann", prompt=prompt(told), sampling=forced)).add_edge(START, "ann")
    engine = make_engine()
    state = graph.compile(engine=engine).invoke({"messages": []})
    with SchemaLibrary(make_engine()) as library:
        library.register(schema())
        other = library.engine
        options = {"header": other.chat.header("ann").text, "turn_suffix": other.chat.turn_end}
        answer = library.generate(prompt(told), forced, **options)
        for a, b in zip(engine.logprobs(handle_of(state, "ann")), other.logprobs(answer), strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_one_module_is_the_system_prompt_of_the_same_words(engine: Engine) -> None:
    notes = Schema.from_text(
        "<schema name='notes'><module name='kites'><system>Ann has kites.</system></module></schema>"
    )
    views = []
    for options in ({"system": "Ann has kites."}, {"prompt": notes.prompt("<kites/>")}):
        graph = ChoreoGraph().add_node(agent("ann", **options)).add_edge(START, "ann", visibility="shared")
        handle = handle_of(graph.compile(engine=engine).invoke(QUESTION), "ann")
        [record] = [each for each in engine.inspect.records([handle]) if each.handle == handle]
        views.append((record.parents, record.offsets))
    assert views[0] == views[1]


def test_a_second_run_and_a_second_agent_encode_no_module(engine: Engine) -> None:
    app = one(told=prompt(TOLD)).compile(engine=engine)
    first, state = encoded(engine, app)
    again, _ = encoded(engine, app)
    [usage] = [engine.usage(handle_of(state, "ann"))]
    assert again == usage.tokens_encoded < first, "nothing but what it says"
    modules = module_tokens(engine)
    assert modules > 15
    # Nothing in common but modules: another name, another public root, other words.
    cleo = one("cleo", prompt("<plan days='4'><miami/></plan><tools/>"), "Another root.").compile(engine=engine)
    third, state = encoded(engine, cleo)
    assert third == engine.usage(handle_of(state, "cleo")).tokens_encoded
    read = [engine.chat.root("Another root.").text, _asked(engine), " 4"]
    assert third == sum(len(engine.model.encode(text)) for text in read) + handle_of(state, "cleo").length
    assert module_tokens(engine) == modules


def _asked(engine: Engine) -> str:
    return engine.chat.turn("user", QUESTION["messages"][0][1]).text


def test_a_library_of_the_users_has_the_same_modules(engine: Engine) -> None:
    with SchemaLibrary(engine) as library:
        library.register(schema(), encode="eager")
        before = engine.stats().tokens_encoded
        state = one().compile(engine=engine).invoke(QUESTION)
        plain = sum(len(engine.model.encode(text)) for text in (engine.chat.root("Root.").text, _asked(engine)))
        cost = engine.usage(handle_of(state, "ann")).tokens_encoded
        assert engine.stats().tokens_encoded - before == cost
    assert encoded(engine, one().compile(engine=engine))[0] == cost - plain, "and its end is not theirs"


def test_a_scope_ends_leases_of_the_run_and_none_of_the_modules(engine: Engine) -> None:
    app = one(told=prompt(TOLD)).compile(engine=engine)
    for _ in range(2):
        with engine.scope():
            app.invoke(QUESTION)
    assert engine.stats().messages == engine.stats().leases == 6, "the schema's own text, and the pieces of two modules"
    with engine.scope():
        one(told=prompt(TOLD)).compile(engine=engine).invoke(QUESTION)
    assert engine.stats().leases == 6, "all graphs have the same"
    with engine.scope():
        cost, state = encoded(engine, app)
        texts = [engine.chat.root("Root.").text, _asked(engine), " 3", engine.chat.turn("system", "Be brief.").text]
        assert cost == engine.usage(handle_of(state, "ann")).tokens_encoded
        assert cost == handle_of(state, "ann").length + sum(len(engine.model.encode(text)) for text in texts)


def test_runs_give_all_leases_back_but_one_of_each(engine: Engine) -> None:
    app = one(told=prompt(TOLD)).compile(engine=engine)
    leases = []
    for _ in range(3):
        app.invoke(QUESTION)
        leases.append(engine.stats().leases)
    assert leases[1] - leases[0] == leases[2] - leases[1] == leases[0] - 6, (
        "each run has its own, and none of the modules"
    )
    assert {count for each in engine._core.table.messages() for count in each.scoped.values()} == {1}


def test_many_agents_at_once_encode_each_module_once(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    names = [f"agent{number}" for number in range(6)]
    for name in names:
        graph.add_node(agent(name, prompt=prompt()))
        graph.add_edge(START, name)
    app = graph.compile(engine=engine)
    state = asyncio.run(app.ainvoke(QUESTION))
    said = sum(engine.usage(handle_of(state, name)).tokens_encoded for name in names)
    texts = sum(len(engine.model.encode(text)) for text in (engine.chat.root("Root.").text, _asked(engine)))
    answers = sum(handle_of(state, name).length for name in names)
    assert engine.stats().tokens_encoded == said == module_tokens(engine) + texts + answers


def test_a_lease_that_is_cancelled_is_given_back(engine: Engine) -> None:
    one().compile(engine=engine).invoke(QUESTION)
    before, imported = engine.stats().leases, ImportedPrompt(engine, prompt(), None)

    async def cancelled() -> None:
        task = asyncio.create_task(imported.lease())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())  # and its threads have ended
    assert engine.stats().leases == before


def test_a_schema_that_says_something_else_is_another_one(engine: Engine) -> None:
    """A graph is changed and compiled again; the one of before still runs."""
    told = "<budget><limit/></budget>"
    before = one(told=prompt(told)).compile(engine=engine)
    after = one(told=prompt(told, money=9)).compile(engine=engine)
    for app, money in ((before, 5), (after, 9), (before, 5)):
        assert f"Spend {money} dollars." in "".join(seen(engine, app.invoke(QUESTION)))


# --- ways to run ---


@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_text_twins_read_the_assembled_text(make_engine: MakeEngine, method: Any) -> None:
    told = prompt(TOLD)
    engine, twin = make_engine(), make_engine(method=method)
    state, other = (one(told=told).compile(engine=each).invoke(QUESTION) for each in (engine, twin))
    assert seen(twin, other) == seen(engine, state)


def test_it_runs_in_a_stock_graph_and_in_async(engine: Engine) -> None:
    stock = StateGraph(ChoreoState)
    stock.add_node("ann", agent("ann", prompt=prompt(TOLD), engine=engine, shared_system="Root."))
    stock.add_edge(START, "ann")
    app = stock.compile()
    sync = app.invoke(QUESTION)
    later = asyncio.run(app.ainvoke(QUESTION))
    assert seen(engine, sync) == seen(engine, later)
    assert seen(engine, one(told=prompt(TOLD)).compile(engine=engine).invoke(QUESTION)) == seen(engine, sync)


def test_it_goes_on_in_another_engine(make_engine: MakeEngine) -> None:
    graph = pair(prompt(TOLD))
    graph.add_node("cleo", agent("cleo", prompt=prompt(TOLD)))
    graph.add_edge("bob", "cleo")
    saver, thread = InMemorySaver(), {"configurable": {"thread_id": "1"}}
    graph.compile(saver, engine=make_engine(), interrupt_before=["cleo"]).invoke(QUESTION, thread)
    [saved] = list(saver.list(thread, limit=1))
    assert "Miami" not in str(saved.checkpoint) and "trip" not in str(saved.checkpoint)
    engine = make_engine()
    state = graph.compile(saver, engine=engine).invoke(None, thread)
    assert "Go to Miami." in "".join(seen(engine, state, "cleo"))


def test_it_survives_a_restart_and_a_full_pool(make_engine: MakeEngine, tiny: LoadedModel) -> None:
    engine = make_engine()
    app = one(told=prompt(TOLD)).compile(engine=engine)
    before = seen(engine, app.invoke(QUESTION))
    engine.kv.offload()
    assert seen(engine, app.invoke(QUESTION)) == before
    engine.admin.restart()
    assert seen(engine, app.invoke(QUESTION)) == before


def test_tenants_share_no_module(engine: Engine) -> None:
    other = engine.tenant("other")
    first, state = encoded(engine, one().compile(engine=engine))
    second, again = encoded(other, one().compile(engine=other))
    assert first == second and handle_of(state, "ann") != handle_of(again, "ann")
    third, _ = encoded(other, one().compile(engine=engine.tenant("other")))
    assert third < second, "another object of one tenant finds its modules"


def test_a_worker_is_asked_behind_its_modules(engine: Engine) -> None:
    worker = Worker("ann", prompt=prompt(), sampling=SHARING)
    graph = ChoreoGraph(system="Root.").add_node(worker)

    def route(state: Any) -> list[Any]:
        return [worker.send(state, "Do one."), worker.send(state, "Do two.")]

    graph.add_conditional_edges(START, route, ["ann"])
    state = graph.compile(engine=engine).invoke(QUESTION)
    views = []
    for entry in state["handles"]:
        if entry["author"] == "ann":
            views.append(seen(engine, {"handles": [entry]}))
    assert [view[-1] for view in views] == ["<|user|> Do one.", "<|user|> Do two."]
    assert views[0][:-1] == views[1][:-1] and any("Go to Miami." in text for text in views[0])


def test_a_synthesizer_has_modules_too(engine: Engine) -> None:
    graph = ChoreoGraph(system="Root.")
    for name in ("one", "two"):
        graph.add_node(agent(name)).add_edge(START, name)
    graph.add_node(Synthesizer("ann", merges=["one", "two"], strategy="parallel", prompt=prompt(), sampling=SHARING))
    graph.add_edge("one", "ann").add_edge("two", "ann")
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert "Go to Miami." in "".join(seen(engine, state))


# --- who sees it ---


def test_nobody_else_sees_what_an_agent_imports(engine: Engine) -> None:
    state = pair(prompt("<budget/>" + TOLD), "reencoded").compile(engine=engine).invoke(QUESTION)
    assert {"trip/budget", "trip/tools", "trip/plan/miami", "ann.system"} <= ancestors(engine, state, "ann")
    assert ancestors(engine, state, "bob") & {"trip", "trip/budget", "trip/tools", "ann.system"} == set()
    assert "Miami" not in "".join(seen(engine, state, "bob"))


@pytest.mark.parametrize(
    ("told", "contexts"),
    [
        ("<tools/>", set()),
        ("<tools/><system>Be brief.</system>", {"ann.system"}),
        ("<plan days='3'/>", {"ann.system"}),
        ("<budget/>", {"trip/budget"}),
        ("<budget><limit/></budget>", {"trip/budget", "trip/budget/limit"}),
        ("<budget>Hush.</budget>", {"trip/budget", "ann.system"}),
        ("<now/>", set()),
    ],
)
@pytest.mark.parametrize("rule", ["shared", "reencoded"])
def test_the_audits_name_confidential_modules_and_an_agents_own_words(
    engine: Engine, told: str, contexts: set[str], rule: str
) -> None:
    app = pair(prompt(told), rule).compile(engine=engine)
    assert {context.name for context in app.audit().contexts} == contexts | {"bob.system"}
    expected = {(context, "bob", "encoding" if rule == "shared" else "words") for context in contexts}
    for report in (app.audit(), app.audit(app.invoke(QUESTION))):
        assert {(each.context, each.reader, each.channel) for each in report.findings} == expected


def test_a_module_belongs_to_all_who_import_it(engine: Engine) -> None:
    graph = pair(prompt("<budget/>"))
    graph.add_node(agent("cleo", prompt=prompt("<budget/>")))
    graph.add_edge("bob", "cleo")
    app = graph.compile(engine=engine)
    [context] = [context for context in app.audit().contexts if context.kind == "module"]
    assert context.owners == ("ann", "cleo")
    for report in (app.audit(), app.audit(app.invoke(QUESTION))):
        assert {(each.context, each.reader) for each in report.findings if each.context == "trip/budget"} == {
            ("trip/budget", "bob")
        }


def test_the_audit_says_what_others_messages_have_not_seen(engine: Engine) -> None:
    graph = ChoreoGraph().add_node(agent("bob")).add_node(agent("ann", prompt=prompt()))
    graph.add_edge(START, "bob").add_edge("bob", "ann")
    blocked = {(each.reader, each.earlier, each.later) for each in graph.audit().blocked}
    assert ("ann", "trip", "bob") in blocked


def test_a_policy_keeps_a_module(engine: Engine) -> None:
    keep = Policy(confidential={"trip/budget": frozenset({"ann"})})
    with pytest.raises(VisibilityError, match=r"trip/budget.*ann =shared=> bob"):
        pair(prompt("<budget/>"), policy=keep).compile(engine=engine)
    app = pair(prompt("<budget/>"), "reencoded", keep).compile(engine=engine)
    assert app.audit(app.invoke(QUESTION)).reached("bob", "encoding") == set()
    with pytest.raises(VisibilityError, match="'trip/tools' of the policy is not a private context"):
        pair(prompt(), policy=Policy(confidential={"trip/tools": frozenset()})).compile(engine=engine)


def test_a_module_has_one_name_in_all_graphs(engine: Engine) -> None:
    """Inside a subgraph and around it, by both audits and by policies of either."""
    keep = Policy(confidential={"trip/budget": frozenset({"ann"})}, on_violation="warn")
    inner = pair(prompt("<budget/>"), "reencoded", keep, public=None).compile(engine=engine)
    outer = ChoreoGraph()
    outer.add_node("team", inner)
    outer.add_node(agent("closer"))
    outer.add_edge(START, "team").add_edge("team", "closer")
    report = outer.audit()
    assert {
        (each.context, each.reader, each.violation != "") for each in report.findings if each.channel == "encoding"
    } == {
        ("trip/budget", "closer", True),
        ("team|bob.system", "closer", False),
    }
    with pytest.raises(VisibilityError, match="trip/budget"):
        outer.compile(engine=engine)
    app = outer.with_rule("team", "closer", "reencoded").compile(engine=engine)
    found = app.audit(app.invoke(QUESTION)).findings
    assert {(each.context, each.reader, each.channel) for each in found} >= {("trip/budget", "team|bob", "words")}


def test_a_policy_is_kept_at_call_time_inside_a_subgraph(engine: Engine) -> None:
    """What no edge has foreseen: a module's encoding that comes with a message in the state."""
    keep = Policy(confidential={"trip/budget": frozenset({"ann"})})
    inner = ChoreoGraph(policy=keep)
    inner.add_node(agent("ann", prompt=prompt("<budget/>"))).add_node(agent("bob")).add_node(agent("cleo"))
    inner.add_edge(START, "ann").add_edge("ann", "bob", visibility="reencoded").add_edge("bob", "cleo")
    outer = ChoreoGraph().add_node("team", inner.compile(engine=engine)).add_edge(START, "team")
    said = pair(prompt("<budget/>")).compile(engine=engine).invoke(QUESTION)
    entry = next(each for each in said["handles"] if each["author"] == "bob")
    signer = Signer(engine.lineage.seals, ["LangGraph", None])
    moved = signer.sign_entry(HandleEntry(**{**entry, "author": "team|bob", "persona": "team|bob"}))
    given = {**said, "handles": [moved]}
    with pytest.raises(VisibilityError, match="keeps 'trip/budget' from 'cleo'"):
        outer.compile(engine=engine).invoke(given)


@pytest.mark.parametrize(("rule", "reaches"), [("shared", True), ("reencoded", False)])
def test_an_unreachable_module_changes_no_bit_of_a_reader(tiny: LoadedModel, rule: str, reaches: bool) -> None:
    def run(money: int, step_trace: StepTrace) -> tuple[dict[Any, Any], Any]:
        graph = pair(prompt("<budget><limit/></budget>" + TOLD, money), VisibilityRule(rule))  # type: ignore[arg-type]
        for spec in graph.nodes.values():
            speaker: Any = spec.runnable
            speaker.sampling = Sampling(temperature=1.0, max_tokens=3, stop_tokens=(), logprobs=8)
        with Engine.load(
            tiny, memory=Memory(kv_budget_bytes=1 << 23), scheduling=Scheduling(step_trace=step_trace)
        ) as engine:
            app = graph.compile(engine=engine)
            state = app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=5, replay=Forced(1))}})
            return heard(engine, state), app.audit(state)

    assert len(SCHEMA.format(money=5)) == len(SCHEMA.format(money=7))
    step_trace = StepTrace()
    one, report = run(5, step_trace)
    two, _ = run(7, step_trace.replay())
    assert ("trip/budget" in report.reached("bob", "encoding")) == reaches
    assert (one["bob", 2, 0] != two["bob", 2, 0]) == reaches
    assert one["ann", 1, 0] != two["ann", 1, 0], "who imports it"


# --- bad input ---


@pytest.mark.parametrize(
    ("told", "why"),
    [
        pytest.param(schema(), "is a schema, not a prompt", id="schema"),
        pytest.param(5, "must be text", id="number"),
        pytest.param(["Tell.", 5], "must be text", id="list"),
    ],
)
def test_what_is_no_prompt_is_refused(told: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the prompt of 'ann' {why}"):
        Agent("ann", prompt=told)


def test_two_system_prompts_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"schema 'trip' and a system prompt"):
        Agent("ann", prompt=prompt(), system="Ann.")
    with pytest.raises(InvalidRequestError, match=r"schema 'trip' and a system prompt"):
        one().with_system("ann", "Ann.")


def test_a_schema_longer_than_the_context_is_refused_when_the_graph_is_compiled(engine: Engine) -> None:
    long = Schema.from_text(f"<schema name='long'><module name='much'>{'red kites ' * 600}</module></schema>")
    graph = one(told=long.prompt("<much/>"))
    with pytest.raises(PMLError, match=r"schema 'long' takes \d+ positions, but the model's context is 1024"):
        graph.compile(engine=engine)
    with pytest.raises(PMLError, match="schema 'long'"):
        Agent("ann", prompt=long.prompt("<much/>"), engine=engine)
    with pytest.raises(PMLError, match=r"the argument of 'days' has \d+ tokens"):
        one(told=prompt("<plan days='3 red kites and 4 blue boats'/>")).compile(engine=engine)


def test_a_prompt_that_only_the_public_root_makes_too_long_is_refused(engine: Engine) -> None:
    most = Schema.from_text(f"<schema name='most'><module name='much'>{'red kites ' * 500}</module></schema>")
    one(told=most.prompt("<much/>"), public=None).compile(engine=engine)
    with pytest.raises(
        ContextLengthError, match=r"the public root takes \d+ positions and the prompt of schema 'most'"
    ):
        one(told=most.prompt("<much/>"), public="red kites " * 20).compile(engine=engine)


def test_the_end_is_known(engine: Engine) -> None:
    graph = one()
    graph.add_edge("ann", END)
    assert graph.compile(engine=engine).invoke(QUESTION)["messages"][-1].usage_metadata["input_tokens"] > 20
