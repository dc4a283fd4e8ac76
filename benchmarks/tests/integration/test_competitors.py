"""Competitors that are installed say what Hugging Face says; one that is not keeps nobody from being timed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from choreo_bench.competitors import Absent, ChatHuggingFaceDebate, LlamaCpp, Vllm
from choreo_bench.competitors.base import absent_on_failure, paths
from choreo_bench.competitors.chat_hugging_face import ForcedCall
from choreo_bench.competitors.llama_gguf import _interleaved, write_gguf
from choreo_bench.experiments.bench_engine.measure import measure_all, scenarios_named
from support.tiny import save_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from choreo_agents.models.random_llama import LlamaShape, save_random_llama

LEVELS = [[list(range(5, 25))], [[9, 10, 40], [11, 12]]]
MESSAGES, NEW = [list(range(5, 14)), list(range(30, 37)), list(range(50, 61))], [8, 9]
ORDERS = [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 32, the smallest that every competitor takes."""
    return save_tiny_llama(tmp_path_factory.mktemp("competitors"), hidden_size=128)


def greedy(path: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What the model's own `generate` says after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    answers = []
    for prompt in prompts:
        given = torch.tensor([list(prompt)])
        said = model.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=None)
        answers.append(said[0, given.shape[1] :].tolist())
    return answers


def agree(dtype: torch.dtype, said: Sequence[int], wanted: Sequence[int]) -> bool:
    """All of them in float32; in bfloat16 near ties fall either way."""
    same = [a == b for a, b in zip(said, wanted, strict=True)]
    return all(same) if dtype == torch.float32 else 2 * sum(same) > len(same)


def branch_prompts(branches: int) -> list[list[int]]:
    return [
        [token for level, index in path for token in LEVELS[level][index]] + [3 + branch]
        for branch, path in enumerate(paths(LEVELS, branches))
    ]


@pytest.mark.slow
def test_a_competitor_that_is_not_installed_is_named_and_the_others_are_timed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("vllm", "llama_cpp"):
        monkeypatch.setattr(f"choreo_bench.competitors.{module}.find_spec", lambda name: None)
    scenarios = [*scenarios_named(["reordered"], 0.01), *scenarios_named(["1 branch "], 0.005)]
    report = measure_all(tiny_path, torch.float32, scenarios, repeats=1)
    for scenario in scenarios:
        found = report.results[scenario.name]
        assert found["vLLM"].absent == "vllm is not installed"
        for mode in ("prefix", "choreography"):
            assert found[f"llama.cpp {mode}"].absent == "llama-cpp-python is not installed"
        assert found["choreo"].spread.middle > 0 and found["HF dynamic"].spread.middle > 0


def test_what_a_competitor_raises_is_the_reason_of_its_absence() -> None:
    with pytest.raises(Absent, match=r"^it fails: ValueError no such shape$"), absent_on_failure("it"):
        raise ValueError("no such shape\nat all")
    with pytest.raises(Absent, match=r"^too long$"), absent_on_failure("it"):
        raise Absent("too long")


