"""Everything that decides the embedded model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Shape:
    """The size of the Llama that is trained."""

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    initializer_range: float = 0.06
    longest_context: int = 2048
    """Tokens."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training. A bucket's transcripts are drawn together; training resumes between buckets."""

    buckets: int
    mix: Mapping[str, float]
    """The share of each task among the problems drawn."""
    batch_tokens: int = 2048
    """Tokens of a batch at most, padding included. What is learnt first takes many steps rather than many tokens."""
    batches: int = 32
    """Batches' worth of transcripts in a bucket, sorted by length."""
    rate: float = 1.0
    """Share of the learning rates: high to find out what to look at, lower to get many things right at once."""


MIX: Mapping[str, float] = {
    "recall": 1.2,
    "two_questions": 1.6,
    "branch_solve_merge": 0.4,
    "majority_vote": 1.0,
    "best_supported": 0.8,
    "list_union": 1.2,
    "sum_of_parts": 1.1,
    "two_hop": 0.9,
    "conflict": 0.9,
    "diagnosis": 1.1,
    "multi_document": 0.8,
    "trajectories": 0.7,
    "summary": 0.3,
    "arithmetic": 1.6,
    "check": 0.8,
    "choose_by_value": 0.8,
    "choose_by_index": 0.3,
    "moderated_debate": 0.4,
    "debate_turn": 1.6,
    "prisoners_dilemma": 0.15,
}
"""Problems of each task in the main phase, in proportion. One that is said in many messages gives many transcripts."""


HARD_MIX: Mapping[str, float] = dict(MIX) | {
    "recall": 0.5,
    "two_questions": 0.8,
    "majority_vote": 0.8,
    "best_supported": 1.0,
    "list_union": 2.0,
    "sum_of_parts": 1.6,
    "two_hop": 0.4,
    "conflict": 1.2,
    "diagnosis": 1.0,
    "multi_document": 1.0,
    "trajectories": 0.8,
    "summary": 0.5,
    "arithmetic": 2.2,
    "check": 1.0,
    "choose_by_value": 0.7,
    "choose_by_index": 0.2,
    "moderated_debate": 0.5,
}
"""The same with more of what takes longer to learn."""


@dataclass(frozen=True)
class Recipe:
    """Model size, data, optimisers and phases. The same recipe draws the same batches in the same order."""

    seed: int = 0
    shape: Shape = Shape()
    muon_learning_rate: float = 4e-3
    """Of the hidden matrices."""
    adamw_learning_rate: float = 3e-3
    """Of embeddings and norms."""
    warmup_steps: int = 150
    last_learning_rate: float = 0.02
    """Share of the learning rates that is left at the end."""
    clip_norm: float = 1.0
    usual_learnt_tokens: float = 300.0
    """Of a batch: a batch's gradient is its sum over learnt tokens, divided by this."""
    hardest_at: float = 0.35
    """Share of the training after which problems are as hard as they get."""
    phases: tuple[Phase, ...] = field(
        default=(
            Phase(34, {"induction": 1.0}, batch_tokens=1024, batches=64),
            Phase(56, {"recall": 0.5, "two_questions": 0.3, "confusion": 0.2}),
            Phase(168, MIX),
            Phase(572, HARD_MIX, rate=0.4),
        )
    )

    def with_seed(self, seed: int) -> Recipe:
        """The same recipe with other random numbers."""
        return replace(self, seed=seed)

    @property
    def buckets(self) -> int:
        """Of all phases."""
        return sum(phase.buckets for phase in self.phases)

    def phase(self, bucket: int) -> Phase:
        """The phase that a bucket belongs to."""
        first = 0
        for phase in self.phases:
            first += phase.buckets
            if bucket < first:
                return phase
        raise IndexError(f"bucket {bucket!r} lies beyond the last phase")

    def hardness(self, bucket: int) -> float:
        """From 0 after the warm-up to 1."""
        first = self.phases[0].buckets
        return min(1.0, max(0.0, (bucket - first) / (self.hardest_at * self.buckets)))


QUICK = Recipe(
    shape=Shape(hidden_size=64, intermediate_size=192, layers=3, heads=4, kv_heads=2, head_dim=16),
    warmup_steps=40,
    phases=(
        Phase(70, {"induction": 1.0}, batch_tokens=1024, batches=16),
        Phase(60, {"recall": 1.0}, batch_tokens=1024, batches=16),
    ),
)
"""A few minutes: far from the shipped weights, but well beyond chance at recall."""
