"""Answers that a schema, a regular expression, a grammar or a constraint of one's own leads."""

from __future__ import annotations

import asyncio
import builtins
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from conftest import MakeEngine
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from choreo_agents import Constraint, Decode, Engine, Sampling, StreamedToken, Thinking
from choreo_agents.errors import ChoreoError, ConstraintError, GrammarError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.constraints import Grammars, grammars
from choreo_agents.sampling import Allowed, Grammar
from choreo_agents.testing import Script

ROOT = "<s><|system|> Notes: Ann has 3 red kites. Bob has 5 blue boats.<|end|><|user|> Who has boats?<|end|>"
HEADER = "<|assistant|>"
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 6},
        "boats": {"type": "integer", "minimum": 0, "maximum": 99},
        "colors": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["who", "boats", "colors"],
    "additionalProperties": False,
}
FREE = Sampling(temperature=1.0, max_tokens=120)


def with_(constraint: Any, **changes: Any) -> Sampling:
    return Sampling.model_validate({**FREE.model_dump(), "constraint": constraint, **changes})


@pytest.fixture
def talker(embedded: LoadedModel, make_engine: MakeEngine) -> Engine:
    return make_engine(embedded)


def words(engine: Engine, handle: MessageHandle, header: str = HEADER) -> str:
    return engine.model.decode(engine.tokens(handle)[len(engine.model.encode(header)) :], special=False)


@pytest.mark.parametrize("closing", [None, "<|end|>"])
def test_json_is_what_its_schema_says_and_as_json_writes_it(talker: Engine, closing: str | None) -> None:
    root = talker.prefill(ROOT)
    said = set()
    sampling = with_({"json_schema": SCHEMA}, seed=0, n=6)
    for handle in talker.decode([Decode(HEADER, [root], sampling=sampling, turn_suffix=closing)]):
        text = words(talker, handle)
        found = json.loads(text)
        jsonschema.validate(found, SCHEMA)
        assert list(found) == list(SCHEMA["properties"]) and text.strip() == json.dumps(found, ensure_ascii=False)
        assert (talker.tokens(handle)[-1] == 2) is (closing is not None), "nothing is sampled behind its end"
        said.add(text)
    assert len(said) > 2


def test_regular_expressions_and_grammars_lead_all_of_an_answer(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    for seed in range(4):
        text = words(talker, talker.decode(HEADER, [root], sampling=with_({"regex": r"[0-9]{2}-(yes|no)"}, seed=seed)))
        assert re.fullmatch(r" ?[0-9]{2}-(yes|no)", text)
        lark = 'start: name " has " /[0-9]{1,2}/ "."\nname: "Ann" | "Bob"'
        text = words(talker, talker.decode(HEADER, [root], sampling=with_({"grammar": lark}, seed=seed)))
        assert re.fullmatch(r"(Ann|Bob) has [0-9]{1,2}\.", text)


def test_filters_and_penalties_choose_among_what_is_allowed(talker: Engine) -> None:
    root, schema = talker.prefill(ROOT), {"json_schema": SCHEMA}
    filters: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 300, "temperature": 3.0}]
    filters += [{"repetition_penalty": 1.8, "frequency_penalty": 1.0}, {"temperature": 0.0}, {"logprobs": 2}]
    asked = [Decode(HEADER, [root], sampling=with_(schema, seed=5, **each)) for each in filters]
    for handle in talker.decode(asked):
        jsonschema.validate(json.loads(words(talker, handle)), SCHEMA)


