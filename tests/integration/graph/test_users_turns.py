"""Views as chat templates would show them: default and later instructions, and users' turns that are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from support.templates import TEMPLATES, tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    Command,
    Engine,
    MessageHandle,
    RunOptions,
    Sampling,
    Send,
    VisibilityMode,
    VisibilityRule,
)
from choreo_agents.graph.compiling import texts_of
from choreo_agents.models import LoadedModel, PromptText, load_model
from choreo_agents.pml import Schema, SchemaLibrary

DAY = {"date": "2026-11-23"}
MERGING = ["Gemma 3", "Gemma 2", "Mistral Small 3", "Llama 2"]
Models = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def loaded(family: str) -> LoadedModel:
        tokenizer = tokenizer_for(family)
        folder = tmp_path_factory.mktemp("family")
        save_tiny_llama(folder, tokenizer=tokenizer, vocab_size=len(tokenizer), num_hidden_layers=1)
        return load_model(folder, chat=DAY)

    return loaded


class Says(Mapping[tuple[str, int, int, int], Any]):
    """What everybody says, always the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        return iter(())

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[str, int, int, int]) -> tuple[int, ...]:
        return tuple(self._engine.model.encode(f" {WORDS[key[0]]}"))


WORDS = {"ann": "It is red.", "bob": "It is not.", "eve": "Who knows."}


def run(graph: ChoreoGraph, engine: Engine, state: Mapping[str, Any]) -> Any:
    options = RunOptions(replay=Says(engine))
    return graph.compile(engine=engine).invoke(state, {"configurable": {"choreo": options}})


def chain(public: str | None = None, mode: Any = "reencoded", **bob: Any) -> ChoreoGraph:
    graph = ChoreoGraph(system=public)
    graph.add_node(Agent("ann", system="You are Ann.", thinking=False))
    graph.add_node(Agent("bob", **({"system": "You are Bob.", "thinking": False} | bob)))
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility=mode).add_edge("bob", END)
    return graph


def asked(*words: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(each, id=each) for each in words]}


def seen(engine: Engine, state: Mapping[str, Any], author: str = "bob") -> list[int]:
    """The tokens of all that an author's last message attended to, in order, and of its header."""
    entry = [each for each in state["handles"] if each["author"] == author][-1]
    said = engine._tenant.find(MessageHandle.model_validate(entry["handle"]))
    header = engine.model.encode(engine.chat.header(author))
    assert [*said.tokens[: len(header)]] == header
    return [token for parent in said.parents for token in parent.tokens] + header


def written(engine: Engine, *turns: tuple[str, str], header: str = "bob:") -> list[int]:
    """The tokens of what the template itself writes, and of the name that stands in front of an answer."""
    tokenizer = engine.model.tokenizer
    talk = [{"role": role, "content": words} for role, words in turns]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, date_string="23 Nov 2026")
    blank = " " if engine.chat.assistant.plain.endswith(" ") else ""  # it stands before the words of an answer
    return engine.model.encode(f"{text}{blank}{header}")


def same(engine: Engine, found: list[int], wanted: list[int]) -> None:
    assert engine.model.decode(found) == engine.model.decode(wanted)
    assert found == wanted


def with_instructions(family: str, system: str | None, first: str) -> list[tuple[str, str]]:
    """A system turn and the first user's; one turn where the template takes no system turn."""
    if system is None:
        return [("user", first)]
    return [("user", f"{system}\n\n{first}")] if family == "Gemma 2" else [("system", system), ("user", first)]


