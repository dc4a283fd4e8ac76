"""Messages that are found wherever they stood: what is taken, and from whom nothing ever is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from support.chatty import save_chatty
from torch import Tensor

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling, Scheduling
from choreo_agents.chat import ChatCall, ChatRequest, message_turn, streamed
from choreo_agents.chat.encodings import Encodings
from choreo_agents.engine.messages import thread_leases
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.runtime.step_trace import StepTrace

QUESTION = HumanMessage("What is the word that I have told you?")
ANSWER = "I vote for Candidate 1."
ONE, OTHER = "The word is 4711.", "The word is 5822."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    loaded = load_model(save_chatty(tmp_path_factory.mktemp("chatty"), layers=3))
    assert len(loaded.encode(ONE)) == len(loaded.encode(OTHER)), "secrets of one length"
    return loaded


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        yield engine
        engine.check()


class WatchedCall(ChatCall):
    """A call whose view and logits are looked at."""

    watch: Callable[[Tensor], None] | None = None
    view: Sequence[MessageHandle] = ()

    def _decode(self, *args: Any) -> Decode:
        decode = super()._decode(*args)
        self.view = [*decode.parents]
        return replace(decode, logits_callback=self.watch)


def call(
    engine: Engine,
    messages: Sequence[BaseMessage],
    agent: str = "parent",
    thread: str | None = "t",
    *,
    watch: Callable[[Tensor], None] | None = None,
    **more: Any,
) -> WatchedCall:
    """One call, whose answer is forced."""
    sampling = Sampling(forced_token_ids=tuple(engine.model.encode(ANSWER)))
    request = ChatRequest(**({"reuse": "anywhere", "agent": agent, "sampling": sampling} | more))
    made = WatchedCall(engine, messages, request, thread)
    made.watch = watch
    for _ in streamed(made):
        pass
    return made


def said(made: ChatCall) -> AIMessage:
    assert made.message is not None
    return made.message


def encoded(engine: Engine, run: Callable[[], WatchedCall]) -> int:
    """Tokens that a call has had encoded, without those that it said, and that close its turn."""
    before = engine.stats().tokens_encoded
    made = run()
    usage = said(made).usage_metadata
    assert usage is not None
    # The last token was read by nobody yet.
    answer = usage["output_tokens"] + len(engine.model.encode(engine.chat.turn_end))
    return engine.stats().tokens_encoded - before - answer


def reader(
    model: LoadedModel,
    secret: str,
    step_trace: StepTrace,
    *,
    thread: str | None,
    tenant: str | None = None,
    first: str | None = "t",
    **more: Any,
) -> Tensor:
    """The logits of a reader with a secret of its own, after somebody with another has asked the very same."""
    logits: list[Tensor] = []
    with Engine.load(
        model, memory=Memory(kv_budget_bytes=1 << 25), scheduling=Scheduling(step_trace=step_trace)
    ) as engine:
        call(engine, [SystemMessage(secret), QUESTION], "parent", first)
        call(engine, [SystemMessage(secret), QUESTION, AIMessage(ANSWER), QUESTION], "parent", first)
        own = engine if tenant is None else engine.tenant(tenant)
        told = [SystemMessage("The word is 9933."), QUESTION, AIMessage(ANSWER), QUESTION]
        call(own, told, "reader", thread, watch=lambda row: logits.append(row.clone()), **more)
    return torch.stack(logits)


PARENTS = {"inherits": ("parent.system",)}


@pytest.mark.parametrize(
    "who",
    [
        {"thread": "t"},
        {"thread": "t", "inherits": ("reader.system", "parent.user")},
        {"thread": "other", **PARENTS},
        {"thread": None, **PARENTS},
        {"thread": None, "first": None, **PARENTS},
        {"thread": "t", "tenant": "somebody else's", **PARENTS},
    ],
)
def test_a_reader_does_not_depend_on_anothers_secret(model: LoadedModel, who: dict[str, Any]) -> None:
    """Bit by bit, in the same steps: two users, the same question, other secrets."""
    step_trace = StepTrace()
    one = reader(model, ONE, step_trace, **who)
    assert torch.equal(one, reader(model, OTHER, step_trace.replay(), **who))


def test_it_does_where_its_caller_says_so(model: LoadedModel) -> None:
    """So the test above would notice."""
    one, other = (reader(model, secret, StepTrace(), thread="t", **PARENTS) for secret in (ONE, OTHER))
    assert not torch.allclose(one, other, atol=1e-2)


def test_a_fork_with_another_system_prompt_reads_its_own_alone(engine: Engine) -> None:
    first = call(engine, [SystemMessage(ONE), QUESTION])
    talk = [QUESTION, said(first), HumanMessage("And now?")]
    parent = call(engine, [SystemMessage(ONE), *talk])
    told, asked = SystemMessage("You are a critic."), HumanMessage("What is wrong?")
    shared = [*talk, said(parent), asked]
    child = encoded(engine, lambda: call(engine, [told, *shared], "child", **PARENTS))
    model = engine.model
    own = len(model.encode(model.chat.turn("system", told.content))) + len(
        model.encode(model.chat.turn("user", asked.content) + model.chat.header(None))
    )
    assert child <= own + 1, "its system prompt, its question and the header"
    again = encoded(engine, lambda: call(engine, [told, *shared], "child", **PARENTS))
    assert again <= len(model.encode(model.chat.header(None))) + 1


def sibling(model: LoadedModel, secret: str, step_trace: StepTrace, **more: Any) -> Tensor:
    """The logits of a forked subagent, after another with a secret of its own was asked the very same."""
    logits: list[Tensor] = []
    with Engine.load(
        model, memory=Memory(kv_budget_bytes=1 << 25), scheduling=Scheduling(step_trace=step_trace)
    ) as engine:
        talk = [QUESTION, said(call(engine, [SystemMessage("You count votes."), QUESTION])), HumanMessage("And now?")]
        call(engine, [SystemMessage(secret), *talk], "sibling", **PARENTS)
        told = [SystemMessage("You are a critic."), *talk]
        call(engine, told, "reader", watch=lambda row: logits.append(row.clone()), **more)
    return torch.stack(logits)


def test_a_fork_does_not_depend_on_its_siblings_prompts(model: LoadedModel) -> None:
    """Bit by bit, in the same steps: what both are asked has attended to the sibling's prompt, which nobody allows."""
    step_trace = StepTrace()
    one = sibling(model, ONE, step_trace, **PARENTS)
    assert torch.equal(one, sibling(model, OTHER, step_trace.replay(), **PARENTS))
    allowed = {"inherits": ("parent.system", "sibling.system")}
    one, other = (sibling(model, secret, StepTrace(), **allowed) for secret in (ONE, OTHER))
    assert not torch.allclose(one, other, atol=1e-2), "so the test above would notice"


