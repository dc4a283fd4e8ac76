"""Models that think before they answer: what readers get, what they do not, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import Decode, Engine, Memory, Prefill, PromptText, Sampling, StreamedToken, Thinking
from choreo_agents.engine import calling
from choreo_agents.engine.constraints import answer_of
from choreo_agents.engine.lineage import LoggedMessage, ReadLog
from choreo_agents.engine.messages.message import Message
from choreo_agents.errors import ContextLengthError, InvalidRequestError, ReleasedHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.pml import Schema, SchemaLibrary

FAMILIES = ("Qwen 3", "DeepSeek R1 Distill", "DeepSeek V3.1", "gpt-oss", "GLM-4.5")


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("thinker")
        tokenizer = tokenizer_for(family)
        save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        tokenizer.save_pretrained(folder)
        made[family] = load_model(folder, chat={"date": "2026-11-23"})
    return made


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest, thinkers: dict[str, LoadedModel]) -> Iterator[Engine]:
    with Engine.load(thinkers[request.param], memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        yield engine


def asked(engine: Engine, question: str = "Why?") -> MessageHandle:
    return engine.prefill(engine.chat.turn("user", question), [engine.prefill(engine.chat.bos or " ")])


def call(
    engine: Engine, view: MessageHandle, *, name: str | None = "ann", budget: int = 12, memo: str | None = None,
    **sampling: object,
) -> Decode:  # fmt: skip
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 6} | sampling
    return Decode(
        engine.chat.header(name, thinking=True),
        [view],
        sampling=Sampling.model_validate(options),
        author="ann",
        turn_suffix=engine.chat.turn_end,
        thinking=Thinking.of(engine.chat, name, budget),
        idempotency_key=memo,
    )


def script(engine: Engine, thoughts: str, answer: str, name: str | None = "ann") -> tuple[int, ...]:
    """The tokens of a model that says just this."""
    chat, encode = engine.chat, engine.model.encode
    assert chat.thoughts is not None
    lead = "" if name is None else f"{name}:"
    return (*encode(thoughts), *encode(chat.thoughts.close + lead), *encode(answer))


def logits_after(engine: Engine, view: list[MessageHandle]) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    header = engine.chat.header("bob", thinking=False)
    engine.decode(
        [Decode(header, view, sampling=Sampling(max_tokens=1), logits_callback=lambda row: seen.append(row.clone()))]
    )
    return seen[0]


def test_what_is_returned_is_the_answer_as_anybody_may_encode_it(engine: Engine) -> None:
    view = asked(engine)
    [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, "hm, three", " two"))])
    chat = engine.chat
    turn = chat.assistant.opening("ann").rstrip(" ").text + " two" + chat.turn_end
    assert engine.tokens(answer) == engine.model.encode(turn)
    [thought] = engine.inspect.thoughts(answer)
    text = engine.model.decode(list(engine.tokens(thought)), special=True)
    assert "hm, three" in text and " two" in text and "hm, three" not in engine.text(answer)
    encoded = engine.prefill(list(engine.tokens(answer)), [view])
    assert encoded == answer, "it is the message that a prefill of its words makes"


def test_no_reader_depends_on_thoughts_but_through_the_words(thinkers: dict[str, LoadedModel]) -> None:
    """Bit by bit, in engines of their own. Of one length: what stands elsewhere in memory may be added up otherwise."""
    for model in thinkers.values():
        found = []
        for thoughts in ("hm, three", "no, seven", "9 * 9 = 1"):
            with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
                view = asked(engine)
                [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, thoughts, " two"))])
                found.append((answer, logits_after(engine, [view, answer])))
        assert len({answer.id for answer, _ in found}) == 1
        assert all(torch.equal(found[0][1], logits) for _, logits in found)


def test_a_model_that_has_thought_long_enough_is_made_to_answer(engine: Engine) -> None:
    view = asked(engine)
    for budget in (0, 1, 7):
        [answer] = engine.decode([call(engine, view, budget=budget, stop_tokens=())])
        thought = (*engine.inspect.thoughts(answer), answer)[0]
        chat, encode = engine.chat, engine.model.encode
        assert chat.thoughts is not None
        close = len(encode(chat.thoughts.close + "ann:"))
        head = len(encode(chat.header("ann", thinking=True)))
        said = len(engine.tokens(answer)) - len(encode(chat.assistant.opening("ann").rstrip(" ")))
        ending = len(encode(chat.turn_end))
        assert len(engine.tokens(thought)) == head + budget + close + said
        assert said - ending <= 6 <= said, "max_tokens counts the answer"


def test_a_model_that_would_end_while_it_thinks_is_made_to_answer(engine: Engine) -> None:
    """Whatever it says but what closes its thoughts would end the message."""
    view, chat = asked(engine), engine.chat
    assert chat.thoughts is not None
    kept = engine.model.encode(PromptText.special(chat.thoughts.close))
    stops = tuple(token for token in range(len(engine.model.tokenizer)) if token not in kept)
    [answer] = engine.decode([call(engine, view, stop_tokens=stops)])
    thought = (*engine.inspect.thoughts(answer), answer)[0]  # one message, where an answer has an empty block
    text = engine.model.decode(list(engine.tokens(thought)), special=True)
    assert text.count(chat.thoughts.close + "ann:") == 1 and engine.logprobs(answer), "closed as its template has it"


def test_what_an_answer_was_asked_for_with_is_its_own(engine: Engine) -> None:
    """Encoded again it is as confidential and by the same adapter, and as urgent."""
    view = asked(engine)
    made = replace(call(engine, view), confidential=True, priority=3, timeout_s=60.0)
    [answer] = engine.decode([made])
    [lineage] = engine.inspect.audit([answer]).messages
    assert lineage.confidential and lineage.authors == {"ann"}
    [thought] = engine.inspect.thoughts(answer)
    again = answer_of(engine.model, replace(made, adapter="mine"), engine._tenant.find(thought))
    assert (again.priority, again.timeout_s, again.adapter) == (3, 60.0, "mine")


def test_stops_and_choices_are_of_the_answer(engine: Engine) -> None:
    view = asked(engine)
    [led] = engine.decode([call(engine, view, budget=9, choices=(" yes", " no"), max_tokens=8)])
    assert engine.text(led).removesuffix(engine.chat.turn_end).endswith(("ann: yes", "ann: no"))
    forced = script(engine, "stop here. no", " two, three")
    [free] = engine.decode([call(engine, view, forced_token_ids=forced, stop=("stop",))])
    assert engine.text(free).removesuffix(engine.chat.turn_end).endswith("two, three")


def test_several_answers_and_streams_think_as_well(engine: Engine) -> None:
    view = asked(engine)
    answers = engine.decode([call(engine, view, n=3)])
    assert len(answers) == 3 and all(engine.inspect.thoughts(answer) for answer in answers)

    async def streamed() -> list[StreamedToken | MessageHandle]:
        made = call(engine, view)
        return [
            item
            async for item in engine.astream(
                made.header, made.parents, sampling=made.sampling, author="ann", turn_suffix=made.turn_suffix,
                thinking=made.thinking,
            )
        ]  # fmt: skip

    *tokens, last = asyncio.run(streamed())
    assert last == answers[0] and all(isinstance(token, StreamedToken) for token in tokens)
    phases = [token.phase for token in tokens if isinstance(token, StreamedToken)]
    assert phases == sorted(phases, key=["thoughts", "close", "answer"].index) and "answer" in phases
    text = "".join(token.text for token in tokens if isinstance(token, StreamedToken) and token.phase == "answer")
    assert engine.text(answers[0]).removeprefix(engine.chat.assistant.opening("ann").rstrip(" ").text).startswith(text)


def test_the_same_call_is_answered_once(engine: Engine) -> None:
    view = asked(engine)
    first = engine.decode([call(engine, view, memo="m")])
    before = engine.stats().tokens_encoded
    assert engine.decode([call(engine, view, memo="m")]) == first
    assert engine.stats().tokens_encoded == before
    engine.decode([call(engine, view, memo="m", budget=2)])
    assert engine.stats().tokens_encoded > before, "to think for less long is another call"


def test_the_answer_costs_a_prefill_of_its_length(engine: Engine) -> None:
    view = asked(engine)
    before = engine.stats().tokens_encoded
    [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, "hm", " two"))])
    [thought] = engine.inspect.thoughts(answer)
    cost = len(engine.tokens(thought)) + len(engine.tokens(answer))
    assert engine.stats().tokens_encoded - before == cost == engine.usage(answer).tokens_encoded
    assert [chosen.token for chosen in engine.logprobs(answer)] == engine.model.encode(" two")


def test_thoughts_are_confidential_reach_readers_as_words_and_live_as_long_as_the_answer(engine: Engine) -> None:
    view = asked(engine)
    [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, "hm", " two"))])
    [thought] = engine.inspect.thoughts(answer)
    [lineage] = engine.inspect.audit([answer]).messages
    reached = {ancestor.handle: ancestor for ancestor in lineage.through("words")}
    assert reached[thought].authors == {"ann.thoughts"} and reached[thought].confidential
    assert thought not in {ancestor.handle for ancestor in lineage.through("encoding")}
    heard = engine.prefill(engine.chat.turn("user", "And?"), [view, answer])
    [lineage] = engine.inspect.audit([heard]).messages
    assert [each.channels for each in lineage.ancestors if each.handle == thought] == [{"words"}]
    engine.release(answer)
    with pytest.raises(ReleasedHandleError):
        engine.tokens(thought)
    engine.check()


def test_thoughts_that_the_engine_knows_are_leased_although_the_log_has_lost_them(engine: Engine) -> None:
    view = asked(engine)
    [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, "hm", " two"), memo="first")])
    [thought] = engine.inspect.thoughts(answer)
    log, said = ReadLog(), engine._tenant.find(answer)
    record = LoggedMessage(answer.id, said.kv_key(), thoughts=((thought.id, "second"),))
    log.add(record)
    with engine.scope() as scope:
        assert engine.lineage.import_messages([answer.id], log, scope) == {}
        assert engine.inspect.thoughts(answer, idempotency_key="second") == (thought,)
        engine.check()
    assert engine.inspect.thoughts(answer) == (thought,)
    engine.check()


def test_thoughts_of_calls_that_have_ended_do_not_pile_up_while_the_answer_is_leased(engine: Engine) -> None:
    """Somebody keeps the answer; others come to it, too, and go again."""
    view = asked(engine)

    def said(thoughts: str, memo: str | None = None) -> MessageHandle:
        [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, thoughts, " two"), memo=memo)])
        return answer

    answer = said("hm", "first")
    kept, leases = engine.inspect.thoughts(answer), engine.stats().leases
    for number in range(5):
        assert said(f"well, {number}") == answer and len(engine.inspect.thoughts(answer)) == 2
        engine.release(answer)
        assert engine.inspect.thoughts(answer) == kept
        with engine.scope():
            said(f"so, {number}")
            said(f"so, {number}")
        assert engine.inspect.thoughts(answer) == kept and engine.stats().leases == leases
    with engine.scope():
        inner = said("let me see", "second")
        assert engine.inspect.thoughts(answer, idempotency_key="first") == kept
        [other] = engine.inspect.thoughts(inner, idempotency_key="second")
        engine.check()
        engine.release(answer)
        assert engine.inspect.thoughts(answer) == kept, "of the scope's own leases one went"
    with pytest.raises(ReleasedHandleError):
        engine.tokens(other)
    engine.release(answer)
    for each in (answer, *kept):
        with pytest.raises(ReleasedHandleError):
            engine.tokens(each)
    engine.check()


def test_a_tenancy_ends_with_its_thoughts(engine: Engine) -> None:
    tenant = engine.tenant("else")
    [answer] = tenant.decode([call(tenant, asked(tenant))])
    assert tenant.inspect.thoughts(answer)
    tenant.close()
    assert engine.stats().leases == 0
    engine.check()


def test_thoughts_are_confidential_from_the_first_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are decoded, and the answer is not yet encoded for its readers."""
    seen: list[bool] = []

    def watched(model: LoadedModel, made: Decode, thought: Message) -> Prefill:
        [lineage] = engine.inspect.audit([thought.handle]).messages
        seen.append(lineage.confidential)
        return answer_of(model, made, thought)

    monkeypatch.setattr(calling, "answer_of", watched)
    view = asked(engine)
    [answer] = engine.decode([call(engine, view, forced_token_ids=script(engine, "hm", " two"))])
    assert seen == [True]
    [lineage] = engine.inspect.audit([answer]).messages
    assert not lineage.confidential