@pytest.mark.parametrize("public", [None, "Be brief."])
@pytest.mark.parametrize("family", MERGING)
def test_others_speak_in_one_users_turn(
    models: Models, make_engine: MakeEngine, family: str, public: str | None
) -> None:
    engine = make_engine(model=models(family))
    graph = chain(public)
    state = run(graph, engine, asked("What is it?"))
    told = "What is it?\n\nann: It is red."
    first = with_instructions(family, public, f"You are Bob.\n\n{told}")
    if public is None:
        first = with_instructions(family, "You are Bob.", told)
    same(engine, seen(engine, state), written(engine, *first))
    state = run(graph, engine, {**state, "messages": [*state["messages"], HumanMessage("Really?")]})
    again = [("assistant", "bob: It is not."), ("user", "Really?\n\nann: It is red.")]
    same(engine, seen(engine, state), written(engine, *first, *again))
    mine = with_instructions(
        family, public or "You are Ann.", "You are Ann.\n\nWhat is it?" if public else "What is it?"
    )
    mine += [("assistant", "ann: It is red."), ("user", "Really?")]
    same(engine, seen(engine, state, "ann"), written(engine, *mine, header="ann:"))


@pytest.mark.parametrize("public", [None, "Be brief."])
@pytest.mark.parametrize("family", [family for family in TEMPLATES if family not in MERGING])
def test_elsewhere_all_turns_follow_each_other(
    models: Models, make_engine: MakeEngine, family: str, public: str | None
) -> None:
    engine = make_engine(model=models(family))
    chat, encode = engine.chat, engine.model.encode
    if chat.merges is not None:
        pytest.skip("its users and model take turns")
    state = run(chain(public), engine, asked("What is it?"))
    said = engine.tokens(MessageHandle.model_validate(state["handles"][1]["handle"]))
    wanted = encode(chat.root(public)) + encode(chat.turn("system", "You are Bob.", later=public is not None))
    wanted += encode(chat.turn("user", "What is it?")) + said + encode(chat.header("bob"))
    same(engine, seen(engine, state), wanted)


@pytest.mark.parametrize("family", ["Qwen 2.5", "Mistral Small 3", "Granite 3.3", "Llama 3.1"])
def test_default_instructions_stand_where_nobody_gives_any(
    models: Models, make_engine: MakeEngine, family: str
) -> None:
    engine = make_engine(model=models(family))
    default = engine.model.encode(PromptText.special(engine.chat.default_system))
    assert default

    def is_there(state: Any, author: str) -> bool:
        return engine.model.decode(default) in engine.model.decode(seen(engine, state, author))

    state = run(chain(system=None), engine, asked("What is it?"))
    assert is_there(state, "bob") and not is_there(state, "ann")
    bob = seen(engine, state)
    start = engine.model.encode(engine.chat.bos)
    assert bob[: len(start) + len(default)] == start + default
    assert not is_there(run(chain("Be brief.", system=None), engine, asked("What is it?")), "bob")
    prompt = Schema.from_text('<schema name="rules"><module name="one">Be kind.</module></schema>').prompt("<one/>")
    assert not is_there(run(chain(system=None, prompt=prompt), engine, asked("What is it?")), "bob")
    given = {"messages": [SystemMessage("Be kind."), HumanMessage("What is it?")]}
    state = run(chain(system=None), engine, given)
    assert not is_there(state, "bob"), "instructions may be input"
    first = engine.model.encode(engine.chat.root("Be kind."))
    assert seen(engine, state)[: len(first)] == first
    assert seen(engine, state, "ann")[: len(first)] != first, "where it comes later"


