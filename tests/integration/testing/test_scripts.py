"""Agents that say what they are told: the words are the script's, all else is the engine's own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    Command,
    Decode,
    Engine,
    MessageHandle,
    Policy,
    Prefill,
    Sampling,
    Schema,
    Synthesizer,
    Worker,
)
from choreo_agents.errors import (
    AdapterError,
    ContextLengthError,
    ForeignHandleError,
    InvalidRequestError,
    KVBudgetError,
    ReleasedHandleError,
    RequestTimeoutError,
    ScriptError,
    UnknownHandleError,
    VisibilityError,
)
from choreo_agents.models import LoadedModel
from choreo_agents.testing import PromptMessage, Script

ASK = {"messages": [("user", "What does Bob have?")]}
ODD = "Grüße, 世界 👋🏽!\n\n\tdef f(x):  return x['a'] <|end|> % 1\u00a0000 …and a verylongwordwithoutanyspaces"


def pair(**options: Any) -> ChoreoGraph:
    """A scout with notes, and a captain who hears it."""
    graph = ChoreoGraph(system="Agents agree.")
    graph.add_node(Agent("scout", system="Notes: Bob has 5 blue boats.", **options)).add_node(Agent("captain"))
    graph.add_edge(START, "scout").add_edge("scout", "captain").add_edge("captain", END)
    return graph


def words(state: dict[str, Any]) -> list[str]:
    """What agents have said, in order."""
    return [message.text for message in state["messages"] if message.type == "ai"]


def test_each_agent_says_its_lines_and_its_calls_tell_what_it_saw(make_engine: MakeEngine) -> None:
    script = Script({"scout": [ODD], "captain": lambda call: f"I heard {call.messages[-1].text!r}."})
    engine = make_engine(script.model)
    state = pair().compile(engine=engine).invoke(ASK)
    assert words(state) == [ODD, f"I heard {'scout: ' + ODD!r}."]
    scout, captain = script.calls
    assert (scout.agent, scout.number, scout.header, scout.said) == ("scout", 0, "scout:", ODD)
    assert scout.messages == (
        PromptMessage("public root", "Agents agree."),
        PromptMessage("scout.system", "Notes: Bob has 5 blue boats."),
        PromptMessage("__start__", "What does Bob have?"),
    )
    assert captain.text == f"Agents agree.\nWhat does Bob have?\nscout: {ODD}"
    assert captain.sampling.max_tokens == 2048 and not script.unsaid


def test_a_private_edge_leaves_nothing_to_see(make_engine: MakeEngine) -> None:
    script = Script({"scout": "A secret.", "captain": lambda call: str("secret" in call.text)})
    graph = ChoreoGraph(system="Root.").add_node(Agent("scout")).add_node(Agent("captain"))
    graph.add_edge(START, "scout").add_edge("scout", "captain", visibility="private")
    assert words(graph.compile(engine=make_engine(script.model)).invoke(ASK)) == ["A secret.", "False"]


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_each_method_counts_as_it_does_with_any_model(make_engine: MakeEngine, method: Any) -> None:
    engine = make_engine(Script(default="Yes.").model, method=method)
    root = engine.prefill("<s>One two three.")
    first, second = (engine.decode("<|assistant|>", [root]) for _ in range(2))
    assert engine.text(first) == "<|assistant|> Yes.<|end|>" and engine.tokens(first) == engine.tokens(second)
    usage = engine.usage(second)
    prompt = len(engine.tokens(root)) + 1
    ends = 3 if method == "choreo" else 2  # text needs no encoding of the last token that was sampled
    assert usage.prompt_tokens == prompt + ends and usage.ttft_s is not None
    found = {"choreo": prompt - 1, "baseline": prompt - 1, "naive": 0}[method]
    assert usage.tokens_reused == found
    assert engine.stats().kv_bytes_read > 0


def test_who_has_no_lines_is_refused_before_anything_is_done(make_engine: MakeEngine) -> None:
    script = Script({"scout": ["One."]})
    engine = make_engine(script.model)
    app = pair().compile(engine=engine)
    with pytest.raises(ScriptError, match="no lines for 'captain', only for 'scout'"):
        app.invoke(ASK)
    with pytest.raises(ScriptError, match=r"has used all .* lines of the script.* after 'Agents agree\."):
        app.invoke(ASK)
    messages = engine.stats().messages
    with pytest.raises(ScriptError, match="no lines for None"):
        engine.decode("<|assistant|>")
    assert engine.stats().messages == messages and [call.said for call in script.calls] == ["One."]


def test_a_batch_with_one_refused_call_does_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(Script({"ann": ["One."]}).model)
    with pytest.raises(ScriptError):
        engine.decode([Decode("<|assistant|>", author="ann"), Decode("<|assistant|>", author="bob")])
    stats = engine.stats()
    assert (stats.messages, stats.leases, stats.steps, stats.unfinished) == (0, 0, 0, 0)


def test_calls_that_go_no_further_use_up_no_line(make_engine: MakeEngine) -> None:
    """Refused with others of their batch, asked for more than there are, or given up before a word."""
    script = Script({"ann": ["One.", "Two."]})
    engine = make_engine(script.model)
    with pytest.raises(ScriptError):
        engine.decode([Decode("<|assistant|>", author="ann"), Decode("<|assistant|>", author="bob")])
    with pytest.raises(ScriptError):
        engine.decode([Decode("<|assistant|>", author="ann", sampling=Sampling(n=3))])
    with pytest.raises(RequestTimeoutError):
        engine.decode("<|assistant|>", author="ann", timeout_s=0)
    assert script.unsaid == {"ann": 2} and script.calls == ()
    said = [engine.text(engine.decode("<|assistant|>", author="ann"), special=False) for _ in range(2)]
    assert said == [" One.", " Two."] and script.unsaid == {} and [call.number for call in script.calls] == [0, 1]


def test_lines_that_are_left_are_told(make_engine: MakeEngine) -> None:
    script = Script({"scout": ["One.", "Two.", "Three."], "captain": "Always.", "nobody": ["Never."]})
    pair().compile(engine=make_engine(script.model)).invoke(ASK)
    assert script.unsaid == {"scout": 2, "nobody": 1}


@pytest.mark.parametrize("lines", [5, ["One.", None], {"One."}])
def test_lines_that_are_no_text_are_refused(lines: Any) -> None:
    with pytest.raises(ScriptError, match="lines of 'scout' must be text"):
        Script({"scout": lines})


def test_the_default_is_one_line() -> None:
    with pytest.raises(ScriptError, match="used for many calls"):
        Script(default=["One.", "Two."])  # type: ignore[arg-type]


def test_what_utf8_cannot_write_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ScriptError, match="UTF-8"):
        make_engine(Script(default="\ud800").model).decode("<|assistant|>")


def test_a_function_must_give_text_and_its_errors_are_its_callers(make_engine: MakeEngine) -> None:
    engine = make_engine(Script({"a": lambda call: None, "b": lambda call: 1 / 0}).model)  # type: ignore[arg-type, return-value]
    with pytest.raises(ScriptError, match="must return text, not None"):
        engine.decode("<|assistant|>", author="a")
    with pytest.raises(ZeroDivisionError):
        engine.decode("<|assistant|>", author="b")


def test_the_default_is_for_all_others_and_subgraphs_may_be_named_in_full(make_engine: MakeEngine) -> None:
    team = ChoreoGraph(system="Team.").add_node(Agent("judge")).add_edge(START, "judge")
    engine = make_engine(Script({"team|judge": "In full.", "other": "Never."}, default="Default.").model)
    graph = ChoreoGraph(system="Root.").add_node("team", team.compile(engine=engine)).add_node(Agent("scout"))
    graph.add_edge(START, "team").add_edge("team", "scout")
    assert words(graph.compile(engine=engine).invoke(ASK)) == ["In full.", "Default."]
    engine = make_engine(Script({"judge": "In part."}).model)
    graph = ChoreoGraph(system="Root.").add_node("team", team.compile(engine=engine)).add_edge(START, "team")
    assert words(graph.compile(engine=engine).invoke(ASK)) == ["In part."]


def test_answers_are_those_that_are_allowed(make_engine: MakeEngine) -> None:
    engine = make_engine(Script({"judge": ["Bob", "Bob Marley", "Nobody."]}).model)
    graph = ChoreoGraph(system="Root.").add_node(Agent("judge", choices=["Bob", "Bob Marley"])).add_edge(START, "judge")
    app = graph.compile(engine=engine)
    assert [words(app.invoke(ASK)) for _ in range(2)] == [["Bob"], ["Bob Marley"]]
    with pytest.raises(ScriptError, match=r"'judge' cannot say 'Nobody.' .* such as 'Bob'"):
        app.invoke(ASK)


def test_a_lead_comes_before_the_answer(make_engine: MakeEngine) -> None:
    lines = ["Hm, well. I vote for B.", "I vote for A.", "B.", "I vote for me. I vote for A."]
    engine = make_engine(Script({"voter": lines}).model)
    voter = Agent("voter", choices=["A.", "B."], answer_prefix="I vote for")
    app = ChoreoGraph(system="Root.").add_node(voter).add_edge(START, "voter").compile(engine=engine)
    assert [words(app.invoke(ASK))[0] for _ in range(2)] == lines[:2]
    with pytest.raises(ScriptError, match=r"behind 'I vote for', such as 'I vote for A\.'"):
        app.invoke(ASK)
    with pytest.raises(ScriptError):
        ChoreoGraph(system="Root.").add_node(voter).add_edge(START, "voter").compile(
            engine=make_engine(Script({"voter": lines[3]}).model)
        ).invoke(ASK)


def test_max_tokens_stop_texts_and_stop_tokens_end_a_message(make_engine: MakeEngine) -> None:
    engine = make_engine(Script(default="One, two, three, four.").model)
    comma = engine.model.encode(",")[0]

    def said(**sampling: Any) -> str:
        handle = engine.decode("<|assistant|>", sampling=Sampling(**sampling), turn_suffix="<|end|>")
        return engine.text(handle, special=False)

    assert said() == " One, two, three, four."
    assert said(max_tokens=3) == " One, two"
    assert said(stop=("two,", "four")) == " One, two,"
    assert said(stop_tokens=(comma,)) == " One,"
    assert said(stop_tokens=(), max_tokens=50) == " One, two, three, four."
    assert said(stop_tokens=(comma + 1,), max_tokens=9) == " One, two, three, four."


def test_samplings_that_choose_otherwise_change_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(Script(default="So it is.").model)
    hot = Sampling(temperature=2.0, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=3.0, seed=1, logprobs=2)
    handle = engine.decode("<|assistant|>", sampling=hot)
    assert engine.text(handle, special=False) == " So it is."
    assert all(each.logprob == 0.0 and each.top == ((each.token, 0.0),) for each in engine.logprobs(handle))


def test_several_answers_are_several_lines(make_engine: MakeEngine) -> None:
    script = Script({"thinker": ["One.", "Two.", "Three."]})
    graph = ChoreoGraph(system="Root.").add_node(Worker("thinker", n=3)).add_edge(START, "thinker")
    state = graph.compile(engine=make_engine(script.model)).invoke(ASK)
    assert sorted(words(state)) == ["One.", "Three.", "Two."]
    engine = make_engine(Script({"ann": ["One.", "Two."]}).model)
    handles = engine.decode([Decode("<|assistant|>", author="ann", sampling=Sampling(n=2))])
    assert [engine.text(handle, special=False) for handle in handles] == [" One.", " Two."]


def test_forced_tokens_are_said_and_use_up_no_line(make_engine: MakeEngine) -> None:
    script = Script({"ann": ["One."]})
    engine = make_engine(script.model)
    forced = Sampling(forced_token_ids=tuple(engine.model.encode(" Two.")), logprobs=0)
    assert engine.text(engine.decode("<|assistant|>", author="ann", sampling=forced), special=False) == " Two."
    assert engine.text(engine.decode("<|assistant|>", author="ann"), special=False) == " One."
    assert [(call.number, call.said) for call in script.calls] == [(0, " Two."), (0, "One.")]


def test_what_can_never_work_is_refused_as_with_any_model(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    engine = make_engine(Script(default="Yes.", context=40).model)
    other, foreign = make_engine(Script(default="Yes.").model), make_engine(embedded)
    root = engine.prefill("<s>Root.")
    with pytest.raises(ContextLengthError, match="the model's context ends at 40"):
        engine.decode("<|assistant|>", [root], sampling=Sampling(max_tokens=40))
    with pytest.raises(InvalidRequestError, match="the header is empty"):
        engine.decode("")
    with pytest.raises(UnknownHandleError):
        engine.decode("<|assistant|>", [other.prefill("Elsewhere.")])
    with pytest.raises(ForeignHandleError):
        engine.decode("<|assistant|>", [foreign.prefill("Ann has 3 red kites.")])
    engine.release(root)
    with pytest.raises(ReleasedHandleError):
        engine.text(root)
    small = make_engine(
        Script(default="Yes.").model, kv_budget_bytes=64 * engine.model.adapter.geometry.bytes_per_token
    )
    with pytest.raises(KVBudgetError, match="has 64 in all"):
        small.decode("<|assistant|>", sampling=Sampling(max_tokens=64))
    with pytest.raises(RequestTimeoutError):
        other.decode("<|assistant|>", timeout_s=0)


def test_there_is_nothing_to_adapt(make_engine: MakeEngine, tmp_path: Path) -> None:
    script = Script(default="Yes.")
    with pytest.raises(AdapterError, match="a script has no weights"):
        make_engine(script.model).load_adapter(tmp_path)
    with pytest.raises(AdapterError, match="a script has no weights"):
        script.load("embedded", adapter=tmp_path)
    with pytest.raises(AdapterError, match="adapter 'mine' is not loaded"):
        make_engine(script.model).decode("<|assistant|>", adapter="mine")


def test_visibility_is_checked_and_audited(make_engine: MakeEngine) -> None:
    engine = make_engine(Script(default="Yes.").model)
    with pytest.raises(VisibilityError):
        pair().with_policy(Policy(confidential={"scout.system": {"scout"}})).compile(engine=engine)
    app = pair().compile(engine=engine)
    findings = app.audit(app.invoke(ASK)).findings
    assert [(each.context, each.reader, each.channel) for each in findings] == [("scout.system", "captain", "encoding")]


async def test_words_stream_as_tokens_messages_and_costs(make_engine: MakeEngine) -> None:
    engine = make_engine(Script({"scout": ODD, "captain": "Heard."}).model)
    chunks: dict[str, str] = {}
    costs: list[dict[str, Any]] = []
    async for mode, item in pair().compile(engine=engine).astream(ASK, stream_mode=["messages", "custom"]):
        if mode == "custom":
            costs.append(item)
        else:
            node = item[1]["langgraph_node"]
            chunks[node] = chunks.get(node, "") + item[0].text
    assert {node: text.strip() for node, text in chunks.items()} == {"scout": ODD, "captain": "Heard."}
    assert [(cost["agent"], cost["words"]) for cost in costs] == [("scout", ODD), ("captain", "Heard.")]
    assert costs[1]["tokens_reused"] > 0
    *tokens, handle = engine.stream("<|assistant|>", author="scout")
    assert isinstance(handle, MessageHandle) and len(tokens) > 20
    assert "".join(token.text for token in tokens) == f" {ODD}"  # type: ignore[union-attr]


def test_workers_say_what_becomes_of_their_instructions(make_engine: MakeEngine) -> None:
    script = Script({"reader": lambda call: f"Read {call.messages[-1].text}", "editor": ["Done."]})
    reader = Worker("reader")
    graph = ChoreoGraph(system="Root.").add_node(reader).add_node(Synthesizer("editor", merges=["reader"]))
    graph.add_conditional_edges(START, lambda state: [reader.send(state, f"part {i}.") for i in range(3)], ["reader"])
    graph.add_edge("reader", "editor")
    state = graph.compile(engine=make_engine(script.model)).invoke(ASK)
    assert words(state) == ["Read part 0.", "Read part 1.", "Read part 2.", "Done."]
    heard = [message.text for message in script.calls[-1].messages if message.author == "reader"]
    assert heard == ["reader: Read part 0.", "reader: Read part 1.", "reader: Read part 2."]


@pytest.mark.parametrize("strategy", ["sequential", "parallel", "text", "summary"])
def test_branches_are_merged(make_engine: MakeEngine, strategy: Any) -> None:
    script = Script({"ann": "Ann's part.", "bob": "Bob's part.", "editor": lambda call: call.text})
    graph = ChoreoGraph(system="Root.").add_node(Agent("ann")).add_node(Agent("bob"))
    graph.add_node(Synthesizer("editor", merges=["ann", "bob"], strategy=strategy))
    graph.add_edge(START, "ann").add_edge(START, "bob").add_edge(["ann", "bob"], "editor")
    engine = make_engine(script.model)
    *_, merged = words(graph.compile(engine=engine).invoke(ASK))
    assert "Ann's part." in merged and "Bob's part." in merged
    branches = [engine.prefill("<|assistant|> ann: One.<|end|>"), engine.prefill("<|assistant|> bob: Two.<|end|>")]
    by_hand = engine.branches.merge(branches, "And?", strategy="sequential", author="editor")
    assert engine.text(by_hand, special=False).endswith("And?")


def test_modules_of_schemas_are_seen(make_engine: MakeEngine) -> None:
    schema = Schema.from_text(
        '<schema name="team"><module name="bags"><system>Notes: Ann has 7 green bags.</system></module></schema>'
    )
    script = Script({"scout": lambda call: str("7 green bags" in call.text)})
    graph = ChoreoGraph().add_node(Agent("scout", prompt=schema.prompt("<bags/>"))).add_edge(START, "scout")
    assert words(graph.compile(engine=make_engine(script.model)).invoke(ASK)) == ["True"]


def test_a_node_that_runs_again_finds_its_answer(make_engine: MakeEngine) -> None:
    script = Script({"scout": ["One."], "captain": ["Two."]})
    engine = make_engine(script.model)
    scout = Agent("scout", engine=engine)

    def asks(state: Any, config: RunnableConfig) -> Any:
        said = scout.invoke(state, config)
        interrupt("Go on?")
        return said

    graph = ChoreoGraph(system="Root.").add_node("scout", asks).add_node(Agent("captain"))
    graph.add_edge(START, "scout").add_edge("scout", "captain")
    app = graph.compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "1"}}
    app.invoke(ASK, config)
    state = app.invoke(Command(resume="yes"), config)
    assert words(state) == ["One.", "Two."] and not script.unsaid


def test_checkpoints_are_resumed_by_another_engine(make_engine: MakeEngine) -> None:
    script = Script({"scout": ["One."], "captain": lambda call: call.messages[-1].text})
    saver, config = InMemorySaver(), {"configurable": {"thread_id": "1"}}
    pair().compile(saver, engine=make_engine(script.model), interrupt_before=["captain"]).invoke(ASK, config)
    state = pair().compile(saver, engine=make_engine(script.model)).invoke(None, config)
    assert words(state) == ["One.", "scout: One."]


def test_tenants_find_nothing_of_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine(Script(default="Yes.").model)
    ann, bob = engine.tenant("ann"), engine.tenant("bob")
    root = ann.prefill("<s>Root.")
    with pytest.raises(UnknownHandleError):
        bob.decode("<|assistant|>", [root])
    assert bob.prefill("<s>Root.").id != root.id
    assert ann.text(ann.decode("<|assistant|>", [root]), special=False) == " Yes."


def test_what_memory_has_lost_comes_back(make_engine: MakeEngine) -> None:
    engine = make_engine(Script({"ann": lambda call: call.text}).model)
    root = engine.prefill("<s>Root. And more.")
    before = engine.kv.read(root)
    assert len(before.values.unique()) == len({*engine.tokens(root)}), "what is stored of a token tells it apart"
    engine.admin.restart()  # type: ignore[union-attr]
    assert engine.text(engine.decode("<|assistant|>", [root], author="ann"), special=False) == " Root. And more."
    assert engine.stats().tokens_recomputed == root.length
    after = engine.kv.read(root)
    assert torch.equal(before.keys, after.keys) and torch.equal(before.values, after.values)


async def test_threads_and_event_loops_share_a_script(make_engine: MakeEngine) -> None:
    script = Script({"ann": [f"{i}." for i in range(20)]})
    one, other = make_engine(script.model), make_engine(script.model)
    call = Decode("<|assistant|>", author="ann")
    handles = await asyncio.gather(
        *(engine.adecode([call]) for engine in (one, other) for _ in range(5)),
        *(asyncio.to_thread(engine.decode, [call]) for engine in (one, other) for _ in range(5)),
    )
    engines = [*[one] * 5, *[other] * 5] * 2
    said = [engine.text(handle, special=False) for engine, [handle] in zip(engines, handles, strict=True)]
    assert sorted(said) == sorted(f" {i}." for i in range(20)) and not script.unsaid


def test_lazy_prefills_are_read(make_engine: MakeEngine) -> None:
    engine = make_engine(Script({"ann": lambda call: call.text}).model)
    [late] = engine.prefill([Prefill("<s>Later.", lazy=True)])
    assert engine.text(engine.decode("<|assistant|>", [late], author="ann"), special=False) == " Later."


def test_code_that_loads_an_engine_itself_is_given_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", Script(default="Yes.").load)
    with Engine.load("some/large-model", device="cuda", prepacked=False, method="baseline") as engine:
        assert engine.method == "baseline" and engine.model.name == "scripted"
        assert engine.text(engine.decode("<|assistant|>"), special=False) == " Yes."


def test_it_needs_no_transformers_and_no_pytest() -> None:
    loads = (
        "import sys, choreo_agents.testing.conformance; from choreo_agents.testing import Script\n"
        "engine = Script(default='Yes.').load()\n"
        "assert engine.text(engine.decode('<|assistant|>')) == '<|assistant|> Yes.<|end|>'\n"
        "print({'transformers', 'peft', 'pytest'} & {*sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def thinkers(**ann: Any) -> ChoreoGraph:
    graph = ChoreoGraph(system="Agents agree.")
    graph.add_node(Agent("ann", **({"thinking": True} | ann))).add_node(Agent("bob"))
    return graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", END)


def test_agents_think_what_the_script_says_before_their_words() -> None:
    script = Script({"ann": "<think>Two and three.</think>Five.", "bob": lambda call: f"I heard {call.text[-5:]}"})
    with script.load() as engine:
        app = thinkers().compile(engine=engine)
        state = app.invoke({"messages": [("user", "How many?")]})
        _, ann, bob = state["messages"]
        kinds = [(block["type"], block.get("reasoning", block.get("text"))) for block in ann.content_blocks]
        assert kinds == [("reasoning", "Two and three."), ("text", "Five.")]
        assert bob.content == "I heard Five."
        [thought] = [MessageHandle.model_validate(e["thoughts"]) for e in state["handles"] if "thoughts" in e]
        assert "Two and three." in engine.text(thought)
        assert ("ann.thoughts", "bob", "words") in {(f.context, f.reader, f.channel) for f in app.audit(state).findings}
        chunks = [c for c, _ in app.stream({"messages": [("user", "How many?")]}, stream_mode="messages")]
        assert any(isinstance(c.content, list) and c.content and c.content[0]["type"] == "reasoning" for c in chunks)
        engine.check()
    said, heard = script.calls[:2]
    assert (said.thought, said.said, heard.thought) == ("Two and three.", "Five.", "")
    assert "Two" not in heard.text, "nobody hears thoughts"


@pytest.mark.parametrize("line", ["Five.", "<think></think>Five.", "<think>Two and three, as ever.</think> Five."])
@pytest.mark.parametrize("thinking", [False, None, True, 1, 3])
@pytest.mark.parametrize("choices", [None, ["Five.", "Six."]])
def test_a_line_serves_whoever_thinks_and_for_however_long(line: str, thinking: Any, choices: Any) -> None:
    script = Script({"ann": [line], "bob": "Yes."})
    with script.load() as engine:
        state = (
            thinkers(thinking=thinking, choices=choices)
            .compile(engine=engine)
            .invoke({"messages": [("user", "How many?")]})
        )
        _, ann, _ = state["messages"]
        assert ann.text == "Five." and not script.unsaid
        found = [block["reasoning"] for block in ann.content_blocks if block["type"] == "reasoning"]
        whole = "Two and three, as ever." if "Two" in line and thinking else ""
        assert whole.startswith("".join(found)) and bool(found) is bool(whole)
        assert found == [whole] or thinking is not True or not whole
        engine.check()


@pytest.mark.parametrize("choice", ["auto", "required", "find"])
def test_a_call_is_written_in_one_way_whether_or_not_it_has_to_be_made(choice: str) -> None:
    def find(thing: str) -> str:
        """Find a thing."""
        return thing

    call = '<tool_call>{"name": "find", "arguments": {"thing": "kites"}}</tool_call>'
    graph = ChoreoGraph().add_node(Agent("ann", tools=[find], tool_choice=choice)).add_edge(START, "ann")
    with Script({"ann": call}).load() as engine:
        [made] = graph.compile(engine=engine).invoke({"messages": "Find kites."})["messages"][-1].tool_calls
    assert (made["name"], made["args"]) == ("find", {"thing": "kites"})
