"""Parts of a synthesis problem: messages of everybody, of one worker, and of the synthesizer."""

from __future__ import annotations

from dataclasses import dataclass

from choreo_bench.language.problem import Problem, ProblemMessage


@dataclass(frozen=True)
class SpokenBranch:
    """A worker's private prompt and what it says."""

    private: tuple[ProblemMessage, ...]
    """In the order in which the worker reads them, after the trunk; the synthesizer never sees them."""
    words: ProblemMessage


@dataclass(frozen=True)
class Parts:
    """A synthesis problem, taken apart.

    trunk       rules, problem                        seen by all
    branches    trunk + private -> words              one worker each
    asks        trunk + words of every branch -> ask
    answer      trunk + words of every branch + asks -> answer
    """

    trunk: tuple[ProblemMessage, ...]
    branches: tuple[SpokenBranch, ...]
    asks: tuple[ProblemMessage, ...]
    answer: ProblemMessage

    @classmethod
    def of(cls, problem: Problem) -> Parts:
        """Take a problem apart.

        Raises:
            ValueError: It is no synthesis problem: it has no branches, more than the answer is to be said, or a
                message sees more or less than its part does, or in another order.
        """
        where = f"a problem of {problem.task!r} is not a synthesis:"
        spoken = [message for message in problem.messages if message.is_answer]
        if not problem.branches or len(spoken) != 1:
            raise ValueError(f"{where} it has {len(problem.branches)} branches and {len(spoken)} messages to answer")
        [answer] = spoken
        view = answer.parents
        if not set(problem.branches) <= set(view):
            raise ValueError(f"{where} the answer does not see every branch")
        first = view.index(problem.branches[0])
        trunk, asks = view[:first], view[first + len(problem.branches) :]
        if view != (*trunk, *problem.branches, *asks):
            raise ValueError(f"{where} the answer does not see its branches one after the other, as {view!r}")
        branches = tuple(_branch(problem, name, trunk) for name in problem.branches)
        for chain in [view, *(problem.by_name[name].parents for name in problem.branches)]:
            for place, name in enumerate(chain):
                own = problem.by_name[name]
                if name not in problem.branches and own.parents != chain[:place]:
                    raise ValueError(f"{where} {name!r} sees {own.parents!r} instead of {chain[:place]!r}")
        return cls(_messages(problem, trunk), branches, _messages(problem, asks), answer)


def _branch(problem: Problem, name: str, trunk: tuple[str, ...]) -> SpokenBranch:
    words = problem.by_name[name]
    if words.parents[: len(trunk)] != trunk or set(words.parents) & set(problem.branches):
        raise ValueError(f"the branch {name!r} of {problem.task!r} does not see the trunk, or sees another branch")
    return SpokenBranch(_messages(problem, words.parents[len(trunk) :]), words)


def _messages(problem: Problem, names: tuple[str, ...]) -> tuple[ProblemMessage, ...]:
    return tuple(problem.by_name[name] for name in names)
