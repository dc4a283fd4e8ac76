"""The tasks: each draws problems of one kind, at a difficulty that its fields set."""

from __future__ import annotations

from collections.abc import Mapping

from choreo_bench.language.tasks.arithmetic import Arithmetic, Check, Choose
from choreo_bench.language.tasks.base import Draft, Task
from choreo_bench.language.tasks.choosing import BestSupported, Conflict, MajorityVote
from choreo_bench.language.tasks.debate import Debate, DebateTurn
from choreo_bench.language.tasks.dilemma import PrisonersDilemma
from choreo_bench.language.tasks.merging import BranchSolveMerge, ListUnion, SumOfParts
from choreo_bench.language.tasks.moderated import ModeratedDebate
from choreo_bench.language.tasks.reasoning import Diagnosis, TwoHop
from choreo_bench.language.tasks.recall import MultiDocument, Recall, SeveralQuestions
from choreo_bench.language.tasks.trajectories import Summary, Trajectories

_ALL: tuple[Task, ...] = (
    Recall(),
    SeveralQuestions(),
    SeveralQuestions(questions=3, name="three_questions"),
    BranchSolveMerge(),
    MajorityVote(),
    BestSupported(),
    ListUnion(),
    SumOfParts(),
    TwoHop(),
    Conflict(),
    Diagnosis(),
    MultiDocument(),
    Trajectories(),
    Summary(),
    Arithmetic(),
    Check(),
    Choose(),
    Choose(by="index", name="choose_by_index"),
    ModeratedDebate(),
    Debate(),
    DebateTurn(),
    PrisonersDilemma(),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}
"""Every task of the language at its default difficulty, by name."""

__all__ = [
    "TASKS",
    "Arithmetic",
    "BestSupported",
    "BranchSolveMerge",
    "Check",
    "Choose",
    "Conflict",
    "Debate",
    "DebateTurn",
    "Diagnosis",
    "Draft",
    "ListUnion",
    "MajorityVote",
    "ModeratedDebate",
    "MultiDocument",
    "PrisonersDilemma",
    "Recall",
    "SeveralQuestions",
    "SumOfParts",
    "Summary",
    "Task",
    "Trajectories",
    "TwoHop",
]
