"""Case of the prisoner's dilemma: scored by Bob's decision, which shows what of Alice's private plan reached him."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, Variant, answers_of
from choreo_agents.workflows.cases.answers import FIRST, read_answer

if TYPE_CHECKING:
    from choreo_agents.graph import ChoreoGraph

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
    """Whether Bob speaks first."""
    alice: Strategy | None = None
    """Alice's strategy; None: the one in the options."""


class DilemmaOptions(Options):
    """Options: the players' strategies, the number of talks, and Bob's view of Alice."""

    alice: Strategy = Field(default="free", description="Alice's strategy, if the item has none.")
    bob: Strategy = Field(default="free", description="Bob's strategy.")
    talks: int = Field(default=2, ge=1, description="Messages of each player before they decide.")
    leak: str = Field(default="choreo", description="Messages of Alice that Bob sees, as the variants name it.")


class DilemmaCase(Case):
    """A game of two players with private plans, public talk, and a decision each."""

    name: ClassVar[str] = "prisoners_dilemma"
    summary: ClassVar[str] = "Two players plan in private, talk, and decide at once."
    options: ClassVar[type[Options]] = DilemmaOptions
    item: ClassVar[type[Item]] = Stakes
    variants: ClassVar[Mapping[str, Variant]] = {
        name: Variant("baseline" if name == "baseline" else "naive" if name == "naive" else "choreo", {"leak": name})
        for name in RULES
    }
    scored: ClassVar[str] = "Bob cooperates"
    higher_is_better: ClassVar[bool] = False

    def play(self, item: Stakes, options: DilemmaOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.prisoners_dilemma import prisoners_dilemma

        alice = item.alice or options.alice
        players = {"Alice": prompts(alice), "Bob": prompts(options.bob)}
        graph = prisoners_dilemma(
            dict(reversed(players.items())) if item.bob_first else players,
            game=prompts("game", both=item.both, neither=item.none),
            talks=options.talks,
            asks=(prompts("plan"), prompts("talk"), prompts("decide")),
            decisions=_decisions(prompts),
            sampling=sampling,
        )
        return Play(seen_by_bob(graph, options.leak))

    def judge(self, item: Stakes, options: DilemmaOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        bob, alice = (answers_of(state, player)[-1] for player in ("bob", "alice"))
        among = _decisions(prompts)
        together = [_is_cooperative(words, among) for words in (bob, alice)]
        return Result(bob, float(together[0]), {"Alice cooperates": float(together[1])})


def _decisions(prompts: Prompts) -> tuple[str, ...]:
    """Return the decisions to choose from, the cooperative one first; empty if players decide in free text."""
    return prompts.names(DECISIONS, 2) if DECISIONS in prompts.texts else ()


def _is_cooperative(words: str, among: Sequence[str]) -> bool:
    """Return whether a decision is to cooperate: the first of `among`, or free text that begins by saying so."""
    return words == among[0] if among else read_answer(words, FIRST) in ("I cooperate.", "I will cooperate.")


def seen_by_bob(graph: ChoreoGraph, leak: str) -> ChoreoGraph:
    """Return the game with Bob's view of Alice as in the variant `leak`."""
    from choreo_agents.graph import VisibilityRule

    rule = VisibilityRule(*RULES[leak])
    back = VisibilityRule("reencoded") if rule.contexts else rule
    return graph.with_rule("alice", "bob", rule).with_rule("bob", "alice", back)
