"""Runnable cases of all workflows: their options, items and scoring, and the bundled problems.

Commands list their options before torch, LangChain and LangGraph are imported: so cases take graphs from `workflows`
when they are played, as that package imports a graph on first access, and errors are imported where they are raised.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from choreo_agents import workflows
from choreo_agents.workflows.answers import FIRST, answers_of, majority, read_answer, states

if TYPE_CHECKING:
    from choreo_agents import sampling
    from choreo_agents.engine.settings import MethodName
    from choreo_agents.graph import ChoreoGraph
    from choreo_agents.workflows import phrasing
    from choreo_agents.workflows.graphs.tree_of_thoughts import Ballot

T = TypeVar("T")
Prompts: TypeAlias = "phrasing.Prompts"
Sampling: TypeAlias = "sampling.Sampling"
EMBEDDED_TOKENS, CHAT_TOKENS = 96, 512
"""Most tokens of a message by default, for the embedded model and for others."""


class Options(BaseModel):
    """Options that decide the shape of a workflow's graph."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Item(BaseModel):
    """An input of a workflow: a bundled problem or a line of the user's file. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = ""
    """Key of the item in the results; by default its line number."""

    @property
    def graded(self) -> bool:
        """True if the item has a right answer: then a run that fails scores 0."""
        return False


class Question(Item):
    """A question, and its right answer if that is known."""

    question: str = Field(min_length=1)
    answer: str | None = None
    """The right answer; `states` compares a reply with it."""

    @property
    def graded(self) -> bool:
        return self.answer is not None

    def score(self, answer: str) -> float | None:
        """Return 1 if an answer is right, 0 if it is wrong, None if the item has no right answer."""
        return None if self.answer is None else float(states(answer, self.answer))


@dataclass(frozen=True)
class Variant:
    """Way to run a workflow: an engine method and overrides of options."""

    method: MethodName
    """The engine's method."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that the variant sets."""


_NAMES: tuple[MethodName, ...] = ("choreo", "baseline", "naive")


def methods(**changes: Mapping[str, Any]) -> Mapping[str, Variant]:
    """Return the engine's methods by their names, and choreo with other options by names of their own."""
    ours = {name: Variant("choreo", options) for name, options in changes.items()}
    return {**{name: Variant(name) for name in _NAMES}, **ours}


@dataclass(frozen=True)
class Play:
    """A graph and its input messages."""

    graph: ChoreoGraph
    messages: tuple[tuple[str, str], ...] = ()
    """Roles and texts."""


@dataclass(frozen=True)
class Result:
    """The final answer of a run and its score."""

    answer: str
    score: float | None
    """Share that is right, from 0 to 1; None if the item has no right answer."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further scores, by name."""


