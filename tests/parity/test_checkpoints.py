"""What people host is served exactly: one test for each mechanism, on a checkpoint of one of the families that have it.

Mechanisms are those of layers and rules of chat templates. The engine reads messages in another order and at other
places than they were encoded; the oracle encodes them anew, in doubles. In fp32 it may be as far from it as everywhere;
in bf16 four times as far as Hugging Face's own forward in bf16 is from its own in doubles, on the same tokens. With
`-m slow`, all families.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import FAMILIES, Family, checkpoint_tokenizer, save_checkpoint, save_small_files
from support.exact import TOLERANCE, exactly
from support.oracle import Oracle
from support.template_differences import explained_views
from torch import Tensor
from transformers import AutoModelForCausalLM

from choreo_agents import Decode, Engine, Memory, Sampling
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.chat.format import ChatFormat, Role
from choreo_agents.models.chat.template_analysis import chat_format

OF_ITS_OWN_ERROR = 4.0
"""As far as the reference's own error in bf16 may the engine be from doubles there."""


@dataclass(frozen=True)
class Mechanism:
    """Something that a model does, and who does it."""

    families: Sequence[str]
    """The first is tested; all are with `-m slow`."""
    shows: Callable[[Family, LoadedModel], bool]
    """Whether a loaded model of a family has it."""


def ropes(family: Family) -> set[str]:
    said: Mapping[str, Any] = family.settings.get("rope_parameters", {})
    parts = [part for part in said.values() if isinstance(part, dict)] or [said]
    return {part.get("rope_type", "default") for part in parts}


def has_rope(kind: str) -> Callable[[Family, LoadedModel], bool]:
    return lambda family, model: kind in ropes(family) and any(each.rotation for each in model.adapter.kinds)


def has(*names: str) -> Callable[[Family, LoadedModel], bool]:
    """Whether the model has a parameter whose name holds one of these."""
    return lambda _, model: any(
        any(name in parameter for name in names) for parameter, _ in model.adapter.model.named_parameters()
    )


def windows(_: Family, model: LoadedModel) -> set[int | None]:
    return {kind.window for kind in model.adapter.kinds}


def text_config(model: LoadedModel) -> Any:
    return model.adapter.model.config.get_text_config()


