"""Leaks in the prisoner's dilemma: Bob's decisions, by his view of Alice (Prompt Choreography, table 3, figure 8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from choreo_agents.engine import Engine, Memory
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.cases import DECISIONS, Strategy
from choreo_agents.workflows.phrasing import Prompts, load_prompts
from choreo_agents.workflows.playing import Setup, at_once, play
from choreo_bench.cases import CASES
from choreo_bench.evaluation import Difference, Score
from choreo_bench.harness import Report, Table
from choreo_bench.language.tasks.dilemma import decided

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Variant = Literal["baseline", "choreo", "leak system", "leak plan", "reencoded"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
TUNED = "choreo + tuned"
"""As `choreo`, on an engine with an adapter."""
ALICES: tuple[Strategy, ...] = ("free", "cooperate", "defect")
ALICE_IS_TOLD = {"free": "no explicit strategy", "cooperate": "always cooperate", "defect": "always defect"}
"""Strategies in the paper's words."""
_COLOURS = {"choreo": "#d1495b", "leak system": "#edae49", "leak plan": "#00798c", "reencoded": "#9aa0a6"}
AT_ONCE = 64
"""Games that are played concurrently."""


@dataclass
class DilemmaReport:
    """Bob's decisions in all games."""

    model: str
    games: int
    seed: int
    temperature: float
    cooperated: dict[str, dict[str, list[bool]]] = field(default_factory=dict)
    """Bob's decisions by Alice's strategy and variant, game by game: True if he cooperates."""
    unread: dict[str, int] = field(default_factory=dict)
    """Decisions of Bob's that cannot be read, by variant; they count as no cooperation."""

    def score(self, alice: str, variant: str) -> Score:
        """Return how often Bob cooperated."""
        games = self.cooperated[alice][variant]
        return Score(sum(games), len(games))

    def difference(self, alice: str, variant: str) -> Difference:
        """Return how much more often he cooperated than under the baseline, game by game."""
        return Difference.of(self.cooperated[alice][variant], self.cooperated[alice]["baseline"])

    def table(self) -> Table:
        """Make a row for each of Alice's strategies; in brackets the interval of the difference to the baseline."""
        names = list(self.unread)
        rows = [[ALICE_IS_TOLD[alice], *(self._cell(alice, name) for name in names)] for alice in self.cooperated]
        return Table(["Alice's strategy", *names], rows, f"How often Bob cooperates, in % of {self.games} games")

    def _cell(self, alice: str, name: str) -> str:
        share = f"{100 * self.score(alice, name).share:.1f}"
        if name == "baseline":
            return share
        low, high = self.difference(alice, name).score_interval()
        return f"{share} ({100 * low:+.1f} to {100 * high:+.1f})"

    def report(self) -> Report:
        """Report table 3."""
        unread = ", ".join(f"{variant} {count}" for variant, count in self.unread.items() if count)
        lines = [
            "in brackets: 95 % interval of the difference to the baseline, which inverts McNemar's test",
            f"decisions of Bob's that cannot be read, counted as no cooperation: {unread or 'none'}",
        ]
        return Report([self.table()], asdict(self), lines=lines)

    def figure(self) -> Figure:
        """Draw how each leak shifts Bob's cooperation, with intervals (figure 8)."""
        from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        alices = list(self.cooperated)
        width = 0.8 / len(_COLOURS)
        for place, (variant, colour) in enumerate(_COLOURS.items()):
            gaps = [self.difference(alice, variant) for alice in alices]
            intervals = [gap.score_interval() for gap in gaps]
            errors = [
                [max(0.0, 100 * (gap.share - low)) for gap, (low, _) in zip(gaps, intervals, strict=True)],
                [max(0.0, 100 * (high - gap.share)) for gap, (_, high) in zip(gaps, intervals, strict=True)],
            ]
            at = [index + (place - (len(_COLOURS) - 1) / 2) * width for index in range(len(alices))]
            shifts = [100 * gap.share for gap in gaps]
            axes.bar(at, shifts, width, yerr=errors, color=colour, label=variant, capsize=3)
        axes.axhline(0, color="#222222", linewidth=1)
        axes.set_xticks(range(len(alices)), [f"Alice: {alice}" for alice in alices])
        axes.set_ylabel("Bob cooperates: points above the baseline")
        axes.legend(frameon=False)
        return figure


def measure_dilemma(
    model: LoadedModel,
    *,
    games: int,
    seed: int = 0,
    alices: Sequence[Strategy] = ALICES,
    variants: Sequence[Variant] = VARIANTS,
    temperature: float = 1.0,
    kv_budget_bytes: int = 1 << 29,
    adapter: Path | None = None,
    on_progress: Callable[[str], None] = lambda variant: None,
) -> DilemmaReport:
    """Play the same games under every variant.

    Args:
        model: Plays both.
        games: For each of Alice's strategies.
        seed: Of the first game.
        alices: Her strategies; Bob always does what he likes.
        variants: What Bob sees of her.
        temperature: Of all they say.
        kv_budget_bytes: Of each engine.
        adapter: With it everything is played once more as `choreo` (see `TUNED`).
        on_progress: Told of every game that is over.
    """
    report = DilemmaReport(model.name, games, seed, temperature)
    case = CASES["prisoners_dilemma"]
    sampling = Sampling(temperature=temperature, max_tokens=24)
    served: list[tuple[str, Variant, Path | None]] = [(variant, variant, None) for variant in variants]
    for name, variant, tuned in [*served, *([(TUNED, VARIANTS[1], adapter)] if adapter is not None else [])]:
        method = case.variants[variant].method
        with Engine.load(model, method=method, adapter=tuned, memory=Memory(kv_budget_bytes=kv_budget_bytes)) as engine:
            for alice in alices:
                options = case.options.model_validate({"alice": alice, "leak": variant})
                setup = Setup(case, options, _free_to_decide(), sampling)

                async def game(number: int, engine: Engine = engine, setup: Setup = setup, name: str = variant) -> str:
                    drawn = case.draw(setup.options, "test", number)
                    result, _, _ = await play(engine, setup, drawn, seed=number)
                    on_progress(name)
                    return result.answer

                jobs = [partial(game, number) for number in range(seed, seed + games)]
                decisions = [decided(words) for words in asyncio.run(at_once(jobs, AT_ONCE))]
                report.cooperated.setdefault(alice, {})[name] = [made == "cooperate" for made in decisions]
                report.unread[name] = report.unread.get(name, 0) + decisions.count(None)
    return report


def _free_to_decide() -> Prompts:
    """The embedded language's texts, without a list of decisions to choose from: players say what they like."""
    texts = load_prompts("prisoners_dilemma", "embedded").texts
    return Prompts({name: text for name, text in texts.items() if name != DECISIONS})
