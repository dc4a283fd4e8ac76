"""Workflows of stated lengths, with words that mean nothing: what is measured does not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph import ChoreoGraph
from choreo_agents.models import LoadedModel
from choreo_agents.workflows.graphs.debate import debate
from choreo_agents.workflows.graphs.iterative_debate import AFFIRMATIVE, MODERATOR, NEGATIVE, Role, iterative_debate
from choreo_agents.workflows.graphs.tree_of_thoughts import tree_of_thoughts
from choreo_bench.language import vocabulary

_FEWEST = 50
"""Different words."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of texts in tokens, without the headers of chat turns."""

    system: int = 64
    """Of each system prompt and instruction."""
    problem: int = 128
    utterance: int = 256


Vocabulary = tuple[tuple[str, int], ...]
"""Words that are one token of a model where a space stands before them, with that token."""


def vocabulary_of(model: LoadedModel) -> Vocabulary:
    """The embedded language's words that are one token of the model.

    Raises:
        InvalidRequestError: There are too few of them.
    """
    encoded = [(word, model.encode(f" {word}")) for word in vocabulary.words() if word.isalpha()]
    words = tuple((word, tokens[0]) for word, tokens in encoded if len(tokens) == 1)
    if len(words) < _FEWEST:
        raise InvalidRequestError(
            f"only {len(words)} built-in words are one token of {model.name!r}: texts of given lengths need {_FEWEST}"
        )
    return words


class ScenarioWords:
    """Texts of so many tokens, always the same for one name and problem."""

    def __init__(self, vocabulary: Vocabulary, lengths: Lengths, problem: int) -> None:
        self._vocabulary = vocabulary
        self.lengths = lengths
        self._problem = problem

    def draw(self, name: str, tokens: int) -> list[tuple[str, int]]:
        """So many words, with their tokens: drawing takes no time that counts, also while a run is timed."""
        return random.Random(f"{self._problem} {name}").choices(self._vocabulary, k=tokens)

    def text(self, name: str, tokens: int) -> str:
        """A text of so many tokens, as it stands behind a header."""
        return " ".join(word for word, _ in self.draw(name, tokens))

    def system(self, name: str) -> str:
        return self.text(f"system {name}", self.lengths.system)

    def problem(self) -> str:
        return self.text("problem", self.lengths.problem)


class Utterances(Mapping[tuple[str, int, int, int], tuple[int, ...]]):
    """Forced texts by (author, superstep, branch, call): as many tokens each, different ones for each call.

    Args:
        words: Of the problem.
        fixed: Names of texts that authors always say.
    """

    def __init__(self, words: ScenarioWords, fixed: Mapping[str, str] | None = None) -> None:
        self._words, self._fixed = words, fixed or {}
        self._said: dict[tuple[str, int, int, int], tuple[int, ...]] = {}

    def __getitem__(self, call: tuple[str, int, int, int]) -> tuple[int, ...]:
        if call not in self._said:
            drawn = self._words.draw(self._fixed.get(call[0], str(call)), self._words.lengths.utterance)
            self._said[call] = tuple(token for _, token in drawn)
        return self._said[call]

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        return iter(self._said)

    def __len__(self) -> int:
        return len(self._said)


@dataclass(frozen=True)
class ChatDebate:
    """A parallel debate, for competitors that build the graph themselves."""

    agents: tuple[str, ...]
    rounds: int
    system: str


@dataclass(frozen=True)
class Instance:
    """A workflow on one problem, and what is said in it."""

    graph: ChoreoGraph
    question: str
    texts: Utterances
    chat: ChatDebate | None = None

    def text_in(self, agent: str, round_: int) -> tuple[int, ...]:
        """Return the text of an agent in a round of a debate. Round 0 comes after the superstep of the input."""
        return self.texts[agent, round_ + 1, 0, 0]


@dataclass(frozen=True)
class WorkflowScenario:
    """A workflow of a given size."""

    name: str
    what: str
    """Its size in words."""
    build: Callable[[ScenarioWords], Instance]
    has_chat: bool = False
    """Whether its instances are parallel debates."""


def parallel_debate(agents: int = 3, rounds: int = 3) -> WorkflowScenario:
    """MADpar: one system prompt and question for all."""

    def build(words: ScenarioWords) -> Instance:
        names = vocabulary.AGENTS[:agents]
        chat = ChatDebate(names, rounds, words.system("all"))
        graph = debate(dict.fromkeys(names), rounds=rounds, system=chat.system)
        return Instance(graph, words.problem(), Utterances(words), chat)

    return WorkflowScenario("MADpar", f"{agents} agents, {rounds} rounds", build, has_chat=True)


def debate_in_turns(rounds: int = 3) -> WorkflowScenario:
    """MADiter: a system prompt for each role; the moderator never ends it early."""

    def build(words: ScenarioWords) -> Instance:
        names = (AFFIRMATIVE, NEGATIVE, MODERATOR)
        roles = {name: Role(who, words.system(name)) for name, who in zip(names, vocabulary.AGENTS, strict=False)}
        go_on = words.text("go on", words.lengths.utterance)
        graph = iterative_debate(roles, verdicts=lambda _: [], go_on=go_on, rounds=rounds)
        return Instance(graph, words.problem(), Utterances(words, {MODERATOR: "go on"}))

    return WorkflowScenario("MADiter", f"{rounds} rounds", build)


def tree(branches: int = 8, voters: int = 4, *, critics: bool = False) -> WorkflowScenario:
    """ToT of one level; all voters are told the same, or each is a critic with a system prompt of its own."""

    def build(words: ScenarioWords) -> Instance:
        graph = tree_of_thoughts(
            branches=branches,
            voters=voters,
            system=words.system("all"),
            vote=words.system("vote"),
            answer=words.system("answer"),
            speakers=vocabulary.AGENTS,
            critics=[words.system(f"critic {number}") for number in range(voters)] if critics else (),
        )
        return Instance(graph, words.problem(), Utterances(words))

    name = f"ToT {branches}x{voters}" + (" critics" if critics else "")
    return WorkflowScenario(name, f"{branches} branches, {voters} {'critics' if critics else 'voters'}", build)


PAPER = (tree(), debate_in_turns(), parallel_debate())
SWEEP_BRANCHES, SWEEP_VOTERS = (2, 4, 8, 16), (4, 8, 16)
"""Of figure 5."""


def scenarios_named(parts: Sequence[str], *, sweep: bool, critics: bool) -> list[WorkflowScenario]:
    """Find scenarios of the paper, or of the sweep, whose name has one of these parts in it; all of them for none.

    Raises:
        InvalidRequestError: There is none, or critics are asked for outside the sweep.
    """
    if critics and not sweep:
        raise InvalidRequestError("--critics requires --sweep: the voters of the paper's workflows are all alike")
    scenarios = [tree(b, v, critics=critics) for b in SWEEP_BRANCHES for v in SWEEP_VOTERS] if sweep else list(PAPER)
    chosen = [case for case in scenarios if not parts or any(part.lower() in case.name.lower() for part in parts)]
    if not chosen:
        raise InvalidRequestError(f"no such workflow; available: {', '.join(case.name for case in scenarios)}")
    return chosen
