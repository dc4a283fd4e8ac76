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
    "confusion": 0.3,
    "sums": 0.6,
    "orders": 0.4,
    "largest": 0.4,
    "recall": 0.8,
    "two_questions": 0.9,
    "branch_solve_merge": 0.7,
    "majority_vote": 1.2,
    "best_supported": 1.5,
    "list_union": 1.8,
    "sum_of_parts": 1.3,
    "two_hop": 0.5,
    "conflict": 1.4,
    "diagnosis": 2.0,
    "multi_document": 1.4,
    "trajectories": 0.6,
    "summary": 0.4,
    "arithmetic": 1.6,
    "check": 1.2,
    "choose_by_value": 1.6,
    "choose_by_index": 0.15,
    "moderated_debate": 0.35,
    "debate_turn": 1.6,
    "prisoners_dilemma": 0.15,
}
"""Problems of each task after the warm-up, in proportion. One that is said in many messages gives many transcripts."""


DRILLS: Mapping[str, float] = {
    "induction": 0.3,
    "confusion": 0.5,
    "recall": 0.6,
    "two_questions": 0.3,
    "sums": 1.0,
    "orders": 0.6,
    "largest": 0.4,
}
"""What the tasks are made of: finding facts again, sums, order. Many short transcripts, nearly all of them to learn."""


POLISH: Mapping[str, float] = {**MIX, "rules": 2.5, "reports": 1.0, "multi_document": 0.7}
"""The same once more, with drills of what was left: rules by two words at once, and many questions on long reports."""


@dataclass(frozen=True)
class TrainingRecipe:
    """Model size, data, optimisers and phases. The same recipe draws the same batches in the same order."""

    seed: int = 0
    shape: Shape = Shape()
    muon_learning_rate: float = 4e-3
    """Of the hidden matrices."""
    adamw_learning_rate: float = 3e-3
    """Of embeddings and norms."""
    step_batches: int = 2
    """Batches whose mean gradient makes a step; as many processes can share the work."""
    warmup_steps: int = 150
    last_learning_rate: float = 0.02
    """Share of the learning rates that is left at the end."""
    clip_norm: float = 1.0
    usual_learnt_tokens: float = 300.0
    """Of a batch: a batch's gradient is its sum over learnt tokens, divided by this."""
    hardest_after: int = 370
    """Buckets from the warm-up on after which problems are as hard as they get."""
    restarts: tuple[int, ...] = (740,)
    """Buckets at which the learning rates, fallen to their last share, start anew."""
    phases: tuple[Phase, ...] = field(
        default=(
            Phase(30, {"induction": 1.0}, batch_tokens=512, batches=128),
            Phase(70, DRILLS, batch_tokens=512, batches=128),
            Phase(640, MIX, batch_tokens=1024, batches=64),
            Phase(240, POLISH, batch_tokens=1024, batches=64, rate=0.5),
        )
    )

    def with_seed(self, seed: int) -> TrainingRecipe:
        """The same recipe with other random numbers."""
        return replace(self, seed=seed)

    @property
    def buckets(self) -> int:
        """Number of buckets of all phases."""
        return sum(phase.buckets for phase in self.phases)

    def phase(self, bucket: int) -> Phase:
        """The phase that a bucket belongs to."""
        first = 0
        for phase in self.phases:
            first += phase.buckets
            if bucket < first:
                return phase
        raise IndexError(f"bucket {bucket!r} is beyond the last phase")

    def hardness(self, bucket: int) -> float:
        """Return the hardness of problems at a bucket, from 0 after the warm-up to 1."""
        first = self.phases[0].buckets
        return min(1.0, max(0.0, (bucket - first) / self.hardest_after))

    def done(self, bucket: float) -> float:
        """The share of its cycle, from one restart of the learning rates to the next, that is done at a bucket."""
        ends = [0, *(restart for restart in self.restarts if restart < self.buckets), self.buckets]
        cycle = max(index for index, end in enumerate(ends[:-1]) if end <= bucket)
        return (bucket - ends[cycle]) / (ends[cycle + 1] - ends[cycle])


QUICK = TrainingRecipe(
    shape=Shape(hidden_size=64, intermediate_size=192, layers=3, heads=4, kv_heads=2, head_dim=16),
    step_batches=1,
    warmup_steps=40,
    hardest_after=75,
    restarts=(),
    phases=(
        Phase(60, {"induction": 1.0}, batch_tokens=256, batches=64),
        Phase(90, {"recall": 1.0}, batch_tokens=256, batches=64),
    ),
)
"""A few minutes: far from the shipped weights, but well beyond chance at recall."""
