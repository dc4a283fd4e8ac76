"""The prisoner's dilemma: what Bob decides, by what he sees of Alice."""

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
"""The list of what players may decide, among their texts; without it they say what they like."""
RULES: Mapping[str, tuple[Any, ...]] = {
    "baseline": (),
    "naive": (),
    "choreo": (),
    "leak system": ("reencoded", "all", ("alice.system",)),
    "leak plan": ("reencoded", "all", ("alice.plan",)),
    "reencoded": ("reencoded",),
}
"""How Bob sees Alice, as arguments of `VisibilityRule`; she sees him likewise, and in the two ablations re-encoded."""


class Stakes(Item):
    """One game."""

    both: int
    """Points of each if both cooperate."""
    none: int
    """If both defect."""
    bob_first: bool = False
    """Whether Bob speaks first."""
    alice: Strategy | None = None
    """Alice's strategy; None: that of the options."""


class DilemmaOptions(Options):
    """Who plays how."""

    alice: Strategy = Field(default="free", description="Alice's strategy, where the item names none.")
    bob: Strategy = Field(default="free", description="Bob's strategy.")
    talks: int = Field(default=2, ge=1, description="How often each speaks before they decide.")
    leak: str = Field(default="choreo", description="What Bob sees of Alice, as the variants name it.")


class DilemmaCase(Case):
    """Plans in private, talk in public, and two decisions."""

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
        together = [_cooperates(words, among) for words in (bob, alice)]
        return Result(bob, float(together[0]), {"Alice cooperates": float(together[1])})


def _decisions(prompts: Prompts) -> tuple[str, ...]:
    """What players may decide, to cooperate first; nothing, if they say what they like."""
    return prompts.names(DECISIONS, 2) if DECISIONS in prompts.texts else ()


def _cooperates(words: str, among: Sequence[str]) -> bool:
    """Whether a decision is to cooperate: the first that there is, or a sentence that begins the words."""
    return words == among[0] if among else read_answer(words, FIRST) in ("I cooperate.", "I will cooperate.")


def seen_by_bob(graph: ChoreoGraph, leak: str) -> ChoreoGraph:
    """The game in which Bob sees of Alice what a variant says."""
    from choreo_agents.graph import VisibilityRule

    rule = VisibilityRule(*RULES[leak])
    back = VisibilityRule("reencoded") if rule.contexts else rule
    return graph.with_rule("alice", "bob", rule).with_rule("bob", "alice", back)