LLAMAS = ("Llama 3.2", "Llama 3.1", "DeepSeek R1 Distill Llama")
QWENS = ("Qwen 3", "Qwen 3 2507", "Qwen 3 MoE")
MECHANISMS: Mapping[str, Mechanism] = {
    "rope as usual": Mechanism(
        ("Qwen 2.5", "Mistral Nemo", "Mistral Small 3", "Phi-4", "SmolLM2", "Seed-OSS", "DeepSeek R1 Distill Qwen"),
        has_rope("default"),
    ),
    "rope of Llama 3": Mechanism(LLAMAS, has_rope("llama3")),
    "yarn": Mechanism(("OLMo 3", "gpt-oss"), has_rope("yarn")),
    "rope by type of layer": Mechanism(
        ("Gemma 3 1B", "Gemma 3 4B"), lambda family, _: ropes(family) == {"default", "linear"}
    ),
    "neighbours paired": Mechanism(
        ("ERNIE 4.5", "Command R7B", "GLM-4 0414"),
        lambda _, model: any(each.rotation and each.rotation.pairing == "neighbours" for each in model.adapter.kinds),
    ),
    "partial rotary": Mechanism(
        ("GLM-4 0414", "GLM-4.5"),
        lambda _, model: all(
            each.rotation is not None and each.rotation.dimensions < model.adapter.geometry.head_dim
            for each in model.adapter.kinds
        ),
    ),
    "layers without rope": Mechanism(
        ("SmolLM3", "Command R7B", "EXAONE 4"),
        lambda _, model: {each.rotation is None for each in model.adapter.kinds} == {True, False},
    ),
    "norm of queries and keys": Mechanism((*QWENS, "OLMo 2", "OLMo 3", "Gemma 3 1B", "GLM-4.5"), has("q_norm")),
    "norm after the layer": Mechanism(("OLMo 2", "OLMo 3", "Gemma 2", "EXAONE 4"), has("post_feedforward_layernorm")),
    "bias of queries and keys": Mechanism(
        ("Seed-OSS", "Qwen 2.5", "DeepSeek R1 Distill Qwen", "gpt-oss"), has("q_proj.bias")
    ),
    "a window in every layer": Mechanism(
        ("Phi-3 mini", "Mistral 7B v0.1"), lambda family, model: windows(family, model) == {9}
    ),
    "windows in some layers": Mechanism(
        ("EXAONE 4", "Gemma 2", "Gemma 3 1B", "OLMo 3", "Command R7B", "gpt-oss"),
        lambda family, model: windows(family, model) == {9, None},
    ),
    "sinks": Mechanism(("gpt-oss",), has("sinks")),
    "soft caps": Mechanism(("Gemma 2",), lambda _, model: all(each.softcap == 50.0 for each in model.adapter.kinds)),
    "experts": Mechanism(("Qwen 3 MoE", "gpt-oss", "GLM-4.5"), has("experts")),
    "tied head": Mechanism(
        ("Llama 3.2", "Qwen 2.5", "Qwen 3", "Gemma 2", "Granite 3.3", "SmolLM2"),
        lambda _, model: bool(text_config(model).tie_word_embeddings),
    ),
    "head of its own": Mechanism(
        ("Mistral 7B v0.3", "Llama 3.1", "Phi-4", "Mistral Nemo"),
        lambda _, model: not text_config(model).tie_word_embeddings,
    ),
    "multipliers": Mechanism(
        ("Granite 3.3", "Granite 4 micro"), lambda _, model: text_config(model).embedding_multiplier == 12.0
    ),
    "a wrapper around the text model": Mechanism(
        ("Gemma 3 4B",), lambda _, model: text_config(model) is not model.adapter.model.config
    ),
}
"""By name."""


@dataclass(frozen=True)
class TemplateRule:
    """Something that a chat template does, and whose do."""

    families: Sequence[str]
    """All of them."""
    shows: Callable[[ChatFormat], bool]
    """Whether a format has it."""
    reasons: frozenset[str] = frozenset()
    """Why what the first of them is fed differs from its template, beside names."""


