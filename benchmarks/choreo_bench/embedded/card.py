"""Files that end a training run: weights, tokenizer and a card that records how they were made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import TrainingError
from choreo_agents.models.files import write_tensors
from choreo_agents.training.tuning import CARD_FILE
from choreo_bench.embedded.pretrain import Pretraining
from choreo_bench.evaluation import Evaluation, evaluate
from choreo_bench.harness import Table
from choreo_bench.language import Task
from choreo_bench.language.tasks import Recall

WEIGHTS_FILE = "model.safetensors"
KV_BUDGET_BYTES = 1 << 29
QUICK_TASK = Recall(documents=1, facts=4, questions=1, unknown=0.0, name="recall_of_4")
QUICK_BAR = 0.75
"""Share of right answers that a quick run must reach; naming one of the four facts at random reaches 0.25."""


def save_model(run: Pretraining, out: Path) -> None:
    """Write the weights, configuration and tokenizer in Hugging Face's ordinary files.

    A card that is there already speaks of other weights, so it goes.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / CARD_FILE).unlink(missing_ok=True)
    run.tokenizer.save_pretrained(out)
    run.model.config.save_pretrained(out)
    run.model.generation_config.save_pretrained(out)
    tensors = dict(run.model.state_dict())
    tensors.pop("lm_head.weight")  # the embedding matrix again
    write_tensors(out / WEIGHTS_FILE, tensors)


def score_model(out: Path, tasks: Sequence[Task], count: int) -> Evaluation:
    """Score the saved weights on the test split, in ordinary prompts."""
    with Engine.load(out, method="baseline", memory=Memory(kv_budget_bytes=KV_BUDGET_BYTES)) as engine:
        return evaluate(engine, tasks, count=count)


def write_card(run: Pretraining, out: Path, evaluation: Evaluation) -> Path:
    """Write `card.json` beside the weights."""
    card: dict[str, Any] = {
        "recipe": asdict(run.recipe),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "tokens_seen": run.tokens,
        "steps": run.step,
        "minutes": round(run.seconds / 60, 1),
        "device": run.device.type,
        "torch": torch.__version__,
        "compiled": run.compiled,
        "test_accuracy": {
            name: {
                "share": result.solved.share,
                "interval": [round(bound, 4) for bound in result.solved.interval()],
                "count": result.solved.count,
            }
            for name, result in evaluation.results.items()
        },
        "weights_sha256": weights_sha256(out),
    }
    path = out / CARD_FILE
    path.write_text(json.dumps(card, indent=2) + "\n")
    return path


def weights_sha256(folder: Path) -> str:
    """Digest of a folder's weights file."""
    return hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()


def accuracy_table(evaluation: Evaluation) -> Table:
    """Make a row for each task."""
    rows = []
    for name, result in evaluation.results.items():
        low, high = result.solved.interval()
        rows.append([name.replace("_", " "), f"{result.solved.share:.3f}", f"{low:.3f} to {high:.3f}"])
    return Table(["task", "right", "95 % interval"], rows, "test split, ordinary prompts")


def require_learnt(evaluation: Evaluation) -> None:
    """Raise `TrainingError` if a quick run learnt next to nothing."""
    share = evaluation.results[QUICK_TASK.name].solved.share
    if share < QUICK_BAR:
        raise TrainingError(
            f"{share:.0%} of the answers are right, less than {QUICK_BAR:.0%}: the run learnt next to nothing (chance "
            "is 25 %)"
        )
