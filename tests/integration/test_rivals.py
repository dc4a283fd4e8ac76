"""Rivals that are installed say what Hugging Face says; one that is not keeps nobody from being timed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.tiny import save_tiny_llama
from transformers import AutoModelForCausalLM

from choreo_agents.bench.rivals import Absent, LlamaCpp, Vllm
from choreo_agents.bench.rivals.base import absent_on_failure, paths
from choreo_agents.bench.rivals.llama_gguf import _interleaved, write_gguf
from choreo_agents.bench.speed import SCENARIOS, measure_all, scaled

LEVELS = [[list(range(5, 25))], [[9, 10, 40], [11, 12]]]
MESSAGES, NEW = [list(range(5, 14)), list(range(30, 37)), list(range(50, 61))], [8, 9]
ORDERS = [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 32, the smallest that every rival takes."""
    return save_tiny_llama(tmp_path_factory.mktemp("rivals"), hidden_size=128)


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


def test_a_rival_that_is_not_installed_is_named_and_the_others_are_timed(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("vllm", "llama_cpp"):
        monkeypatch.setattr(f"choreo_agents.bench.rivals.{module}.find_spec", lambda name: None)
    scenarios = [scaled(SCENARIOS[0], 0.01), scaled(SCENARIOS[2], 0.005)]
    report = measure_all(tiny_path, torch.float32, scenarios, repeats=1)
    for scenario in scenarios:
        found = report.results[scenario.name]
        assert found["vLLM"].absent == "vllm is not installed"
        for mode in ("prefix", "choreography"):
            assert found[f"llama.cpp {mode}"].absent == "llama-cpp-python is not installed"
        assert found["choreo"].middle > 0 and found["HF dynamic"].middle > 0


def test_what_a_rival_raises_is_the_reason_of_its_absence() -> None:
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
    rival = Vllm(path, dtype, 512, 4, compiled=False)
    assert (dict(os.environ), torch.get_num_threads(), torch.set_num_threads) == before
    timer = rival.first_token(MESSAGES, (2, 0, 1), NEW)
    said, prompts = [], []
    for call in (1, 2):
        assert timer() > 0
        said += rival.said[0]
        prompts.append([3 + (token + 7 * call) % 290 for index in (2, 0, 1) for token in MESSAGES[index]] + NEW)
    timer = rival.decode(LEVELS, 4, 3)
    assert timer() > 0 and timer() > 0
    assert [len(answer) for answer in rival.said] == [4] * 4
    said += [answer[0] for answer in rival.said]
    assert agree(dtype, said, [answer[0] for answer in greedy(path, dtype, prompts + branch_prompts(4), 1)])
    if dtype == torch.float32:
        assert rival.said == greedy(path, dtype, branch_prompts(4), 4)
    rival.close()
    assert (dict(os.environ), torch.get_num_threads(), torch.set_num_threads) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_reuses_a_prefix_and_says_what_the_model_says(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    said, prompts = [], []
    for order in ORDERS:
        rival = LlamaCpp(path, dtype, "prefix", 256)
        timer = rival.first_token(MESSAGES, order, NEW)
        for _ in range(2):
            assert timer() > 0
            said += rival.said
            prompts.append([token for index in order for token in MESSAGES[index]] + NEW)
        rival.close()
    assert agree(dtype, said, [answer[0] for answer in greedy(path, dtype, prompts, 1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_cpp_decodes_branches_over_shared_cells(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    rival = LlamaCpp(path, dtype, "prefix", 512)
    timer = rival.decode(LEVELS, 4, 3)
    wanted = greedy(path, dtype, branch_prompts(4), 4)
    for _ in range(2):
        assert timer() > 0
        assert agree(dtype, rival.said[:4], [answer[0] for answer in wanted])
        if dtype == torch.float32:
            assert rival.said == [answer[step] for step in range(4) for answer in wanted]
    rival.close()


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
    rival = LlamaCpp(path, torch.float32, "choreography", 256)
    timer = rival.first_token(MESSAGES, order, NEW)
    for _ in range(3):
        assert timer() > 0
        assert rival.said == [int(logits.argmax())]
    with pytest.raises(Absent, match=r"see llama\.cpp prefix"):
        rival.decode(LEVELS, 4, 3)
    rival.close()


def test_only_plain_llamas_are_converted(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    scaled_rope = save_tiny_llama(tmp_path / "llama3", rope="llama3")
    with pytest.raises(Absent, match="only plain Llamas"):
        write_gguf(scaled_rope, torch.float32, tmp_path / "model.gguf")
