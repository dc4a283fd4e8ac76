"""Trains the embedded model from scratch: `python -m choreo_agents.models.embedded.pretrain --help`.

Two ingredients decide whether it learns at all: an induction warm-up before any task, and Muon on the hidden
matrices. Each step's batch is drawn from (seed, step), so a killed run continues where its last checkpoint stands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.embedded.curriculum import TASKS, Transcript, Turn
from choreo_agents.models.embedded.tokenizer import build_tokenizer

IGNORED = -100


@dataclass(frozen=True)
class Phase:
    """A stretch of training: how many steps, and the share of each task in the mix."""

    steps: int
    mix: dict[str, float]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 0
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    initializer_range: float = 0.06
    batch_size: int = 32
    bucket_batches: int = 8
    muon_learning_rate: float = 4e-3
    adamw_learning_rate: float = 3e-3
    warmup_steps: int = 150
    clip_norm: float = 1.0
    phases: tuple[Phase, ...] = (
        Phase(1400, {"induction": 1.0}),
        Phase(1000, {"recall": 0.8, "induction": 0.2}),
        Phase(7600, {"recall": 0.25, "several_questions": 0.2, "debate": 0.55}),
    )

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def build_model(recipe: Recipe, vocabulary_size: int) -> LlamaForCausalLM:
    """A Llama of the recipe's size with random weights, vocabulary padded to a multiple of 16."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=math.ceil(vocabulary_size / 16) * 16,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        initializer_range=recipe.initializer_range,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Token ids of a transcript, and the same with every token ignored that is not to be learnt."""
    role_ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("system", "user", "assistant")}
    ids, labels = [tokenizer.bos_token_id], [IGNORED]
    prefixes = [f" {turn.name}:" if turn.name else "" for turn in turns]
    names = tokenizer(prefixes, add_special_tokens=False)["input_ids"]
    texts = tokenizer([f" {turn.text}" for turn in turns], add_special_tokens=False)["input_ids"]
    for turn, name, text in zip(turns, names, texts, strict=True):
        header, words = [role_ids[turn.role], *name], [*text, tokenizer.eos_token_id]
        ids += header + words
        labels += [IGNORED] * len(header) + (words if turn.learn else [IGNORED] * len(words))
    return ids, labels


def draw(recipe: Recipe, step: int) -> list[Transcript]:
    """The transcripts of the bucket that starts at `step`, shortest first."""
    start = 0
    for phase in recipe.phases:
        if step < start + phase.steps:
            break
        start += phase.steps
    hardness = min(1.0, max(0.0, (step - recipe.phases[0].steps) / (0.4 * recipe.total_steps)))
    rng = random.Random(f"train {recipe.seed} {step}")
    names = rng.choices(list(phase.mix), list(phase.mix.values()), k=recipe.batch_size * recipe.bucket_batches)
    return [TASKS[name](rng, hardness) for name in names]


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`bucket_batches` batches of (ids, labels), both [rows, tokens], of like lengths, in random order."""
    pairs = sorted((encode(tokenizer, turns) for turns in draw(recipe, step)), key=lambda pair: len(pair[0]))
    chunks = [pairs[i : i + recipe.batch_size] for i in range(0, len(pairs), recipe.batch_size)]
    random.Random(f"order {recipe.seed} {step}").shuffle(chunks)
    made = []
    for chunk in chunks:
        width = max(len(ids) for ids, _ in chunk)
        rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in chunk])
        labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in chunk])
        made.append((rows, labels))
    return made


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: str, count: int, seed: int) -> float:
    """Share of held-out transcripts whose every learnt token is the model's first choice."""
    right = 0
    rng = random.Random(f"held out {seed} {task}")
    for _ in range(count):
        ids, labels = encode(tokenizer, TASKS[task](rng, 1.0))
        choice = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].argmax(-1)
        wanted = torch.tensor(labels[1:])
        right += bool(((choice == wanted) | (wanted == IGNORED)).all())
    return right / count


def train(recipe: Recipe, out: Path, checkpoint: Path) -> None:
    """Run the recipe, resuming from `checkpoint` if it exists, and write weights, tokenizer and card to `out`."""
    tokenizer = build_tokenizer()
    model = build_model(recipe, len(tokenizer))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.muon_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.adamw_learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    schedules: list[torch.optim.lr_scheduler.LambdaLR] = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: _schedule(s, recipe.warmup_steps, recipe.total_steps))
        for o in optimizers
    ]
    parts: list[Any] = [*optimizers, *schedules]
    step, seen, elapsed = 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["recipe"] != json.dumps(asdict(recipe)):
            raise SystemExit(f"{checkpoint} was made by another recipe: remove it, or name another with --checkpoint")
        model.load_state_dict(state["model"])
        for part, saved in zip(parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        step, seen, elapsed = state["step"], state["seen"], state["elapsed"]
    started = time.perf_counter() - elapsed
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=recipe.total_steps, completed=step)
        while step < recipe.total_steps:
            for ids, labels in batches(recipe, tokenizer, step):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad(set_to_none=True)
                step, seen = step + 1, seen + ids.numel()
            progress.update(bar, completed=step, description=f"loss {loss.item():.3f}")
            if step % (recipe.bucket_batches * 25) == 0 or step >= recipe.total_steps:
                scores = {task: accuracy(model, tokenizer, task, 64, step) for task in TASKS}
                elapsed = time.perf_counter() - started
                state = {"recipe": json.dumps(asdict(recipe)), "step": step, "seen": seen, "elapsed": elapsed}
                state |= {"model": model.state_dict(), "parts": [part.state_dict() for part in parts]}
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, checkpoint.with_suffix(".partial"))
                checkpoint.with_suffix(".partial").replace(checkpoint)
                progress.console.print(
                    f"{step} steps, {seen / 1e6:.1f} M tokens, {elapsed / 60:.1f} min, loss {loss.item():.3f}, {scores}"
                )
    save(model, tokenizer, recipe, out, tokens_seen=seen, seconds=elapsed)


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    out: Path,
    *,
    tokens_seen: int,
    seconds: float,
) -> None:
    """Write the Hugging Face files and `card.json` (recipe, accuracies, digest of the weights)."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tensors = {name: p.contiguous() for name, p in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    card = {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": tokens_seen,
        "training_minutes": round(seconds / 60, 1),
        "held_out_exact_match": {task: accuracy(model, tokenizer, task, 500, -1) for task in TASKS},
        "weights_sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")


def _schedule(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch.")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="where weights, tokenizer and card go")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/embedded/checkpoint.pt"), help="resume file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(Recipe(seed=options.seed), options.out, options.checkpoint)


if __name__ == "__main__":
    main()