DAY = {"date": "2026-11-23"}
WRITTEN = "November 23, 2026", "2026-11-23", "23 Nov 2026"
DISTILLS = ("DeepSeek R1 Distill Qwen", "DeepSeek R1 Distill Llama")
GEMMAS = ("Gemma 3 1B", "Gemma 2", "Gemma 3 4B")
FOLDED = ("Mistral 7B v0.3", "Mistral Nemo")
TEMPLATE_RULES: Mapping[str, TemplateRule] = {
    "default instructions": TemplateRule(
        ("Qwen 2.5", "Llama 3.1", "Llama 3.2", "Mistral Small 3", "Granite 3.3", "SmolLM3"),
        lambda chat: bool(chat.default_system),
    ),
    "a date": TemplateRule(
        ("Llama 3.1", "Llama 3.2", "gpt-oss", "Mistral Small 3", "Granite 3.3"),
        lambda chat: any(day in text for day in WRITTEN for text in (chat.bos, chat.system.plain, chat.default_system)),
    ),
    "instructions in every place": TemplateRule(
        (
            *(
                "Qwen 3",
                "Qwen 3 2507",
                "Qwen 3 MoE",
                "Qwen 2.5",
                "GLM-4.5",
                "GLM-4 0414",
                "OLMo 2",
                "OLMo 3",
                "gpt-oss",
            ),
            *("Llama 3.1", "Llama 3.2", "Mistral 7B v0.1", "Phi-3 mini", "Phi-4", "Granite 3.3", "Granite 4 micro"),
            *("SmolLM2", "Command R7B", "EXAONE 4", "Seed-OSS"),
        ),
        lambda chat: chat.later is not None,
        frozenset({"opens_thoughts", "thoughts"}),
    ),
    "later instructions that are dropped, hoisted or bare": TemplateRule(
        ("SmolLM3", *DISTILLS, "ERNIE 4.5"),
        lambda chat: chat.later is None and chat.merges is None,
        frozenset({"later_dropped", "opens_thoughts"}),
    ),
    "instructions in the user's turn": TemplateRule(
        (*GEMMAS, *FOLDED), lambda chat: chat.leads, frozenset({"later_raises", "merged", "joints"})
    ),
    "users and model take turns": TemplateRule(
        ("Mistral Small 3", *GEMMAS, *FOLDED),
        lambda chat: chat.merges is not None,
        frozenset({"later_raises", "merged", "no_opening"}),
    ),
    "nothing opens an answer": TemplateRule(
        ("Mistral Small 3", *FOLDED, "Mistral 7B v0.1"),
        lambda chat: chat.assistant.plain.strip() == "[/INST]",
        frozenset({"later_raises", "merged", "no_opening"}),
    ),
    "nothing closes a turn": TemplateRule(
        ("GLM-4.5", "GLM-4 0414"), lambda chat: not chat.turn_end, frozenset({"opens_thoughts", "thoughts"})
    ),
    "the last turn ends otherwise": TemplateRule(
        ("Phi-3 mini", "gpt-oss"), lambda chat: chat.turn_end.strip() == "<|end|>", frozenset({"last_end"})
    ),
    "it starts with a token": TemplateRule(
        (
            *(
                "Llama 3.1",
                "Llama 3.2",
                *DISTILLS,
                *GEMMAS,
                *FOLDED,
                "Mistral Small 3",
                "Mistral 7B v0.1",
                "GLM-4 0414",
            ),
            *("GLM-4.5", "OLMo 2", "Command R7B", "ERNIE 4.5", "gpt-oss"),
        ),
        lambda chat: bool(chat.bos),
    ),
    "thoughts": TemplateRule(
        ("Qwen 3", "Qwen 3 MoE", *DISTILLS, "gpt-oss", "GLM-4.5", "SmolLM3"),
        lambda chat: chat.thoughts is not None and chat.thoughts.usual,
        frozenset({"opens_thoughts", "thoughts"}),
    ),
    "the prompt opens the thoughts": TemplateRule(
        DISTILLS,
        lambda chat: "<think>" in (chat.answer or ""),
        frozenset({"later_hoisted"}),
    ),
    "channels": TemplateRule(
        ("gpt-oss",),
        lambda chat: "<|channel|>" in chat.assistant.plain,
        frozenset({"opens_thoughts", "thoughts", "last_end", "later_dropped"}),
    ),
}
"""By name."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint, made once."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = save_checkpoint(tmp_path_factory.mktemp("checkpoint"), name)
        return made[name]

    return of


def said(seed: int = 1) -> list[list[int]]:
    """Four messages and what is answered, in tokens that every vocabulary has."""
    rng = random.Random(seed)
    return [[rng.randrange(300, 4000) for _ in range(count)] for count in (13, 11, 7, 3, 6)]


def heard(model: LoadedModel) -> Tensor:
    """Logits of an answer about three messages, out of order and moved, [tokens, vocabulary]."""
    root, one, two, header, rest = said()
    seen: list[Tensor] = []
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        first = engine.prefill(root)
        second = engine.prefill(one, [first], [0], 13)
        third = engine.prefill(two, [first], [4], 17)
        watch = lambda logits: seen.append(logits.double())  # noqa: E731
        forced = Sampling(forced_token_ids=tuple(rest))
        engine.decode([Decode(header, [third, first, second], [0, 7, 20], 31, forced, logits_callback=watch)])
    return torch.stack(seen)


def expected(oracle: Oracle) -> Tensor:
    root, one, two, header, rest = said()
    first = oracle.encode(root, [], [], 0)
    second = oracle.encode(one, [first], [0], 13)
    third = oracle.encode(two, [first], [4], 17)
    answer = oracle.encode([*header, *rest], [third, first, second], [0, 7, 20], 31)
    return oracle.logits(answer)[len(header) - 1 : -1]


def own_error(path: Path, oracle: Oracle) -> float:
    """How far Hugging Face's forward in bf16 is from its own in doubles, on the same tokens in several orders.

    In one it may be near by chance: where rounding sends no token to another expert. Of each, the last tokens' logits:
    twice as many as an answer has.
    """
    whole = torch.tensor([token for message in said() for token in message])
    tokens = torch.stack([whole.roll(5 * number) for number in range(8)])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.inference_mode():
        rounded = model(input_ids=tokens, use_cache=False, logits_to_keep=12).logits.double()
    with exactly():
        exact = oracle.model(input_ids=tokens, use_cache=False, logits_to_keep=12).logits
    return float((rounded - exact).abs().max())


def require_exact(path: Path) -> tuple[LoadedModel, LoadedModel]:
    """The engine's models in fp32 and bf16, both as near to doubles as they should be."""
    oracle = Oracle(path)
    wanted = expected(oracle)
    full, half = load_model(path, dtype=torch.float32), load_model(path, dtype=torch.bfloat16)
    error, allowed = float((heard(full) - wanted).abs().max()), OF_ITS_OWN_ERROR * own_error(path, oracle)
    assert error <= TOLERANCE
    rounded = float((heard(half) - wanted).abs().max())
    print(f"{error:.1e} in fp32, {rounded:.2g} in bf16 of {allowed:.2g}")  # noqa: T201
    assert rounded <= allowed
    return full, half


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_is_exact_in_reordered_views(mechanism: str, folder: Callable[[str], Path]) -> None:
    name = MECHANISMS[mechanism].families[0]
    full, half = require_exact(folder(name))
    for model in (full, half):
        assert MECHANISMS[mechanism].shows(FAMILIES[name], model)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_exact_and_has_what_it_is_said_to_have(name: str, folder: Callable[[str], Path]) -> None:
    full, _ = require_exact(folder(name))
    for mechanism, each in MECHANISMS.items():
        if name in each.families:
            assert each.shows(FAMILIES[name], full), mechanism