class Case(Protocol):
    """A workflow that can be run and scored."""

    name: ClassVar[str]
    """Name of the function that builds its graph."""
    summary: ClassVar[str]
    options: ClassVar[type[Options]] = Options
    item: ClassVar[type[Item]] = Question
    variants: ClassVar[Mapping[str, Variant]] = methods()
    scored: ClassVar[str] = "right"
    """Label of the score."""
    higher_is_better: ClassVar[bool] = True
    """True if a higher score is a better one."""

    def play(self, item: Any, options: Any, prompts: Prompts, sampling: Sampling) -> Play:
        """Return the graph and the input messages for an item."""
        ...

    def judge(self, item: Any, options: Any, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        """Score the end state of a run."""
        ...


MOST_AGENTS = 8
REPORTS = 9
"""Reports in the record of each bundled debate, about 98 tokens each."""


class DebateItem(Question):
    """A question, with private notes of the agents and a record that all of them share."""

    notes: tuple[str, ...] = ()
    """Private system prompts of the agents, in their order; agents beyond the last have none."""
    record: tuple[str, ...] = ()
    """Messages that all agents read before the question."""

    @property
    def mistaken(self) -> list[int]:
        """Indices of agents with wrong notes: these have the answer's first two words, but not the whole answer."""
        start = " ".join((self.answer or "").split()[:2])
        wrong = [self.answer is not None and f"{start} " in notes and self.answer not in notes for notes in self.notes]
        return [place for place, is_wrong in enumerate(wrong) if is_wrong]


class DebateOptions(Options):
    """Options: the number of agents and of rounds."""

    agents: int = Field(default=3, ge=2, le=MOST_AGENTS, description="Number of agents.")
    rounds: int = Field(default=3, ge=1, description="Rounds in which each agent answers.")


class RecordOptions(DebateOptions):
    """Options of a bundled debate, which add the length of its record."""

    rounds: int = Field(default=2, ge=1, description="Rounds in which each agent answers.")
    reports: int = Field(
        default=REPORTS,
        ge=1,
        le=REPORTS,
        description="Reports in the record that all agents read, about 98 tokens each.",
    )


class DebateCase(Case):
    """A debate between agents with different notes; scored by the answer that most agents end with (MADpar)."""

    name = "debate"
    summary = "Agents answer in parallel rounds, each hearing the others' last answers (MADpar)."
    options: ClassVar[type[Options]] = DebateOptions
    item: ClassVar[type[Item]] = DebateItem

    def play(self, item: DebateItem, options: DebateOptions, prompts: Prompts, sampling: Sampling) -> Play:
        names = self.agents(options, prompts)
        graph = workflows.debate(
            dict(zip(names, [*item.notes, *[None] * len(names)], strict=False)),
            rounds=options.rounds,
            system=prompts("system"),
            question=item.question if item.record else None,
            revise=prompts("revise") or None,
            sampling=sampling,
        )
        return Play(graph, tuple(("user", words) for words in item.record or (item.question,)))

    def judge(self, item: DebateItem, options: DebateOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        replies = [answers_of(state, name) for name in self.agents(options, prompts)]
        last = [read_answer(texts[-1], prompts("answer")) for texts in replies]
        first = item.score(read_answer(replies[0][0], prompts("answer")))
        answer = majority(last)
        return Result(answer, item.score(answer), {} if first is None else {"first agent's first answer": first})

    def agents(self, options: DebateOptions, prompts: Prompts) -> list[str]:
        """Return the names of the agents."""
        names = prompts.names("agents")
        return [names[i] if i < len(names) else f"Agent{i + 1}" for i in range(options.agents)]


class RecordDebate(DebateCase):
    """Agents answer in parallel rounds, each hearing the others' last answers (MADpar).

    They debate over one record. All read the same reports; each agent also has private notes, as a system prompt: one
    agent's have the answer, a minority's are wrong (of two agents, nobody's), and the others have to find it in the
    record. In every round all agents speak at once and see the others' last answers. Then the baseline's debate is
    repeated, token for token, under all three methods, and a table shows what each had to encode. A prefix cache cannot
    share the record, because it comes after each agent's own system prompt.

    [dim]The embedded model was never trained to read caches, so sharing them costs it accuracy: compare
    the two final answers.[/dim]

    [b]Examples[/b]

      choreo run debate --seed 1
      choreo run debate --method baseline --no-compare
      choreo run debate --agents 5 --rounds 3 --json
      choreo run debate --reports 1
      choreo run debate --inputs questions.jsonl --out answers.jsonl
    """

    options: ClassVar[type[Options]] = RecordOptions


class DirectCase(Case):
    """A single agent with the notes of a debate's first one: the baseline that the other workflows have to beat."""

    name = "direct"
    summary = "One agent answers at once."
    item: ClassVar[type[Item]] = DebateItem

    def play(self, item: DebateItem, options: Options, prompts: Prompts, sampling: Sampling) -> Play:
        notes = item.notes[0] if item.notes else None
        system = prompts("system" if notes is None else "system_with_notes")
        graph = workflows.direct(system=system, private=notes, speaker=prompts("speaker"), sampling=sampling)
        return Play(graph, (("user", item.question),))

    def judge(self, item: DebateItem, options: Options, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        where = prompts("answer_with_notes" if item.notes else "answer")
        answer = read_answer(answers_of(state, "solver")[-1], where)
        return Result(answer, item.score(answer))


class IterativeDebateOptions(Options):
    """Options: the number of rounds."""

    rounds: int = Field(default=3, ge=1, description="Most rounds; the moderator may end earlier.")


class IterativeDebateCase(Case):
    """A debate in which one side answers, the other checks, and a moderator's verdict is scored (MADiter)."""

    name = "iterative_debate"
    summary = "Two sides speak in turns until a moderator ends it (MADiter)."
    options: ClassVar[type[Options]] = IterativeDebateOptions

    def play(self, item: Question, options: IterativeDebateOptions, prompts: Prompts, sampling: Sampling) -> Play:
        named = zip(("affirmative", "negative", "moderator"), prompts.names("speakers", 3, 3), strict=True)
        roles = {
            name: workflows.Role(who, prompts(name) or None, prompts(f"{name}_asked") or None) for name, who in named
        }
        sides = self.sides(prompts)

        def verdicts(spoken: Sequence[str]) -> Sequence[str]:
            # Without sides the moderator picks an answer of the affirmative side, which speaks first in each round.
            answers = [read_answer(words, prompts("answer")) for words in spoken[::2]]
            return sides or list(dict.fromkeys(answer for answer in answers if answer))

        graph = workflows.iterative_debate(
            roles,
            verdicts=verdicts,
            go_on=prompts("go_on"),
            rounds=options.rounds,
            system=prompts("system"),
            sampling=sampling,
        )
        return Play(graph, (("user", item.question),))

    def judge(
        self, item: Question, options: IterativeDebateOptions, prompts: Prompts, state: Mapping[str, Any]
    ) -> Result:
        verdicts = answers_of(state, "moderator")
        answer = verdicts[-1]
        for side, verdict in zip(("affirmative", "negative"), self.sides(prompts), strict=False):
            if verdict == verdicts[-1]:
                answer = read_answer(answers_of(state, side)[-1], prompts("answer"))
        return Result(answer, item.score(answer), {"share of rounds": len(verdicts) / options.rounds})

    def sides(self, prompts: Prompts) -> list[str]:
        """Return the verdicts that one side is right, if the moderator names a side."""
        return [side.strip() for side in prompts.names("sides", 0, 2)]


class TreeOptions(Options):
    """Options: the size of the tree."""

    branches: int = Field(default=8, ge=1, description="Candidates that continue each thought that is kept.")
    voters: int = Field(default=4, ge=1, description="Votes on each level.")
    depth: int = Field(default=1, ge=1, description="Levels.")
    keep: int = Field(default=1, ge=1, description="Thoughts that are kept of each level.")


class TreeCase(Case):
    """A tree of candidates from which voters choose; scored by the answer that follows from the best one (ToT)."""

    name = "tree_of_thoughts"
    summary = "Candidates side by side, votes, and an answer from the best (ToT)."
    options: ClassVar[type[Options]] = TreeOptions

    def play(self, item: Question, options: TreeOptions, prompts: Prompts, sampling: Sampling) -> Play:
        graph = workflows.tree_of_thoughts(
            **options.model_dump(include=set(TreeOptions.model_fields)),
            system=prompts("system"),
            think=prompts("think") or None,
            go_on=prompts("go_on") or None,
            vote=prompts("vote"),
            answer=prompts("final"),
            answer_prefix=prompts("answer_prefix"),
            ballot=ballot_of(prompts),
            speakers=prompts.names("speakers", 2),
            sampling=sampling,
        )
        return Play(graph, (("user", item.question),))

    def judge(self, item: Question, options: TreeOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        answer = read_answer(answers_of(state, "finalist")[-1], prompts("answer"))
        scores = [item.score(read_answer(words, prompts("answer"))) for words in answers_of(state, "thinker")]
        right = [score for score in scores if score is not None]
        return Result(answer, item.score(answer), {"right candidates": sum(right) / len(right)} if right else {})


def ballot_of(prompts: Prompts) -> Ballot:
    """Return the function that spells a vote for a candidate: by its name or by its result, as the prompts say."""
    if prompts("ballot") not in ("value", "name"):
        raise ValueError(f"ballot in the prompts of {prompts.source} must be 'value' or 'name'")
    if prompts("ballot") == "name":
        return lambda name, _: f"{name}."

    def value(_: str, words: str) -> str | None:
        answer = read_answer(words, prompts("answer"))
        return f"{answer.removesuffix('.').split()[-1]}." if answer.endswith(".") and len(answer) > 1 else None

    return value


class Concepts(Item):
    """A writing task and the concepts that the text has to cover."""

    question: str = Field(min_length=1)
    concepts: tuple[str, ...] = Field(min_length=1)
    """Each is covered if it occurs in whole words."""

    @property
    def graded(self) -> bool:
        return True


class MergeOptions(Options):
    """Options: the number of parts and how the merger reads them."""

    branches: int = Field(default=2, ge=1, le=6, description="Parts.")
    strategy: Literal["parallel", "sequential", "text", "summary"] = Field(
        default="sequential", description="Placement in which the merger reads the parts from the cache."
    )


class MergeCase(Case):
    """A planner, parallel solvers and a merger (BSM); scored by the share of the concepts that its text covers."""

    name = "branch_solve_merge"
    summary = "A plan in parts, parallel solvers, and a merge (BSM)."
    options: ClassVar[type[Options]] = MergeOptions
    item: ClassVar[type[Item]] = Concepts
    variants = methods(serial={"strategy": "sequential"}, parallel={"strategy": "parallel"}, text={"strategy": "text"})
    scored = "concepts covered"

    def play(self, item: Concepts, options: MergeOptions, prompts: Prompts, sampling: Sampling) -> Play:
        graph = workflows.branch_solve_merge(
            [prompts("part", number=number) for number in range(1, options.branches + 1)],
            system=prompts("system"),
            plan=prompts("plan", parts=options.branches) or None,
            merge=prompts("merge"),
            strategy=options.strategy,
            speakers=prompts.names("speakers", 2),
            sampling=sampling,
        )
        return Play(graph, (("user", item.question),))

    def judge(self, item: Concepts, options: MergeOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        story = answers_of(state, "merger")[-1]
        covered = [concept for concept in item.concepts if states(story, concept, anywhere=True)]
        parts: dict[str, float] = {}
        for number, words in enumerate(answers_of(state, "solver"), start=1):
            own = [concept in covered for concept in item.concepts if states(words, concept, anywhere=True)]
            if own:
                parts[f"of part {number}"] = sum(own) / len(own)
        return Result(story, len(covered) / len(item.concepts), parts)


class Questions(Item):
    """Questions that are encoded apart, and their right answers."""

    questions: tuple[str, ...] = Field(min_length=1)
    answers: tuple[str, ...] = ()
    """The right answer to each question; empty if they are unknown."""
    notes: str | None = None
    """The answerer's private system prompt."""

    @property
    def graded(self) -> bool:
        return bool(self.answers)

    @model_validator(mode="after")
    def _require_answers(self) -> Self:
        if self.answers and len(self.answers) != len(self.questions):
            raise ValueError(f"got {len(self.questions)} questions, but {len(self.answers)} answers")
        return self


class QuestionsOptions(Options):
    """Options: the positions of the questions."""

    layout: Literal["serial", "parallel"] = Field(default="parallel", description="Placement of the questions.")


class MultiQACase(Case):
    """Questions that are encoded apart; scored by whether one reply answers all of them (MultiQA)."""

    name = "multi_qa"
    summary = "Separate questions, answered in one reply (MultiQA)."
    options: ClassVar[type[Options]] = QuestionsOptions
    item: ClassVar[type[Item]] = Questions
    variants = methods(serial={"layout": "serial"}, parallel={"layout": "parallel"})
    scored = "all right"

    def play(self, item: Questions, options: QuestionsOptions, prompts: Prompts, sampling: Sampling) -> Play:
        graph = workflows.multi_qa(
            item.questions,
            layout=options.layout,
            system=prompts("system"),
            notes=item.notes,
            prompt=prompts("asked") or None,
            speaker=prompts("speaker"),
            sampling=sampling,
        )
        return Play(graph)

    def judge(self, item: Questions, options: QuestionsOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        reply = answers_of(state, "answerer")[-1]
        right = [float(states(reply, answer, anywhere=True)) for answer in item.answers]
        parts = {f"question {number}": score for number, score in enumerate(right, start=1)}
        return Result(reply, float(all(right)) if right else None, parts)


Strategy = Literal["cooperate", "defect", "follow", "opposite", "free"]
DECISIONS = "decisions"
"""Name of the prompts' list of decisions; without such a list, decisions are free text."""
RULES: Mapping[str, tuple[Any, ...]] = {
    "baseline": (),
    "naive": (),
    "choreo": (),
    "leak system": ("reencoded", "all", ("alice.system",)),
    "leak plan": ("reencoded", "all", ("alice.plan",)),
    "reencoded": ("reencoded",),
}
"""Bob's view of Alice by variant, as arguments of `VisibilityRule`. She sees him likewise; in the leaks re-encoded."""


class Stakes(Item):
    """Payoffs of one game, and who starts."""

    both: int
    """Points for each if both cooperate."""
    none: int
    """Points for each if both defect."""
    bob_first: bool = False
    """True if Bob speaks first."""
    alice: Strategy | None = None
    """Alice's strategy; None: the one in the options."""


class DilemmaOptions(Options):
    """Options: the players' strategies, the number of talks, and Bob's view of Alice."""

    alice: Strategy = Field(default="free", description="Alice's strategy, if the item has none.")
    bob: Strategy = Field(default="free", description="Bob's strategy.")
    talks: int = Field(default=2, ge=1, description="Messages of each player before they decide.")
    leak: str = Field(default="choreo", description="Messages of Alice that Bob sees, as the variants name it.")


class DilemmaCase(Case):
    """A game with private plans; scored by Bob's decision, which shows what of Alice's plan reached him."""

    name = "prisoners_dilemma"
    summary = "Two players plan in private, talk, and decide at once."
    options: ClassVar[type[Options]] = DilemmaOptions
    item: ClassVar[type[Item]] = Stakes
    variants: ClassVar[Mapping[str, Variant]] = {
        name: Variant("baseline" if name == "baseline" else "naive" if name == "naive" else "choreo", {"leak": name})
        for name in RULES
    }
    scored = "Bob cooperates"
    higher_is_better = False

    def play(self, item: Stakes, options: DilemmaOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.graph import VisibilityRule

        players = {"Alice": prompts(item.alice or options.alice), "Bob": prompts(options.bob)}
        graph = workflows.prisoners_dilemma(
            dict(reversed(players.items())) if item.bob_first else players,
            game=prompts("game", both=item.both, neither=item.none),
            talks=options.talks,
            asks=(prompts("plan"), prompts("talk"), prompts("decide")),
            decisions=self.decisions(prompts),
            sampling=sampling,
        )
        rule = VisibilityRule(*RULES[options.leak])
        back = VisibilityRule("reencoded") if rule.contexts else rule
        return Play(graph.with_rule("alice", "bob", rule).with_rule("bob", "alice", back))

    def judge(self, item: Stakes, options: DilemmaOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        among = self.decisions(prompts)
        # The first of the decisions is the cooperative one; free text begins by saying so.
        cooperative = among[:1] or ("I cooperate.", "I will cooperate.")
        replies = [answers_of(state, player)[-1] for player in ("bob", "alice")]
        bob, alice = (float((words if among else read_answer(words, FIRST)) in cooperative) for words in replies)
        return Result(replies[0], bob, {"Alice cooperates": alice})

    def decisions(self, prompts: Prompts) -> tuple[str, ...]:
        """Return the decisions to choose from, the cooperative one first; empty if players decide in free text."""
        return prompts.names(DECISIONS, 2) if DECISIONS in prompts.texts else ()


_ALL = (DebateCase(), DirectCase(), IterativeDebateCase(), TreeCase(), MergeCase(), MultiQACase(), DilemmaCase())
CASES: Mapping[str, Case] = {case.name: case for case in _ALL}
"""Cases by the name of the workflow's function."""
SUMS = dict.fromkeys(("direct", "iterative_debate"), "sums")
"""Workflows that share a file of problems, and its name."""
LEAST_AGENTS = 3
"""Agents of a bundled debate: one has the right answer in its notes, one a wrong one, one needs the record."""


def read_json_lines(path: Path, kind: TypeAdapter[T], called: str) -> list[tuple[int, T]]:
    """Return number and content of each line of a JSONL file that is not empty.

    Args:
        path: The file.
        kind: Type of a line.
        called: What a line is called in errors, with its article.

    Raises:
        InvalidRequestError: A line is no JSON, or none of this type; the message names it. Or there is no line.
    """
    from choreo_agents.errors import InvalidRequestError

    lines: list[tuple[int, T]] = []
    # Only a line feed ends a line: texts may hold what Unicode calls a line separator.
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            lines.append((number, kind.validate_json(line)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequestError(
                f"line {number} of {str(path)!r} is not {called}: {where and where + ': '}{first['msg']}"
            ) from error
    if not lines:
        raise InvalidRequestError(f"{str(path)!r} has no items")
    return lines


def read_items(case: Case, path: Path) -> list[Item]:
    """Return the items of a JSONL file, one for each line that is not empty.

    Raises:
        InvalidRequestError: A line is no item of the case, or two have one id; the message names it. Or there is none.
    """
    from choreo_agents.errors import InvalidRequestError

    items: dict[str, Item] = {}
    for number, item in read_json_lines(path, TypeAdapter(case.item), f"an item of {case.name}"):
        named = item if item.id else item.model_copy(update={"id": f"line {number}"})
        if named.id in items:
            raise InvalidRequestError(f"line {number} of {str(path)!r} has the id {named.id!r}, which another line has")
        items[named.id] = named
    return list(items.values())


def problem(name: str, number: int) -> Item:
    """Return one of the twenty bundled problems of a workflow: `number` modulo 20."""
    with as_file(files("choreo_agents.workflows") / "problems" / f"{SUMS.get(name, name)}.jsonl") as path:
        items = read_items(CASES[name], path)
    return items[number % len(items)]


def debate_problem(number: int, *, agents: int = LEAST_AGENTS, reports: int = REPORTS) -> DebateItem:
    """Return a bundled debate: one agent's notes have the answer, one's have it wrong, the others' say nothing of it.

    Args:
        number: Which of the twenty problems, modulo 20.
        agents: 3 to 8.
        reports: Reports of the record that are kept, always with the one that has the answer; 0: no record.

    Raises:
        InvalidRequestError: There are fewer than 3 agents.
    """
    from choreo_agents.errors import InvalidRequestError

    if agents < LEAST_AGENTS:
        raise InvalidRequestError(f"the built-in debates need at least {LEAST_AGENTS} agents, not {agents}")
    item = problem("debate", number)
    assert isinstance(item, DebateItem) and item.answer is not None
    key_report = next(place for place, report in enumerate(item.record) if item.answer in report)
    other_reports = [place for place in range(len(item.record)) if place != key_report]
    record = tuple(item.record[place] for place in sorted([key_report, *other_reports][:reports]))
    return item.model_copy(update={"notes": item.notes[:agents], "record": record})