def test_all_agents_share_one_default(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine(model=models("Qwen 2.5"))
    graph = ChoreoGraph()
    for name in ("ann", "bob"):
        graph.add_node(Agent(name)).add_edge(START, name).add_edge(name, END)
    run(graph, engine, asked("What is it?"))
    once = len(engine.model.encode(PromptText.special(engine.chat.default_system)))
    question = len(engine.model.encode(engine.chat.turn("user", "What is it?")))
    own = sum(
        len(engine.model.encode(engine.chat.header(name)) + engine.model.encode(f" {WORDS[name]}"))
        + len(engine.model.encode(engine.chat.turn_end))
        for name in ("ann", "bob")
    )
    assert engine.stats().tokens_encoded == once + question + own


@pytest.mark.parametrize("family", MERGING)
def test_shared_messages_stay_the_models_turns(models: Models, make_engine: MakeEngine, family: str) -> None:
    engine = make_engine(model=models(family))
    state = run(chain("Be brief.", "shared"), engine, asked("What is it?"))
    said = MessageHandle.model_validate(state["handles"][1]["handle"])
    parents = engine._tenant.find(MessageHandle.model_validate(state["handles"][2]["handle"])).parents
    assert said.id in [parent.handle.id for parent in parents]
    first = with_instructions(family, "Be brief.", "You are Bob.\n\nWhat is it?")
    start = written(engine, *first, header="ann:")
    same(engine, seen(engine, state)[: len(start)], start)
    assert said.length == parents[-1].handle.length, "its own turn comes last"


@pytest.mark.parametrize("family", MERGING)
@pytest.mark.parametrize("scope", ["reader", "public", ["ann.system"]])
def test_what_an_agent_is_asked_stands_in_the_users_turn(
    models: Models, make_engine: MakeEngine, family: str, scope: Any
) -> None:
    engine = make_engine(model=models(family))
    state = run(chain(None, VisibilityRule("reencoded", scope=scope), prompt="And you?"), engine, asked("What is it?"))
    told = "What is it?\n\nann: It is red.\n\nAnd you?"
    first = with_instructions(family, "You are Bob.", told)
    same(engine, seen(engine, state), written(engine, *first))
    state = run(
        chain(None, VisibilityRule("reencoded", scope=scope), prompt="And you?"),
        engine,
        {**state, "messages": [*state["messages"], HumanMessage("Really?")]},
    )
    # What it is asked stands before what it said, and its earlier questions stay.
    again = [("assistant", "bob: It is not."), ("user", "Really?\n\nann: It is red.\n\nAnd you?")]
    same(engine, seen(engine, state), written(engine, *first, *again))


def test_a_context_is_a_conversation_of_its_own(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine(model=models("Gemma 3"))
    state = run(chain(None, VisibilityRule("reencoded", scope=["ann.system"])), engine, asked("What is it?"))
    bob = engine._tenant.find(MessageHandle.model_validate(state["handles"][2]["handle"]))
    [copy] = [parent for parent in bob.parents if parent.author == "ann"]
    context = [token for parent in copy.parents for token in parent.tokens]
    assert engine.model.decode([*context, *copy.tokens]) == "<bos><start_of_turn>user\nYou are Ann.\n\nann: It is red."


def test_what_stands_around_users_turns_says_what_it_is(models: Models, make_engine: MakeEngine) -> None:
    """Two of as many tokens in the same place would have one name in every run, whichever came first."""
    engine = make_engine(model=models("Gemma 3"))
    state = run(chain(), engine, asked("What is it?"))
    found = engine.inspect.records([MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]])
    roles = {record.role: engine.model.decode(list(record.tokens)) for record in found if "turn" in str(record.role)}
    assert roles == {
        "opens a user's turn": "<start_of_turn>user\n",
        "goes on with a user's turn": "\n\n",
        "closes a user's turn": "<end_of_turn>\n",
    }


def test_other_words_and_bare_handles_are_parts_as_well(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine(model=models("Gemma 3"))
    state = run(chain(None, VisibilityMode("loud", "words", transform=str.upper)), engine, asked("What is it?"))
    first = with_instructions("Gemma 3", "You are Bob.", "What is it?\n\nann: IT IS RED.")
    same(engine, seen(engine, state), written(engine, *first))
    graph = chain()
    graph.add_node("forget", lambda state: Command(goto=Send("eve", {"handles": state["handles"]})))
    graph.add_node(Agent("eve", reads={"ann": "reencoded", "bob": "reencoded"}))
    graph.add_edge("bob", "forget", visibility={})
    state = run(graph, engine, asked("What is it?"))
    told = "What is it?\n\nann: It is red.\n\nbob: It is not."
    same(engine, seen(engine, state, "eve"), written(engine, ("user", told), header="eve:"))


def test_assistants_turns_of_the_input_stay_the_models(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine(model=models("Mistral Small 3"))
    given = {"messages": [HumanMessage("One?"), AIMessage("Two."), HumanMessage("Three?"), HumanMessage("Four?")]}
    state = run(chain(), engine, given)
    turns = [("system", "You are Ann."), ("user", "One?"), ("assistant", "Two."), ("user", "Three?\n\nFour?")]
    same(engine, seen(engine, state, "ann"), written(engine, *turns, header="ann:"))
    graph = ChoreoGraph().add_node(Agent("eve", system="You are Ann.", reads={START: "reencoded"}))
    graph.add_edge(START, "eve", visibility={}).add_edge("eve", END)
    state = run(graph, engine, given)
    same(engine, seen(engine, state, "eve"), written(engine, *turns, header="eve:"))


def view_of(engine: Engine, state: Mapping[str, Any], author: str) -> list[tuple[str, int]]:
    """What an author's last message attended to, and where; its own start last."""
    entry = [each for each in state["handles"] if each["author"] == author][-1]
    said = engine._tenant.find(MessageHandle.model_validate(entry["handle"]))
    start = said.native_offset
    texts = [engine.model.decode(list(parent.tokens)) for parent in said.parents]
    return [*zip(texts, [start + at for at in said.relative_offsets], strict=True), ("", start)]


def judged(order: tuple[str, ...], **modes: str) -> ChoreoGraph:
    graph = ChoreoGraph(system="Be brief.", positions="parallel")
    for name in ("ann", "bob"):
        graph.add_node(Agent(name)).add_edge(START, name)
    sampling = Sampling(max_tokens=1, logprobs=4, stop_tokens=())
    graph.add_node(Agent("eve", reads={name: modes.get(name, "reencoded") for name in order}, sampling=sampling))
    graph.add_edge(["ann", "bob"], "eve", visibility={})
    return graph


@pytest.mark.parametrize("shared", [(), ("bob",)])
def test_siblings_have_a_users_turn_each(models: Models, make_engine: MakeEngine, shared: tuple[str, ...]) -> None:
    modes, found = dict.fromkeys(shared, "shared"), list[Any]()
    opens, closes = "<start_of_turn>user\n", "<end_of_turn>\n"
    for order in (("ann", "bob"), ("bob", "ann")):
        engine = make_engine(model=models("Gemma 3"))
        state = run(judged(order, **modes), engine, asked("What is it?"))
        view = view_of(engine, state, "eve")
        assert [text for text, _ in view[:3]] == [f"<bos>{opens}Be brief.\n\n", "What is it?", closes]
        at = view[2][1] + len(engine.model.encode(closes))
        told: dict[str, list[tuple[str, int]]] = {
            name: [(opens, at), (f"{name}: {WORDS[name]}", at + 6), (closes, at + 6 + len(f"{name}: {WORDS[name]}"))]
            for name in order
        }
        if shared:
            told["bob"] = [(f"<start_of_turn>model\nbob: {WORDS['bob']}{closes}", at)]
        assert view[3:-1] == [place for name in order for place in told[name]]
        [eve] = [MessageHandle.model_validate(e["handle"]) for e in state["handles"] if e["author"] == "eve"]
        found.append([chosen.top for chosen in engine.logprobs(eve)])
    for one, other in zip(*found, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert all(abs(a - b) <= 1e-4 for (_, a), (_, b) in zip(one, other, strict=True))


@pytest.mark.parametrize("family", MERGING)
@pytest.mark.parametrize("mode", ["shared", "reencoded"])
@pytest.mark.parametrize("public", [None, "Be brief."])
def test_audits_explain_all_that_stands_in_a_view(
    models: Models, make_engine: MakeEngine, family: str, mode: str, public: str | None
) -> None:
    engine = make_engine(model=models(family))
    graph = chain(public, mode, prompt="And you?")
    graph.add_node(Agent("eve", reads={"bob": "shared"})).add_edge("bob", "eve", visibility={})
    app = graph.compile(engine=engine)
    state = run(graph, engine, asked("What is it?"))
    report = app.audit(state)
    found = {(each.context, each.reader, each.channel) for each in report.findings}
    assert found == {(each.context, each.reader, each.channel) for each in app.audit().findings}
    assert ("bob.system", "eve", "encoding") in found
    assert (("ann.system", "bob", "encoding") in found) == (mode == "shared")


@pytest.mark.parametrize("family", MERGING)
@pytest.mark.parametrize("where", ["schema", "module", "prompt", "both"])
def test_what_follows_a_users_turn_of_a_prompt_stands_in_it(
    models: Models, make_engine: MakeEngine, family: str, where: str
) -> None:
    """Whether the schema ends with it, a module that is imported, or the prompt's own words."""
    engine = make_engine(model=models(family))
    turn = "<user>I like it <module name='how'>red.</module></user>"
    text = {"schema": f"{turn}", "module": f"<module name='like'>{turn}</module>", "both": turn}.get(where, "")
    schema = Schema.from_text(f'<schema name="ask">{text}</schema>')
    imports = {"schema": "<how/>", "module": "<like><how/></like>", "both": "<how/>"}.get(where, "")
    prompt = schema.prompt(f"{imports}{'' if where in ('schema', 'module') else '<user>I like it red.</user>'}")
    state = run(chain(system=None, prompt=prompt), engine, asked("What is it?"))
    twice = "I like it red.\n\n" * (2 if where == "both" else 1)
    wanted = written(engine, ("user", f"{twice}What is it?\n\nann: It is red."))
    default = engine.model.encode(PromptText.special(engine.chat.default_system))
    start = len(engine.model.encode(engine.chat.bos))
    wanted = wanted[:start] + wanted[start + len(default) :]  # a schema says what there is to say
    found = seen(engine, state)
    assert engine.model.decode(found) == engine.model.decode(wanted)
    library = SchemaLibrary(engine)
    library.register(schema)
    answer = library.generate(prompt, Sampling(max_tokens=1), author="bob")
    made = engine._tenant.find(answer)
    view = sorted(zip(made.relative_offsets, made.parents, strict=True), key=lambda each: each[0])
    alone = written(engine, ("user", twice.removesuffix("\n\n")))
    alone = alone[:start] + alone[start + len(default) :]
    told = [token for _, parent in view for token in parent.tokens] + engine.model.encode(engine.chat.header("bob"))
    assert engine.model.decode(told) == engine.model.decode(alone)
    library.close()


@pytest.mark.parametrize("family", ["Gemma 3", "Llama 2"])
def test_instructions_and_a_question_of_a_schema_are_one_users_turn(
    models: Models, make_engine: MakeEngine, family: str
) -> None:
    engine = make_engine(model=models(family))
    schema = Schema.from_text('<schema name="ask"><system>Be kind.</system><user>I like it red.</user></schema>')
    library = SchemaLibrary(engine)
    library.register(schema)
    made = engine._tenant.find(library.generate(schema.prompt(""), Sampling(max_tokens=1), author="bob"))
    view = sorted(zip(made.relative_offsets, made.parents, strict=True), key=lambda each: each[0])
    told = [token for _, parent in view for token in parent.tokens] + engine.model.encode(engine.chat.header("bob"))
    wanted = written(engine, ("user", "Be kind.\n\nI like it red."))
    assert engine.model.decode(told) == engine.model.decode(wanted)
    library.close()


@pytest.mark.parametrize("family", MERGING)
@pytest.mark.parametrize("trunk", ["question", "start", "answer"])
@pytest.mark.parametrize("prompt", ["Who is right?", ""])
def test_branches_merged_as_text_are_told_in_one_users_turn(
    models: Models, make_engine: MakeEngine, family: str, trunk: str, prompt: str
) -> None:
    engine = make_engine(model=models(family))
    chat = engine.chat
    seen_ = [engine.prefill(chat.bos)] if chat.bos else []
    turns: list[tuple[str, str]] = []
    if trunk != "start":
        seen_.append(engine.prefill(chat.turn("user", "What is it?"), seen_))
        turns.append(("user", "What is it?"))
    if trunk == "answer":
        seen_.append(engine.prefill(chat.turn("assistant", "What?"), seen_))
        turns.append(("assistant", "What?"))
    branches = [
        engine.decode(
            chat.header(name), seen_, author=name, turn_suffix=chat.turn_end,
            sampling=Sampling(forced_token_ids=tuple(engine.model.encode(f" {WORDS[name]}"))),
        )
        for name in ("ann", "bob")
    ]  # fmt: skip
    leases = engine.stats().leases
    answer = engine.branches.merge(
        branches, prompt, strategy="text", author="eve", sampling=Sampling(max_tokens=1), trunk=seen_
    )
    told = "\n\n".join(["ann: It is red.", "bob: It is not.", *([prompt] if prompt else [])])
    if trunk == "question":
        told = f"{turns.pop()[1]}\n\n{told}"
    wanted = written(engine, *turns, ("user", told), header="eve:")
    start = len(engine.model.encode(chat.bos))
    wanted = wanted[:start] + wanted[start + len(engine.model.encode(PromptText.special(chat.default_system))) :]
    made = engine.inspect.records([answer])[-1]
    known = {each.handle: each.tokens for each in engine.inspect.records([answer])}
    found = [token for parent in made.parents for token in known[parent]] + engine.model.encode(chat.header("eve"))
    assert engine.model.decode(found) == engine.model.decode(wanted)
    assert [*made.offsets[1:], made.position] == [
        at + len(known[parent]) for at, parent in zip(made.offsets, made.parents, strict=True)
    ]
    assert engine.stats().leases == leases + 1


@pytest.mark.parametrize("method", ["baseline", "naive"])
def test_methods_that_keep_text_read_the_same(models: Models, make_engine: MakeEngine, method: Any) -> None:
    engine = make_engine(model=models("Gemma 3"), method=method)
    state = run(chain("Be brief.", prompt="And you?"), engine, asked("What is it?"))
    told = "You are Bob.\n\nWhat is it?\n\nann: It is red.\n\nAnd you?"
    same(engine, seen(engine, state), written(engine, ("system", "Be brief."), ("user", told)))


def test_a_conversation_goes_on_in_another_engine(models: Models, make_engine: MakeEngine) -> None:
    graph, engine = chain(prompt="And you?"), make_engine(model=models("Mistral Small 3"), salt="s")
    state = run(graph, engine, asked("What is it?"))
    other = make_engine(model=models("Mistral Small 3"), salt="s")
    state = run(graph, other, {**state, "messages": [*state["messages"], HumanMessage("Really?")]})
    told = [("system", "You are Bob."), ("user", "What is it?\n\nann: It is red.\n\nAnd you?")]
    told += [("assistant", "bob: It is not."), ("user", "Really?\n\nann: It is red.\n\nAnd you?")]
    same(other, seen(other, state), written(other, *told))
    app = graph.compile(engine=other)
    found = {(each.context, each.reader, each.channel) for each in app.audit(state).findings}
    assert found == {(each.context, each.reader, each.channel) for each in app.audit().findings}


@pytest.mark.parametrize("family", [*MERGING, "Llama 3.1", "Qwen 3.5"])
@pytest.mark.parametrize("public", [None, "Be brief."])
def test_audits_know_what_agents_are_told_as_it_is_encoded(
    models: Models, make_engine: MakeEngine, family: str, public: str | None
) -> None:
    engine = make_engine(model=models(family))
    graph = chain(public, VisibilityRule("reencoded", scope=["bob.system", "ann.system"]))
    app, state = graph.compile(engine=engine), run(graph, engine, asked("What is it?"))
    texts = texts_of(app.builder, engine)
    for entry in state["handles"][1:]:
        said = engine._tenant.find(MessageHandle.model_validate(entry["handle"]))
        spans = [parent for each in [said, *said.parents] for parent in each.parents]
        told = {(span.author, span.tokens) for span in spans if str(span.author).endswith(".system")}
        assert told, "each is told something, and its words are encoded behind what it is told"
        for author, tokens in told:
            assert tokens in texts[str(author).removesuffix(".system")][str(author)]
