"""Settings of a training run over traces: with the model and the traces they determine its result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from choreo_agents.arguments import Options


class TuneSettings(Options):
    """Hyperparameters for an adapter and a cache mapper. Frozen.

    Defaults are those of Prompt Choreography (section 3.2, footnote 7), where it gives any.
    """

    rank: int = Field(default=64, ge=0, description="Rank of the adapter; 0: none is trained.")
    alpha: float = Field(default=32.0, gt=0, description="The adapter adds alpha / rank times its product.")
    dropout: float = Field(default=0.05, ge=0, lt=1, description="Share of the adapter's inputs that are dropped.")
    targets: tuple[str, ...] = Field(
        default=(), description="Last names of the layers that are adapted; none: all linear ones."
    )
    mapper_rank: int | None = Field(
        default=0, ge=0, description="Rank of the cache mapper; 0: none is trained. None: a few per mille of the model."
    )
    boundaries: bool = Field(
        default=False,
        description="Whether a synthesizer reads a boundary behind each branch: the opening of a next turn.",
    )
    learning_rate: float = Field(default=2e-3, gt=0, description="Highest learning rate of the adapter.")
    mapper_learning_rate: float = Field(default=4e-3, gt=0, description="Highest learning rate of the cache mapper.")
    warmup: float = Field(default=0.05, ge=0, lt=1, description="Share of the run in which the learning rate rises.")
    final_rate: float = Field(default=0.1, ge=0, le=1, description="Share of the highest rate that the run ends with.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's.")
    clip_norm: float = Field(default=1.0, gt=0, description="Largest norm of the gradient.")
    epochs: int = Field(default=8, ge=1, description="Passes over the training traces.")
    batch_tokens: int = Field(default=2048, ge=1, description="Most tokens in one pass; a longer trace is alone.")
    patience: int = Field(default=3, ge=1, description="Epochs without a better held-out score before it stops.")
    keep: Literal["best", "last"] = Field(
        default="best",
        description="Epoch whose weights are saved: that with the best held-out score; or the last, better where "
        "learning rates decay to zero and scores are of few items.",
    )
    imitation: float = Field(
        default=0.0, ge=0, le=1, description="Share of the loss that compares with a teacher's distributions."
    )
    checkpointed: bool = Field(default=False, description="Compute layers again instead of keeping them: less memory.")
    seed: int = Field(default=0, ge=0, le=2**62, description="Seed of initial weights, order and dropout.")