def test_messages_are_found_in_another_order_if_all_that_they_saw_is_there(engine: Engine) -> None:
    told = [HumanMessage(f"Document {number} says {number}{number}.") for number in range(3)]
    call(engine, [*told, QUESTION])
    turned = [told[2], told[0], told[1], QUESTION]
    header = len(engine.model.encode(engine.chat.header(None)))
    assert encoded(engine, lambda: call(engine, turned)) <= header + 1
    fewer = call(engine, told[1:])
    seen = [engine.inspect.ancestors(handle) for handle in fewer.view]
    assert not any("Document 0" in engine.text(each) for ancestors in seen for each in ancestors)


def test_what_is_encoded_exactly_so_comes_first_then_what_has_seen_most(engine: Engine) -> None:
    alone = call(engine, [QUESTION]).view[-1]
    told = HumanMessage("It was zebra.")
    behind = call(engine, [told, QUESTION], thread="u").view[-1]
    assert alone.id != behind.id
    assert call(engine, [told, QUESTION]).view[-1].id == alone.id, "another thread's is not looked at"
    both = call(engine, [told, told, QUESTION], thread="u").view[-1]
    assert both.id == behind.id
    assert call(engine, [told, QUESTION], thread="u").view[-1].id == behind.id


def test_the_rule_does_not_ask_what_came_first(model: LoadedModel) -> None:
    told = [HumanMessage("It was zebra."), HumanMessage("It was tiger.")]
    taken = []
    for order in ((0, 1), (1, 0)):
        with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25), salt="s") as engine:
            for number in order:
                call(engine, [told[number], QUESTION])
            taken.append(call(engine, [*told, QUESTION]).view[-1].id)
    assert taken[0] == taken[1]