def test_rotated_pairs_come_to_stand_side_by_side() -> None:
    weight = torch.arange(8.0)[:, None].expand(8, 3)
    assert _interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_vllm_says_what_the_model_says_and_leaves_the_process_as_it_was(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("vllm")
    before = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    competitor = Vllm(path, dtype, 512, 4, compiled=False)
    assert (dict(os.environ), torch.get_num_threads(), torch.set_num_threads) == before
    timer = competitor.first_token(MESSAGES, (2, 0, 1), NEW)
    said, prompts = [], []
    for call in (1, 2):
        assert timer() > 0
        said += competitor.said[0]
        prompts.append([3 + (token + 7 * call) % 290 for index in (2, 0, 1) for token in MESSAGES[index]] + NEW)
    timer = competitor.decode(LEVELS, 4, 3)
    assert timer() > 0 and timer() > 0
    assert [len(answer) for answer in competitor.said] == [4] * 4
    said += [answer[0] for answer in competitor.said]
    assert agree(dtype, said, [answer[0] for answer in greedy(path, dtype, prompts + branch_prompts(4), 1)])
    if dtype == torch.float32:
        assert competitor.said == greedy(path, dtype, branch_prompts(4), 4)
    competitor.close()
    assert (dict(os.environ), torch.get_num_threads(), torch.set_num_threads) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_reuses_a_prefix_and_says_what_the_model_says(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    said, prompts = [], []
    for order in ORDERS:
        competitor = LlamaCpp(path, dtype, "prefix", 256)
        timer = competitor.first_token(MESSAGES, order, NEW)
        for _ in range(2):
            assert timer() > 0
            said += competitor.said
            prompts.append([token for index in order for token in MESSAGES[index]] + NEW)
        competitor.close()
    assert agree(dtype, said, [answer[0] for answer in greedy(path, dtype, prompts, 1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_decodes_branches_over_shared_cells(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    competitor = LlamaCpp(path, dtype, "prefix", 512)
    timer = competitor.decode(LEVELS, 4, 3)
    wanted = greedy(path, dtype, branch_prompts(4), 4)
    for _ in range(2):
        assert timer() > 0
        assert agree(dtype, competitor.said[:4], [answer[0] for answer in wanted])
        if dtype == torch.float32:
            assert competitor.said == [answer[step] for step in range(4) for answer in wanted]
    competitor.close()


@pytest.mark.parametrize("order", ORDERS)
def test_llama_cpp_moves_messages_that_did_not_see_each_other(path: Path, order: tuple[int, ...]) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    asked = [MESSAGES[index] for index in order]
    prompt = [token for tokens in asked for token in tokens] + NEW
    sees = torch.block_diag(*[torch.ones(len(tokens), len(tokens)) for tokens in [*asked, NEW]]).tril()
    sees[-len(NEW) :, : -len(NEW)] = 1
    mask = torch.zeros_like(sees).masked_fill(sees == 0, torch.finfo(torch.float32).min)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.inference_mode():
        logits = model(
            torch.tensor([prompt]), attention_mask=mask[None, None], position_ids=torch.arange(len(prompt))[None]
        ).logits[0, -1]
        plain = model(torch.tensor([prompt])).logits[0, -1]
    assert (logits - plain).abs().max() > 0.1
    competitor = LlamaCpp(path, torch.float32, "choreography", 256)
    timer = competitor.first_token(MESSAGES, order, NEW)
    for _ in range(3):
        assert timer() > 0
        assert competitor.said == [int(logits.argmax())]
    with pytest.raises(Absent, match=r"see llama\.cpp prefix"):
        competitor.decode(LEVELS, 4, 3)
    competitor.close()


def test_only_plain_llamas_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    scaled_rope = save_tiny_llama(tmp_path / "llama3", rope="llama3")
    with pytest.raises(Absent, match="only plain Llamas"):
        write_gguf(scaled_rope, torch.float32, tmp_path / "model.gguf")


AGENTS, SYSTEM, QUESTION = ("Clara", "Alice", "Bruno"), "Agents answer.", "How many kites?"
SAID = {
    (name, turn): f"{name} has {10 * turn + place} {'red ' * (turn + place)}kites."
    for turn in range(3)
    for place, name in enumerate(AGENTS)
}


@pytest.fixture(scope="module")
def debate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ChatHuggingFaceDebate, Any]]:
    """The competitor, and the tokenizer of its model."""
    pytest.importorskip("langchain_huggingface")
    folder = tmp_path_factory.mktemp("debate")
    save_random_llama(LlamaShape(2, 64, 128, 4, 2, 800), folder)
    competitor = ChatHuggingFaceDebate(folder, torch.float32)
    yield competitor, AutoTokenizer.from_pretrained(folder)
    competitor.close()


def test_chat_hugging_face_says_exactly_what_it_must(debate: tuple[ChatHuggingFaceDebate, Any]) -> None:
    competitor, tokenizer = debate
    end = tokenizer.eos_token_id

    def said(name: str, turn: int) -> list[int]:
        # An end in its midst is a token like any other.
        first, *others = tokenizer.encode(f" {SAID[name, turn]}")
        return [first, end, *others, end]

    before = dict(os.environ)
    run = competitor.debate(AGENTS, rounds=2, system=SYSTEM, question=QUESTION, texts=said)
    assert dict(os.environ) == before
    assert run.answers == tuple(SAID[name, turn] for turn in range(2) for name in AGENTS)
    assert run.calls == len(run.ttft_s) == 6
    assert min(run.ttft_s) > 0
    assert sum(run.ttft_s) < run.end_to_end_s


def test_chat_hugging_face_makes_one_call_at_a_time(
    debate: tuple[ChatHuggingFaceDebate, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, make, made = Lock(), ForcedCall.make, 0

    def alone(call: ForcedCall, chat: Any, messages: list[Any]) -> str:
        nonlocal made
        assert busy.acquire(blocking=False)
        try:
            made += 1
            # Long enough for one beside it to come.
            time.sleep(0.02)
            return make(call, chat, messages)
        finally:
            busy.release()

    monkeypatch.setattr(ForcedCall, "make", alone)
    debate[0].debate(AGENTS, rounds=2, system=SYSTEM, question=QUESTION, texts=lambda name, turn: [9])
    assert made == 6


def test_chat_hugging_face_encodes_the_whole_chat_in_every_call(debate: tuple[ChatHuggingFaceDebate, Any]) -> None:
    competitor, tokenizer = debate
    run = competitor.debate(
        AGENTS,
        rounds=3,
        system=SYSTEM,
        question=QUESTION,
        texts=lambda name, turn: tokenizer.encode(f" {SAID[name, turn]}"),
    )
    wanted = []
    for turn in range(3):
        for name in AGENTS:
            spans = [f"<s><|system|> {SYSTEM}", f"<|user|> {QUESTION}"]
            spans += [f"<|assistant|> {SAID[name, known]}" for known in range(turn)]
            spans += [
                f"<|user|> {other}: {SAID[other, turn - 1]}" for other in sorted(AGENTS) if turn and other != name
            ]
            wanted.append(tuple(tokenizer.encode("".join(f"{span}<|end|>" for span in spans) + "<|assistant|>")))
    assert run.prompts == tuple(wanted)
    assert run.prompt_tokens == tuple(len(prompt) for prompt in wanted)


def test_chat_hugging_face_that_is_not_installed_is_named(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_bench.competitors.chat_hugging_face.find_spec", lambda name: None)
    with pytest.raises(Absent, match=r"^langchain-huggingface is not installed$"):
        ChatHuggingFaceDebate(tiny_path, torch.float32)
