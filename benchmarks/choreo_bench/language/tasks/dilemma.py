"""The prisoner's dilemma: a private strategy and plan, public talk, then a decision (figure 8)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from choreo_bench.language.problem import Problem, Said
from choreo_bench.language.scoring import first_sentence
from choreo_bench.language.tasks.base import Draft, draw_agents

Strategy = Literal["cooperate", "defect", "follow", "opposite", "free"]
STRATEGIES: Mapping[Strategy, str] = {
    "cooperate": "Always cooperate.",
    "defect": "Always defect.",
    "follow": "Do what the other says.",
    "opposite": "Do the opposite of what the other says.",
    "free": "Do what you like.",
}
PLANS = {"follow": "I plan to follow the other.", "opposite": "I plan to do the opposite."}
DECISIONS = ("I cooperate.", "I defect.")
GAME = "If both cooperate each has {both} points. If both defect each has {none} points."


def decided(reply: str) -> str | None:
    """`cooperate` or `defect`, by a reply's first sentence; None if it states neither."""
    words = first_sentence(reply)
    return next((word for word in ("cooperate", "defect") if words in (f"I {word}.", f"I will {word}.")), None)


def expected(strategy: Strategy, heard: str) -> str | None:
    """Return what a strategy decides after the other's last message; None where it is free, or nothing follows."""
    if strategy in ("cooperate", "defect"):
        return strategy
    decision = decided(heard)
    if strategy == "free" or decision is None:
        return None
    other = {"cooperate": "defect", "defect": "cooperate"}[decision]
    return decision if strategy == "follow" else other


@dataclass(frozen=True)
class DilemmaScorer:
    """The share of players whose decision can be read and follows from their strategy and what they heard."""

    players: tuple[tuple[str, Strategy, str], ...]
    """Of each player: the message that decides, the strategy, the other's last message."""

    def __call__(self, answers: Said) -> float:
        right = 0
        for decision, strategy, heard in self.players:
            made, wanted = decided(answers[decision]), expected(strategy, answers[heard])
            right += made is not None and wanted in (None, made)
        return right / len(self.players)

    def parsable(self, answers: Said) -> bool:
        """Return whether every decision can be parsed."""
        return all(decided(answers[decision]) is not None for decision, _, _ in self.players)


@dataclass(frozen=True)
class PrisonersDilemma:
    """Two players with strategies of their own plan, talk in turns and decide."""

    talks: int = 2
    "Rounds in which each agent answers."
    strategies: tuple[Strategy, ...] = ("cooperate", "defect", "follow", "opposite")
    """Those that players are dealt. `free` is for measuring influence: what it decides is not given."""
    name: str = "prisoners_dilemma"

    def draw(self, rng: random.Random) -> Problem:
        players = draw_agents(rng, 2)
        dealt = {player: rng.choice(self.strategies) for player in players}
        plans = {player: self._plan(rng, strategy) for player, strategy in dealt.items()}
        none, both = sorted(rng.sample(range(2, 61), 2))
        draft = Draft(GAME.format(both=both, none=none), name="game")
        private: dict[str, list[str]] = {}
        for player in players:
            seen = ["game", draft.add(f"strategy {player}", "system", STRATEGIES[dealt[player]], sees=["game"])]
            seen.append(draft.add(f"ask plan {player}", "user", "What is your plan?", sees=seen))
            seen.append(draft.say(f"plan {player}", plans[player], player, sees=seen))
            seen.append(draft.add(f"ask talk {player}", "user", "Tell the other what you will do.", sees=seen))
            private[player] = seen
        talk: list[str] = []
        last = dict.fromkeys(players, "")
        for number in range(1, self.talks + 1):
            for player, other in zip(players, reversed(players), strict=True):
                words = f"I will {self._talk(rng, dealt[player], plans[player], last[other])}."
                talk.append(draft.say(f"{player} {number}", words, player, sees=[*private[player], *talk]))
                last[player] = words
        decisions: list[str] = []
        for player, other in zip(players, reversed(players), strict=True):
            ask = draft.add(f"ask {player}", "user", "What do you do?", sees=["game", *talk])
            made = expected(dealt[player], last[other]) or self._free(rng, plans[player], last[other])
            decisions.append(draft.say(f"decision {player}", f"I {made}.", player, sees=[*private[player], *talk, ask]))
        scorer = DilemmaScorer(
            tuple(
                (decision, dealt[player], f"{other} {self.talks}")
                for decision, player, other in zip(decisions, players, reversed(players), strict=True)
            )
        )
        return draft.done(self.name, " ".join(draft.text(decision) for decision in decisions), scorer)

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, talks=rng.randint(1, 2), strategies=tuple(STRATEGIES))

    def _plan(self, rng: random.Random, strategy: Strategy) -> str:
        if strategy in PLANS:
            return PLANS[strategy]
        return f"I plan to {strategy if strategy != 'free' else rng.choice(('cooperate', 'defect'))}."

    def _talk(self, rng: random.Random, strategy: Strategy, plan: str, heard: str) -> str:
        """Draw what a player says it will do; one who means to defect often says otherwise."""
        if strategy == "cooperate":
            return "cooperate"
        if strategy == "follow":
            return decided(heard) or "cooperate"
        honest = "defect" if "defect" in plan or strategy == "opposite" else "cooperate"
        return honest if rng.random() < 0.4 else "cooperate"

    def _free(self, rng: random.Random, plan: str, heard: str) -> str:
        """Plan and what the other said count alike."""
        chance = 0.15 + 0.35 * ("cooperate" in plan) + 0.35 * (decided(heard) == "cooperate")
        return "cooperate" if rng.random() < chance else "defect"
