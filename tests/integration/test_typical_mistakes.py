"""What a user gets wrong, and what is said to it: the value, and what to do instead."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, dict-item, list-item"

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from langchain_choreo import ChatChoreo
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from typer.testing import CliRunner

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    Engine,
    HistoryLimit,
    Memory,
    Policy,
    RunOptions,
    Sampling,
    Scheduling,
    Schema,
    Synthesizer,
    Worker,
    compare,
    fork,
    replay,
    send,
)
from choreo_agents.cli import app as command
from choreo_agents.models import load_model
from choreo_agents.testing import Script

SCHEMA = Schema.from_text('<schema name="trip"><module name="plan">Three days.</module></schema>')
IMAGE = HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}], id="photo")
Mistake = Callable[[Engine], Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Script(default="Yes.").load() as engine:
        yield engine


def find(thing: str) -> str:
    """Find a thing."""
    return thing


def graph(**options: Any) -> ChoreoGraph:
    found = ChoreoGraph().add_node(Agent("ann", **options)).add_node(Agent("bob"))
    return found.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", END)


def edge(engine: Engine, *ends: str, **declared: Any) -> None:
    made = ChoreoGraph().add_node(Agent("ann")).add_node(Agent("bob")).add_edge(START, "ann")
    made.add_edge(*ends, **declared).compile(engine=engine)


def typed(*words: str) -> None:
    """A command that fails says so in a line."""
    result = CliRunner().invoke(command, words, env={"COLUMNS": "400", "TERM": "dumb"})
    assert result.exit_code and "Traceback" not in result.output
    raise ValueError(re.sub(r"[\s│]+", " ", result.output))


UNKNOWN: dict[str, tuple[Mistake, str]] = {
    "an engine's memory": (lambda _: Engine.load(kv_budget_bytes=5), r"memory=Memory\(kv_budget_bytes=...\)"),
    "an engine's model": (lambda _: Engine.load(modle="embedded"), "'modle'.*model=..."),
    "Hugging Face's dtype": (lambda _: Engine.load(torch_dtype="auto"), "'torch_dtype'.*dtype=..."),
    "Hugging Face's device": (lambda _: load_model("embedded", device_map="auto"), "'device_map'.*device=..."),
    "memory": (lambda _: Memory(kv_budget="4GB"), "'kv_budget'.*kv_budget_bytes=..."),
    "scheduling": (lambda _: Scheduling(max_num_seq=5), "'max_num_seq'.*max_num_seqs=..."),
    "sampling": (lambda _: Sampling(temprature=1), "'temprature'.*temperature=..."),
    "Hugging Face's length": (lambda _: Sampling(max_new_tokens=1), "'max_new_tokens'.*max_tokens=..."),
    "no name": (lambda _: Sampling(0.5), "temperature=.*0.5"),
    "a decode": (lambda e: e.decode("a", max_tokens=1), r"'max_tokens'.*sampling=Sampling\(max_tokens=...\)"),
    "a stream": (lambda e: next(e.stream("a", samplng=Sampling())), "'samplng'.*sampling=..."),
    "an agent": (lambda _: Agent("ann", systm="x"), "'systm'.*system=..."),
    "another agent": (lambda _: Agent("ann", instructions="x"), "'instructions'.*system=..."),
    "an agent's sampling": (lambda _: Agent("ann", temperature=1), r"sampling=Sampling\(temperature=...\)"),
    "a dict of sampling": (lambda _: Agent("ann", sampling={"temprature": 1}), "'ann'.*'temprature'.*temperature=..."),
    "an agent's call": (
        lambda e: Agent("ann", engine=e).invoke({"messages": "x"}, seed=1),
        "Agent.*'seed'.*no keyword",
    ),
    "a worker": (lambda _: Worker("ann", speakr="x"), "Worker.*'speakr'.*speaker=..."),
    "a worker's option": (lambda _: Worker("ann", systm="x"), "Worker.*'systm'.*system=..."),
    "a synthesizer": (lambda _: Synthesizer("ann", merges=["bob"], stratgy="text"), "'stratgy'.*strategy=..."),
    "a history": (lambda _: HistoryLimit(token=1), "'token'.*tokens=..."),
    "a policy": (lambda _: Policy(on_violaton="warn"), "'on_violaton'.*on_violation=..."),
    "a run's options": (lambda _: RunOptions(sed=1), "'sed'.*seed=..."),
    "a graph": (lambda _: ChoreoGraph(systm="x"), "'systm'.*system=..."),
    "a node": (lambda _: ChoreoGraph().add_node("a", find, persna="b"), "'persna'.*persona=..."),
    "an edge": (lambda _: ChoreoGraph().add_edge(START, "a", visiblity="shared"), "'visiblity'.*visibility=..."),
    "compiling": (lambda e: graph().compile(engin=e), "'engin'.*engine=..."),
    "a checkpointer": (lambda e: graph().compile(engine=e, checkpoint=None), "'checkpoint'.*checkpointer=..."),
    "a run": (
        lambda e: graph().compile(engine=e).invoke({"messages": "x"}, temperature=1),
        "'temperature'.*stream_mode",
    ),
    "a state": (lambda e: graph().compile(engine=e).invoke({"message": "x"}), "'message'.*messages=..."),
    "sending": (lambda _: send("ann", {}, sharedd=[]), "'sharedd'.*shared=..."),
    "a worker's sending": (lambda _: Worker("ann").send({}, sharedd=[]), "'sharedd'.*shared=..."),
    "comparing": (lambda e: compare(graph().compile(engine=e), ["x"], repeat=1), "'repeat'.*repeats=..."),
    "replaying": (lambda e: replay(graph().compile(engine=e), "x", node={}), "'node'.*nodes=..."),
    "a script": (lambda _: Script(defalt="x"), "'defalt'.*default=..."),
    "a script's engine": (lambda _: Script(default="x").load(memry=5), "'memry'.*memory=..."),
    "a chat model": (lambda e: ChatChoreo(engine=e, temprature=1), "'temprature'.*temperature=..."),
    "OpenAI's length": (lambda e: ChatChoreo(engine=e, max_completion_tokens=1), "max_tokens=..."),
    "OpenAI's model": (lambda _: ChatChoreo(model_name="embedded"), "'model_name'.*model=..."),
    "OpenAI's address": (lambda _: ChatChoreo(model="embedded", base_url="http://x"), "'base_url'.*it takes.*model"),
    "a chat model's engine": (lambda _: ChatChoreo(model="embedded", device="cpu"), "'device'.*load_options="),
    "a chat": (lambda e: ChatChoreo(engine=e).invoke("x", temprature=1), "'temprature'.*temperature=..."),
    "a binding": (lambda e: ChatChoreo(engine=e).bind(temprature=1), "'temprature'.*temperature=..."),
    "a command": (lambda _: typed("run", "debate", "--modl", "x"), "--modl.*--model"),
}
"""Arguments that there are not, and the nearest that there is."""

WRONG: dict[str, tuple[Mistake, str]] = {
    "a device": (lambda _: Engine.load(device="gpu"), '\'gpu\'.*pass "cpu", "cuda"'),
    "a dtype": (lambda _: Engine.load(dtype="bf61"), "'bf61'.*use float32, bfloat16"),
    "a dtype that nobody serves": (lambda _: load_model("embedded", dtype=torch.int8), "torch.int8.*use float32"),
    "a method": (lambda _: Engine.load(method="coreo"), r"Engine.load\(method='coreo'\).*'choreo', 'baseline'"),
    "a backend": (lambda _: Engine.load(backend="flash"), "'flash'|'auto'"),
    "no model": (lambda _: Engine.load(None), "a folder, a hub name or a loaded model.*None"),
    "a folder": (lambda _: Engine.load("./no/such"), "'./no/such': pass one in Hugging Face's layout"),
    "a chat's variables": (lambda _: Engine.load(chat="on"), "enable_thinking.*'on'"),
    "a salt": (lambda e: e.tenant(7), "must be a string, not 7"),
    "bytes in words": (lambda _: Memory(kv_budget_bytes="4GB"), "kv_budget_bytes='4GB'.*integer"),
    "a temperature": (lambda _: Sampling(temperature=-1), r"temperature=-1\): it should be greater"),
    "a text to stop at": (lambda _: Sampling(stop="x"), r"stop='x'\).*as in \('x',\)"),
    "a constraint": (lambda _: Sampling(constraint={"json": {}}), "json_schema, regex and grammar.*'json'"),
    "an agent without a name": (lambda _: Agent(""), "name of an agent must be a non-empty string.*''"),
    "tools": (lambda _: Agent("ann", tools=find), "'ann' must be a list.*find"),
    "a tool": (lambda _: Agent("ann", tools=[5]), "5, a tool of 'ann'.*pass a function"),
    "a tool to call": (
        lambda _: Agent("ann", tools=[find], tool_choice="look"),
        "'look'.*its tools are find: use one",
    ),
    "no tool to call": (lambda _: Agent("ann", tool_choice="required"), "'required'.*no tools: pass some"),
    "no chat's tool": (lambda e: ChatChoreo(engine=e).bind_tools([], tool_choice="look"), "'look'.*no tools: pass"),
    "reads": (lambda _: Agent("ann", reads={"bob": "share"}), "'share': use one of 'private', 'shared'"),
    "a schema": (lambda _: Agent("ann", prompt=SCHEMA), r"a schema.*pass schema.prompt\(...\)"),
    "a worker's number": (lambda _: Worker("ann", n="3"), "at least 1.*'3'"),
    "an instruction": (lambda _: Worker("ann").send({}, 5), "instruction of .*'ann' must be a string, not 5"),
    "one message": (lambda _: Worker("ann").send({}, shared="ab"), "shared must be a list.*'ab'"),
    "a strategy": (lambda _: Synthesizer("ann", merges=["bob"], strategy="txt"), "one of parallel.*'txt'"),
    "what is merged": (lambda _: Synthesizer("ann", merges="bob"), "must be the names of nodes.*'bob'"),
    "a mode": (lambda e: edge(e, "ann", "bob", visibility="shred"), "'shred': use one of 'private', 'shared'"),
    "an edge's end": (lambda e: edge(e, "ann", "eve"), "'eve', which is not a node. Nodes: ann, bob"),
    "an edge's history": (lambda e: edge(e, "ann", "bob", history="lst"), "'all', 'last' or a number.*'lst'"),
    "a node that runs nothing": (lambda _: ChoreoGraph().add_node("ann"), r"'ann' has no action: call add_node\(Agent"),
    "a class": (lambda _: ChoreoGraph().add_node(Agent), r"Agent is a class.*Agent\(name\)"),
    "a graph's policy": (lambda _: ChoreoGraph(policy="warn"), "on_violation='warn'.*not 'warn'"),
    "no engine": (lambda _: graph().compile(), r"'ann' has no engine: use compile\(engine=Engine.load"),
    "an engine's name": (lambda _: graph().compile(engine="embedded"), r"Engine.load\(\).*'embedded'"),
    "a tenant": (lambda e: graph().compile(engine=e, tenant="me"), "a function from a run's config.*'me'"),
    "no thread": (lambda e: graph().compile(InMemorySaver(), engine=e).invoke({"messages": "x"}), '"thread_id": "..."'),
    "no thread's state": (lambda e: graph().compile(InMemorySaver(), engine=e).get_state({}), '"thread_id": "..."'),
    "no state": (lambda e: graph().compile(engine=e).invoke("Hello"), "\"messages\": ....*'Hello'"),
    "an image": (lambda e: graph().compile(engine=e).invoke({"messages": [IMAGE]}), r"user.*RemoveMessage\('photo'\)"),
    "a chat's image": (lambda e: ChatChoreo(engine=e).invoke([IMAGE]), "user holds more than text, 'image_url': leave"),
    "a text of none": (lambda e: ChatChoreo(engine=e).invoke([HumanMessage([{"type": "text"}])]), 'without "text"'),
    "no list": (lambda e: compare(graph().compile(engine=e), "Hello"), "must be a list.*'Hello'"),
    "ways to compare": (lambda e: compare(graph().compile(engine=e), ["x"], methods=["base"]), r"choreo.*\['base'\]"),
    "what is not compiled": (lambda _: compare(graph(), ["x"]), r"ChoreoGraph.*compile\(engine=...\)"),
    "no record": (lambda e: replay(graph().compile(engine=e), "x.jsonl"), r"'x.jsonl': engine.record\(path\)"),
    "no record to change": (lambda e: fork(graph().compile(engine=e), "x.jsonl", set={}), r"'x.jsonl': engine.record"),
    "a script's lines": (lambda _: Script("Yes."), "agents to lines.*default=....*'Yes.'"),
    "a schema as text": (lambda _: Schema("<schema/>"), r"'<schema/>'.*Schema.from_text"),
    "an element": (lambda _: Schema.from_text('<schema name="a"><modul name="b"/></schema>'), "<modul>.*'module'"),
    "a module": (lambda _: SCHEMA.prompt('<prompt schema="trip"><plans/></prompt>'), "plans.*'plan'"),
    "a command's dtype": (lambda _: typed("run", "debate", "--dtype", "int8"), "'int8'.*use float32"),
    "a command's name": (lambda _: typed("rnu"), "'rnu'.*'run'"),
    "a graph's place": (lambda _: typed("audit", "mine"), "module:graph, not 'mine'"),
}
"""Values that cannot be, and what can."""


@pytest.mark.parametrize(("mistake", "said"), [*UNKNOWN.values(), *WRONG.values()], ids=[*UNKNOWN, *WRONG])
def test_a_mistake_is_told_by_its_value_and_what_to_do(engine: Engine, mistake: Mistake, said: str) -> None:
    with pytest.raises((ValueError, LookupError, OSError)) as refusal:
        mistake(engine)
    assert re.search(said, " ".join(str(refusal.value).split())), str(refusal.value)