def test_a_tenant_compiles_what_another_has_compiled(talker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it takes would tell what others ask for."""
    compiled: list[Grammar] = []
    compile_ = Grammars.compile
    monkeypatch.setattr(Grammars, "compile", lambda self, each: compiled.append(each) or compile_(self, each))
    for tenant in (talker.tenant("one"), talker.tenant("other")):
        for _ in range(2):
            tenant.decode(HEADER, sampling=with_({"regex": "so"}))
    assert len(compiled) == 2


def test_an_end_ends_what_could_go_on_and_is_in_the_message_as_its_closing_only(talker: Engine) -> None:
    root, lengths = talker.prefill(ROOT), set()
    for seed in range(8):
        sampling = with_({"regex": r"([A-Z][a-z]+ ?){0,9}"}, seed=seed)
        handle = talker.decode(HEADER, [root], sampling=sampling, turn_suffix="<|end|>")
        tokens = talker.tokens(handle)
        assert tokens[-1] == 2 and tokens.count(2) == 1
        lengths.add(len(tokens))
    assert len(lengths) > 1


def test_the_likeliest_of_the_allowed_is_taken(talker: Engine) -> None:
    """Greedy: what the model's own logits say, of the words that may come next."""
    root, seen = talker.prefill(ROOT), list[torch.Tensor]()
    sampling = Sampling(constraint={"regex": "red|blue|green"}, max_tokens=20)
    [handle] = talker.decode(
        [Decode(HEADER, [root], sampling=sampling, logits_callback=lambda row: seen.append(row.clone()))]
    )
    first = talker.tokens(handle)[len(talker.model.encode(HEADER))]
    constraint = talker.model.grammars.compile(Grammar(kind="regex", text="red|blue|green"))(frozenset({2}))
    allowed = constraint.allowed()
    assert isinstance(allowed, torch.Tensor) and 0 < int(allowed.sum()) < 40
    assert first == int(seen[0].masked_fill(~allowed, float("-inf")).argmax())


def test_what_is_cut_is_an_error_with_the_words_and_the_others_go_on(talker: Engine) -> None:
    root = talker.prefill(ROOT)

    async def all_of_them() -> list[Any]:
        asked = [with_({"regex": "[a-z]{90}"}, max_tokens=9), with_({"json_schema": SCHEMA}), FREE]
        calls = [talker.adecode(HEADER, [root], sampling=each) for each in asked]
        return await asyncio.gather(*calls, return_exceptions=True)

    before = talker.stats().steps
    cut, led, free = asyncio.run(all_of_them())
    assert isinstance(cut, ConstraintError) and isinstance(cut, ChoreoError | ValueError)
    assert re.fullmatch(" ?[a-z]{3,80}", cut.text) and "max_tokens=9" in str(cut)
    jsonschema.validate(json.loads(words(talker, led)), SCHEMA)
    assert isinstance(free, MessageHandle) and talker.stats().steps - before <= 125, "no step was repeated"
    with pytest.raises(ConstraintError, match="allows no token") as nothing:
        talker.decode(HEADER, [root], sampling=with_({"grammar": "start: <|end|>"}))
    assert nothing.value.text == ""
    talker.check()


def test_every_answer_has_a_guide_of_its_own_and_is_independent_of_who_shares_the_batch(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    sampling = with_({"json_schema": SCHEMA}, seed=4, n=3)
    several = [words(talker, each) for each in talker.decode([Decode(HEADER, [root], sampling=sampling)])]
    assert len(several) == 3 and len(set(several)) > 1
    crowd = [with_({"regex": "[0-9]{5,30}"}, seed=1), with_({"json_schema": {"type": "integer"}}, seed=2)]
    crowd += [sampling, FREE.model_copy(update={"seed": 3})]
    asked = [Decode(HEADER, [root], sampling=each) for each in crowd]
    assert [words(talker, each) for each in talker.decode(asked)[2:5]] == several


def test_a_memo_a_replay_and_a_stream_know_the_same_answer(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    sampling = with_({"json_schema": SCHEMA})
    asked = Decode(HEADER, [root], sampling=sampling, idempotency_key="m")
    [first], [again] = talker.decode([asked]), talker.decode([asked])
    assert first == again
    other = with_({"json_schema": {**SCHEMA, "required": []}})
    [third] = talker.decode([Decode(HEADER, [root], sampling=other, idempotency_key="m")])
    assert third != first, "another constraint is another call"
    sampled = tuple(talker.tokens(first)[len(talker.model.encode(HEADER)) :])
    forced = sampling.model_copy(update={"forced_token_ids": sampled})
    assert talker.tokens(talker.decode(HEADER, [root], sampling=forced)) == talker.tokens(first)
    nonsense = sampling.model_copy(update={"forced_token_ids": (7, 8)})
    assert talker.tokens(talker.decode(HEADER, [root], sampling=nonsense))[-2:] == [7, 8], "taken as they are"
    shown = ""
    with pytest.raises(ConstraintError) as cut:
        for item in talker.stream(HEADER, [root], sampling=with_({"regex": "[a-z]{90}"}, max_tokens=6)):
            shown += item.text if isinstance(item, StreamedToken) else ""
    assert shown and cut.value.text.startswith(shown)


def test_a_stop_ends_an_answer_where_it_may_end(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    letters, schema = {"regex": "[a-d]{3,60}"}, {"json_schema": SCHEMA}
    asked = [with_(letters, seed=0, stop=["a"], n=4), with_(schema, seed=0, stop=['"'], n=2)]
    said = [words(talker, each) for each in talker.decode([Decode(HEADER, [root], sampling=each) for each in asked])]
    for text in map(str.strip, said[:4]):
        assert "a" not in text[2:-1] and len(text) >= 3
    for text in said[4:]:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_special_tokens_and_padding_words_are_never_allowed(talker: Engine) -> None:
    """Whatever the grammar: the embedded vocabulary has six of the ones, and nine of the others."""
    model = talker.model
    for grammar in ({"regex": "(.|\n)*"}, {"grammar": "start: /(.|\\n)*/ <|user|>"}, {"json_schema": {}}):
        allowed = model.grammars.compile(Grammar.model_validate(grammar))(frozenset({2})).allowed()
        assert isinstance(allowed, torch.Tensor)
        never = [*model.tokenizer.all_special_ids, *range(len(model.tokenizer), model.adapter.vocabulary_size)]
        assert not any(allowed[token] for token in {*never} - {2})
        assert bool(allowed[2]) is (grammar == {"regex": "(.|\n)*"})


class Evens:
    """Even token ids only, three of them."""

    def __init__(self, vocabulary: int) -> None:
        self.done, self._left, self._even = False, 3, torch.arange(vocabulary) % 2 == 0

    def allowed(self) -> Allowed:
        return self._even

    def take(self, token: int) -> None:
        self._left -= 1
        self.done = not self._left


def test_a_guide_of_ones_own_leads_by_its_key(talker: Engine) -> None:
    root = talker.prefill(ROOT)
    evens = Constraint("even", lambda model, ends: Evens(model.adapter.vocabulary_size))

    def asked(constraint: Constraint, **options: Any) -> Decode:
        return Decode(
            HEADER,
            [root],
            sampling=FREE.model_copy(update={"seed": 1}),
            constraint=constraint,
            idempotency_key="m",
            **options,
        )

    [handle] = talker.decode([asked(evens)])
    sampled = talker.tokens(handle)[len(talker.model.encode(HEADER)) :]
    assert len(sampled) == 3 and not any(token % 2 for token in sampled)
    assert talker.decode([asked(Constraint("even", evens.make))]) == [handle], "the key names the call"
    wrong = Constraint("wrong", lambda model, ends: Evens(600))
    with pytest.raises(ConstraintError, match=r"a mask must be bool of shape \[752\]"):
        talker.decode([asked(wrong)])
    for sampling in (Sampling(choices=("a",)), Sampling(constraint={"regex": "a"})):
        with pytest.raises(InvalidRequestError, match="'even' conflicts with the sampling"):
            talker.decode(HEADER, [root], sampling=sampling, constraint=evens)
    for nonsense in ("even", Constraint("", evens.make), Constraint("even", None)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="constraint must be a Constraint"):
            talker.decode(HEADER, [root], constraint=nonsense)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$defs": {"a~/b": {"enum": [1]}, "c": {"$ref": "#/$defs/a~0~1b"}}, "anyOf": [{"$ref": "#/$defs/c"}]},
        {
            "$defs": {"tree": {"type": "object", "properties": {"of": {"$ref": "#/$defs/leaf"}}, "required": ["of"]},
                      "leaf": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "integer"}]}},
            "$ref": "#/$defs/tree",
        },
    ],
)  # fmt: skip
def test_a_schema_that_refers_to_itself_and_ends_leads(schema: dict[str, Any]) -> None:
    grammars.require_grammar(Grammar(kind="json_schema", text=json.dumps(schema)))


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ({"json_schema": {"not": {}}}, '"not"'),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}},
            "uniqueItems",
        ),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json_schema": '{"type": '}, "not valid JSON"),
        ({"json_schema": 5}, "must be an object"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "^a$"}, r"without \^ and \$"),
        ({"regex": "["}, "unclosed"),
        ({"grammar": "start: other"}, "other"),
    ],
)
def test_what_no_answer_can_be_led_by_is_refused_by_name(talker: Engine, constraint: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why) as refused:
        talker.decode(HEADER, sampling=with_(constraint))
    assert "json:" not in str(refused.value), "no place in a text that is not the caller's"
    assert isinstance(refused.value, InvalidRequestError)


