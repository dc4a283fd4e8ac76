"""Synthesis problems as a synthesizer sees them: a trunk, branches that leave it, and what it is asked."""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.models import LoadedModel
from choreo_agents.training.synthesis_traces import Fan, Span, boundaries_of, root_of, span
from choreo_bench.language import Problem, ProblemMessage
from choreo_bench.language.synthesis import Parts


def fan_of(model: LoadedModel, problem: Problem, *, id: str, answer: Sequence[int] | None = None) -> Fan:  # noqa: A002
    """A synthesis problem's messages as tokens, as an engine would encode them.

    Args:
        model: Its tokenizer and chat turns.
        problem: A synthesis problem.
        id: Of the traces that are made of it.
        answer: All tokens of the answer's message, its header included; None: what would be right.

    Raises:
        ValueError: It is no synthesis problem.
        TrainingError: The tokens do not start with the header that a decode starts with.
    """
    parts = Parts.of(problem)
    last = parts.answer
    said = span(model, last.name, last.role, last.text, last.author, learn=True, tokens=answer)
    branches = tuple(
        (tuple(_given(model, message) for message in branch.private), _given(model, branch.words))
        for branch in parts.branches
    )
    return Fan(
        id,
        (*root_of(model), *(_given(model, message) for message in parts.trunk)),
        branches,
        (*(_given(model, message) for message in parts.asks), said),
        boundaries_of(model, [words for _, words in branches]),
    )


def _given(model: LoadedModel, message: ProblemMessage) -> Span:
    return span(model, message.name, message.role, message.text, message.author)
