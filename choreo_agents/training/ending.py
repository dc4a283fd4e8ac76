"""What a training run over traces ends with: the best weights, and a card that says how they came about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from choreo_agents.models.files import write_text
from choreo_agents.training.settings import as_now
from choreo_agents.training.tuning import Outcome, Passage, Tuning

CARD_FILE = "card.json"
Card = dict[str, Any]
_OF_THIS_TIME = {"command", "minutes", "torch", "device"}
"""What differs between two calls of one run."""
_SHARE = "share_of_model"
"""What was trained, in parameters of the model that it was trained for: older cards do not say it of every training."""


def run_and_keep(
    tuning: Tuning,
    out: Path,
    on_progress: Callable[[Passage], None],
    describe: Callable[[Outcome], Mapping[str, Any]],
    *,
    command: str = "",
) -> Card:
    """Train to the end and write the best weights, with a card; those of a run that ends as no number without one.

    A run that was finished before keeps its card: what it took then is what it took.

    Args:
        tuning: The run.
        out: Where weights and card go.
        on_progress: As for `Tuning.run`.
        describe: What the card says beside how the run went.
        command: That would do it again.

    Raises:
        TrainingError: As for `Tuning.run`.
        OSError: The weights cannot be written; what was there is left.
    """
    path = out / CARD_FILE
    try:
        outcome = tuning.run(on_progress)
    except BaseException:
        if tuning.ended:
            # A card that is there speaks of other weights.
            path.unlink(missing_ok=True)
            tuning.tuned.save(out)
        raise
    made: Card = json.loads(json.dumps({"command": command, **describe(outcome), **_card(tuning, outcome)}))
    known = _known(path, made)
    if known is not None and all(known.get(key) == made[key] for key in made.keys() - _OF_THIS_TIME):
        tuning.tuned.save(out)
        return known
    path.unlink(missing_ok=True)
    tuning.tuned.save(out)
    write_text(path, json.dumps(made, indent=2) + "\n")
    return made


def _card(tuning: Tuning, outcome: Outcome) -> Card:
    tuned = tuning.tuned
    return {
        "model": tuned.model.name,
        "weights": tuned.model.adapter.weights,
        "settings": tuned.settings.model_dump(mode="json"),
        "data_sha256": tuning.source.digest,
        "parameters": tuned.parameters,
        _SHARE: tuned.parameters / tuned.model.adapter.parameters,
        "best_epoch": outcome.best_epoch,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "history": outcome.history,
        "minutes": round(outcome.seconds / 60, 2),
        "torch": torch.__version__,
        "device": tuned.model.adapter.device.type,
    }


def _known(path: Path, made: Card) -> Card | None:
    """The card that is there, with what cards say by now."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return {_SHARE: made[_SHARE]} | found | {"settings": as_now(found.get("settings"))}