@cache
def formats() -> Mapping[str, ChatFormat]:
    """Of all families."""
    return {name: chat_format(checkpoint_tokenizer(family), DAY) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("rule", TEMPLATE_RULES)
def test_a_template_rule_is_kept_but_for_known_reasons(rule: str, tmp_path: Path) -> None:
    """Token by token; and these families have it, and no others."""
    each = TEMPLATE_RULES[rule]
    assert {name for name, chat in formats().items() if each.shows(chat)} == set(each.families)
    views = explained_views(save_small_files(tmp_path, each.families[0]), DAY)
    assert all(view.explained and view.compared.template_tokens for view in views)
    assert {name for view in views for name in view.names} == each.reasons | {"names"}


def test_every_family_is_named_and_twenty_of_them_are_recent() -> None:
    named = {name for mechanism in MECHANISMS.values() for name in mechanism.families}
    assert named == FAMILIES.keys() and len(named) >= 24


@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen 3", "Gemma 3 1B", "gpt-oss", "Phi-3 mini"])
def test_words_become_the_familys_own_tokens(name: str, folder: Callable[[str], Path]) -> None:
    """Markers have their real ids, each is one token, and turns are fed as the template writes them."""
    path, family = folder(name), FAMILIES[name]
    model = load_model(path)
    for token, number in family.specials.items():
        assert model.encode(token) == [number] and model.decode([number]) == token
    chat, words = model.chat, ["Be brief.", "Where is the café?", "Left.", "And then?"]
    roles: tuple[Role, ...] = ("system", "user", "assistant", "user")
    written = chat.root(words[0])
    for role, text in zip(roles[1:], words[1:], strict=True):
        written += chat.turn(role, text)
    assert model.decode(model.encode(written)) == written.text
    views = explained_views(path, {})
    assert all(view.explained and view.compared.template_tokens for view in views)
