"""What agents read beside what chat templates write of it: equal, or different for reasons that are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import FAMILIES, save_small_files
from support.shipped import shipped_tokenizer
from support.template_differences import Comparing, ExplainedView, explained_views
from support.template_renderings import Reason
from support.templates import TEMPLATES, tokenizer_for, tokenizer_with

from choreo_agents.models.chat.template import Template
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.chat.thinking import find_switch
from choreo_agents.models.checking.needs import StoredWeights
from choreo_agents.models.checking.talk import views
from choreo_agents.models.files import write_tensors
from choreo_agents.models.safe_tokenization import safe_tokenizer

DAY = {"date": "2026-11-23"}
SHARED: Mapping[str, str] = {
    "Qwen 2.5": "names",
    "Qwen 3": "names opens_thoughts thoughts",
    "Qwen 3 Thinking": "names thoughts",
    "recalls": "names opens_thoughts thoughts",
    "Llama 3.1": "names",
    "Gemma 3": "later_raises merged names",
    "Gemma 2": "merged names no_system",
    "Phi-3": "last_end names",
    "Mistral Small 3": "later_raises merged names no_opening",
    "Mistral 7B v0.3": "last_user later_raises merged names no_opening",
    "DeepSeek R1 Distill": "later_hoisted names",
    "gpt-oss": "last_end later_dropped names opens_thoughts thoughts",
    "SmolLM3": "later_dropped names opens_thoughts",
    "GLM-4.5": "names opens_thoughts thoughts",
    "Granite 3.3": "names",
    "Granite 3.3 on request": "names",
    "Magistral": "names no_opening",
    "Magistral 2506": "names no_opening opens_thoughts thoughts",
    "Phi-4-reasoning": "names opens_thoughts",
    "DeepSeek V3.1": "later_joined names no_opening",
    "Nemotron Nano 2": "goes_on last_opening later_dropped names",
    "MiniMax-M2": "later_dropped names thoughts",
    "DeepSeek R1 0528 Distill": "later_joined names",
    "Command A": "names",
    "Llama 2": "later_raises merged names no_opening",
    "Qwen 3.5": "later_raises names",
    "Vicuna": "later_bare names",
    "always asks": "last_end names no_blank",
}
"""Why what stands on shared edges is not the template's. On reencoded ones others speak in users' turns where users and
model take turns, so that nothing is merged for the template alone, and it never goes on behind an answer."""

THINKS = "names opens_thoughts thoughts"
TAKES_TURNS = "later_raises merged names"
MISTRAL = f"{TAKES_TURNS} last_user no_opening"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("Qwen 3", "Qwen 3 MoE", "GLM-4.5"), THINKS),
    **dict.fromkeys(("DeepSeek R1 Distill Qwen", "DeepSeek R1 Distill Llama"), "later_hoisted names"),
    "gpt-oss": f"{THINKS} last_end later_dropped",
    "Gemma 2": "merged names no_system joints",
    **dict.fromkeys(("Gemma 3 1B", "Gemma 3 4B"), f"{TAKES_TURNS} joints"),
    **dict.fromkeys(("Mistral 7B v0.3", "Mistral Nemo"), f"{MISTRAL} joints"),
    "Mistral Small 3": f"{TAKES_TURNS} no_opening",
    "Mistral 7B v0.1": "names no_opening",
    "Phi-3 mini": "last_end names",
    "SmolLM3": "later_dropped names opens_thoughts",
    "ERNIE 4.5": "blank later_bare names",
}
"""Why families are fed otherwise than by their templates; all others for the names alone."""


def comparing(family: str, **options: Any) -> Comparing:
    tokenizer = tokenizer_for(family)
    template = Template(tokenizer, DAY | options)
    return Comparing(chat_format(tokenizer, DAY | options), template, safe_tokenizer(tokenizer))


def compared(family: str, *, encodes_again: bool = False, **options: Any) -> dict[str, ExplainedView]:
    with_template = comparing(family, **options)
    return {view.title: with_template.compare(view) for view in views(encodes_again=encodes_again)}


def names(*views: ExplainedView) -> set[str]:
    return {name for view in views for name in view.names}


@pytest.mark.parametrize("family", TEMPLATES)
def test_whatever_differs_from_a_template_has_its_reason(family: str) -> None:
    shared, reencoded = compared(family), compared(family, encodes_again=True)
    assert all(each.compared.template_tokens for each in (*shared.values(), *reencoded.values()))
    assert names(*shared.values()) == set(SHARED[family].split())
    takes_turns = comparing(family).chat.merges is not None
    never = {"merged", "no_opening"} if takes_turns else set[str]()
    assert names(*reencoded.values()) == set(SHARED[family].split()) - never
    if not takes_turns:
        assert [each.compared.tokens for each in shared.values()] == [
            each.compared.tokens for each in reencoded.values()
        ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_fed_as_its_template_has_it_but_for_known_reasons(name: str, tmp_path: Path) -> None:
    found = explained_views(save_small_files(tmp_path, name), DAY)
    assert all(each.explained for each in found) and names(*found) == set(REASONS.get(name, "names").split())


def test_what_has_no_difference_is_equal_and_what_is_equal_has_none() -> None:
    for family in TEMPLATES:
        for each in (*compared(family).values(), *compared(family, encodes_again=True).values()):
            assert each.compared.equal != bool({*names(each)} - {"later_raises", "no_system"}), family


def test_a_template_that_writes_names_is_followed_to_the_token() -> None:
    tokenizer = shipped_tokenizer()
    with_template = Comparing(chat_format(tokenizer), Template(tokenizer), safe_tokenizer(tokenizer))
    found = {view.title: with_template.compare(view) for view in views()}
    assert found["when all is said"].compared.equal
    assert names(*found.values()) == {"header_name"}
    [header] = found["Carol reads both"].differences
    assert header.places[-1][0].strip().endswith(":") and not header.places[-1][1]


def test_differences_say_what_stands_here_and_there() -> None:
    found = compared("Qwen 3")["Bob reads Ann"]
    places = {difference.reason: difference.places for difference in found.differences}
    assert places[Reason.NAMES] == [("Ann: ", "")]
    assert places[Reason.OPENS_THOUGHTS] == [("<think>\n", "")]
    [(here, there)] = places[Reason.THOUGHTS]
    assert not here and there == "<think>\nEleven less ten is one.\n</think>\n\n"
    assert "Eleven" not in found.text, "nobody is shown another's thoughts"


def test_without_thinking_answers_keep_the_empty_block_that_they_were_asked_for_with() -> None:
    found = compared("Qwen 3", enable_thinking=False)
    assert found["Ann speaks again"].text.count("<think>\n\n</think>\n\n") == 4, "three answers and a header"
    written = found["Ann speaks again"].compared.template_text
    assert written is not None and written.count("<think>\n\n</think>\n\n") == 2, "the last and a header"
    assert names(found["Ann speaks again"]) == {"names", "as_encoded", "last_opening"}
    assert names(*compared("GLM-4.5", enable_thinking=False).values()) == {"names", "as_encoded"}


@pytest.mark.parametrize("encodes_again", [True, False])
def test_what_makes_a_model_think_changes_no_reason_but_those_of_thoughts(encodes_again: bool) -> None:
    found = compared("DeepSeek V3.1", encodes_again=encodes_again, thinking=True)
    assert names(*found.values()) == {"later_joined", "names", "no_opening"}
    assert found["Ann answers"].text.endswith("<｜Assistant｜><think>")


def test_where_users_and_model_take_turns_others_speak_in_one_users_turn() -> None:
    said = "Bob: Half a coin: the bat costs ten and a half.\n\nCarol: Bob is right, it is half a coin."
    again = compared("Gemma 3", encodes_again=True)["Ann speaks again"]
    assert f"<start_of_turn>user\n{said}<end_of_turn>\n" in again.text
    assert again.text.count("<start_of_turn>model\n") == 2
    assert compared("Gemma 3")["Ann speaks again"].text.count("<start_of_turn>model\n") == 4


def test_what_nobody_can_explain_is_said_to_be_so() -> None:
    with_template = comparing("Qwen 2.5")
    chat = with_template.chat
    with_template.chat = replace(chat, user=replace(chat.user, plain="<|im_start|>user\n\n"))
    found = with_template.compare(views()[1])
    assert not found.explained and not found.compared.equal
    assert found.differences[-1].reason is Reason.UNKNOWN and found.differences[-1].places == [("\n", "")]


def test_without_a_template_there_is_nothing_to_compare() -> None:
    tokenizer = tokenizer_with(None, "<s>", None)
    with_template = Comparing(chat_format(tokenizer), Template(tokenizer), safe_tokenizer(tokenizer))
    found = with_template.compare(views()[3])
    assert found.compared.template_tokens is None and found.explained and not found.compared.equal
    assert found.text.endswith("Carol: Bob is right, it is half a coin.\nAssistant: Ann:")


def test_files_of_weights_say_what_they_take_in_another_dtype(tmp_path: Any) -> None:
    assert StoredWeights.read(tmp_path) is None
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.int8)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = StoredWeights.read(tmp_path)
    assert found is not None and found.dtype == torch.bfloat16
    assert found.served_bytes(torch.bfloat16) == 37 and found.served_bytes(torch.float32) == 67
    (tmp_path / "model.safetensors").write_bytes(b"\x01")
    with pytest.raises(OSError, match="damaged"):
        StoredWeights.read(tmp_path)


def test_templates_tell_what_turns_thinking_off() -> None:
    found = {family: find_switch(comparing(family).template)[0] for family in TEMPLATES}
    spoken = [family for family, switch in found.items() if switch == "/no_think"]
    assert spoken == ["Nemotron Nano 2"] and found["DeepSeek V3.1"] == "thinking" and found["Phi-4-reasoning"] is None