def test_without_the_extra_a_line_says_what_to_install(talker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidRequestError, match=r"pip install 'choreo-agents\[guided\]'$"):
        grammars.require_grammar(Grammar(kind="regex", text="a"))
    with Script(default="Well.").load() as engine:
        assert "Well." in engine.text(engine.decode(engine.chat.header("ann")))
        with pytest.raises(InvalidRequestError, match=r"choreo-agents\[guided\]"):
            engine.decode(engine.chat.header("ann"), sampling=Sampling(constraint={"regex": "a"}))


def test_a_model_that_cannot_be_guided_says_all_else(tmp_path: Path, make_engine: MakeEngine) -> None:
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a")), eos_token="</s>"
    )
    engine = make_engine(load_model(save_tiny_llama(tmp_path, tokenizer=words)))
    assert len(engine.logprobs(engine.decode([0, 1], sampling=Sampling(max_tokens=3, stop_tokens=())))) == 3
    with pytest.raises(InvalidRequestError, match="use a model with byte-level tokens"):
        engine.decode([0, 1], sampling=Sampling(constraint={"regex": "a"}))


@pytest.mark.parametrize("family", ["Qwen 3", "DeepSeek R1 Distill", "gpt-oss"])
def test_a_model_thinks_first_and_then_its_guide_leads(family: str, tmp_path: Path, make_engine: MakeEngine) -> None:
    tokenizer = tokenizer_for(family)
    save_tiny_llama(tmp_path, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path, chat={"date": "2026-11-23"}))
    view = engine.prefill(engine.chat.turn("user", "Why?"), [engine.prefill(engine.chat.bos or " ")])
    asked = Decode(
        engine.chat.header("ann", thinking=True),
        [view],
        sampling=with_({"json_schema": SCHEMA}, seed=3, max_tokens=200),
        author="ann",
        turn_suffix=engine.chat.turn_end,
        thinking=Thinking.of(engine.chat, "ann", 12),
    )
    [handle] = engine.decode([asked])
    assert asked.thinking is not None
    header = engine.model.encode(asked.thinking.answer)
    text = engine.model.decode(engine.tokens(handle)[len(header) :], special=False)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert engine.inspect.thoughts(handle, "ann")