def test_an_answer_without_a_thought_is_nobodys_thoughts(thinkers: dict[str, LoadedModel]) -> None:
    """Where it is the same message as what was decoded."""
    with Engine.load(thinkers["GLM-4.5"], memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        [answer] = engine.decode([call(engine, asked(engine), budget=0)])
        [lineage] = engine.inspect.audit([answer]).messages
        assert lineage.authors == {"ann"} and not lineage.confidential and not engine.inspect.thoughts(answer)
        engine.check()


def test_leases_of_a_scope_end_with_it(engine: Engine) -> None:
    with engine.scope():
        view = asked(engine)
        engine.decode([call(engine, view, n=2)])
    assert engine.stats().leases == 0
    engine.check()


def test_prompts_and_merged_branches_are_answered_at_once_unless_thoughts_are_told_apart(engine: Engine) -> None:
    """Their answers are read as they are: nothing that was thought may stand in them."""
    schema = Schema.from_text('<schema name="ask"><module name="why">Because.</module></schema>')
    library = SchemaLibrary(engine)
    library.register(schema)
    one_token = Sampling(temperature=0.0, max_tokens=1)
    prompt = schema.prompt("<why/><user>Why?</user>")
    opening = [*engine.model.encode(engine.chat.header("ann", thinking=False))]
    said = library.generate(prompt, one_token, author="ann")
    branch = asked(engine)
    merged = engine.branches.merge([branch], "So?", sampling=one_token, author="ann")
    for answer in (said, merged):
        assert [*engine.tokens(answer)][: len(opening)] == opening
    thought = library.generate(prompt, one_token, author="ann", thinking=Thinking.of(engine.chat, "ann", 5))
    assert engine.inspect.thoughts(thought)
    library.close()


def test_what_cannot_think_is_refused(engine: Engine) -> None:
    view = asked(engine)
    with pytest.raises(InvalidRequestError, match="Thinking"):
        engine.decode("x", [view], thinking="much")  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError):
        engine.decode([call(engine, view, budget=1 << 20)])
    with Engine.load("embedded") as other, pytest.raises(InvalidRequestError, match="does not support"):
        Thinking.of(other.chat, "ann")


def test_thoughts_that_never_end_are_no_thoughts(engine: Engine) -> None:
    """Tokens that are forced and hold no end: all of them are the answer."""
    view = asked(engine)
    [answer] = engine.decode([call(engine, view, forced_token_ids=tuple(engine.model.encode(" two")))])
    assert engine.text(answer).removesuffix(engine.chat.turn_end).endswith("ann: two")