def test_what_others_have_encoded_again_does_not_change_what_is_taken(engine: Engine) -> None:
    told = [HumanMessage("It was zebra."), HumanMessage("It was tiger.")]
    behind = call(engine, [told[0], QUESTION]).view[-1]
    *_, made = engine.inspect.records([behind])
    secret = engine.prefill(ONE)
    again = engine.prefill(made.tokens, made.parents, source=secret)
    assert again.id == behind.id, "whose words came of a secret"
    assert call(engine, [*told, QUESTION]).view[-1].id == behind.id


def test_what_is_taken_is_leased(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_leases, "IDLE_RUNS", 1)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        told = HumanMessage("A document.")
        first = call(engine, [told], thread=None)
        second = call(engine, [told, QUESTION], thread=None)
        assert second.view[0] == first.view[0] and engine.stats().threads == 1, "the first is forgotten"
        assert engine.text(second.view[0]), "and what the second took of it is not"
        engine.check()


def test_what_is_forgotten_is_not_remembered_by_its_words(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_leases, "IDLE_RUNS", 1)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        for number in range(60):
            call(engine, [HumanMessage(f"Document {number}.")], thread=None)
        remembered = engine.kv.get_or_create(Encodings)
        said = [HumanMessage(f"Document {number}.") for number in range(60)]
        known = [remembered.with_content((None, message_turn(each, engine.chat).text)) for each in said]
        assert known[-1] and sum(map(len, known)) < 40


def test_texts_of_the_same_tokens_are_known_together(engine: Engine) -> None:
    call(engine, [HumanMessage("Hm?")])
    spoken = Sampling(forced_token_ids=tuple(engine.model.encode(f" {ANSWER}")))
    with engine.scope():
        call(engine, [QUESTION], sampling=spoken)
        said = call(engine, [QUESTION, AIMessage(f" {ANSWER}"), QUESTION]).view[1]
        assert call(engine, [QUESTION, AIMessage(ANSWER), QUESTION]).view[1] == said
    for words in 2 * (ANSWER, f" {ANSWER}"):
        assert call(engine, [QUESTION, AIMessage(words), QUESTION]).view


def test_a_thread_that_is_forgotten_has_nothing_to_give(engine: Engine) -> None:
    call(engine, [SystemMessage(ONE), QUESTION])
    engine.threads.forget("t")
    child = call(engine, [SystemMessage(OTHER), QUESTION], "child", **PARENTS)
    usage = said(child).usage_metadata
    assert usage is not None and usage["input_token_details"]["cache_read"] == 0
    assert engine.stats().threads == 1


def test_what_is_inherited_has_to_be_found_anywhere() -> None:
    with pytest.raises(InvalidRequestError, match='reuse="anywhere"'):
        ChatRequest(inherits=("parent.system",))
    with pytest.raises(InvalidRequestError, match="must be a list"):
        ChatRequest(reuse="anywhere", inherits="parent.system")  # type: ignore[arg-type]


def test_the_same_words_are_said_as_with_prefixes_where_nothing_is_known(model: LoadedModel, tmp_path: Path) -> None:
    talk = [SystemMessage(ONE), QUESTION, AIMessage(ANSWER), HumanMessage("Why?")]
    sampling = Sampling(max_tokens=10)
    words = []
    for reuse in ("prefix", "anywhere"):
        with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
            words.append(said(call(engine, talk, reuse=reuse, sampling=sampling)).text)
    assert words[0] == words[1]
