"""What leaks in the prisoner's dilemma: Bob's decisions, by what he sees of Alice (Prompt Choreography, table 3 and
figure 8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from langchain_core.messages import AIMessage

from choreo_agents.engine import Engine, Memory
from choreo_agents.evaluation import Difference, Score
from choreo_agents.language.tasks.dilemma import GAME, STRATEGIES, Strategy, decided
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.cases.prisoners_dilemma import seen_by_bob, stakes
from choreo_agents.workflows.prisoners_dilemma import prisoners_dilemma

Variant = Literal["baseline", "choreo", "leak system", "leak plan", "reencoded"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
TUNED = "choreo + tuned"
"""As `choreo`, on an engine with an adapter."""
ALICES: tuple[Strategy, ...] = ("free", "cooperate", "defect")
AT_ONCE = 64
"""Games that are played concurrently."""


@dataclass(frozen=True)
class Game:
    """One game of the test split: drawn by its number, the same for every variant."""

    number: int
    alice: Strategy
    bob: Strategy = "free"

    def rules(self) -> str:
        both, none = stakes("test", self.number)
        return GAME.format(both=both, none=none)

    def strategies(self) -> dict[str, str]:
        """By player; in every other game Bob speaks first."""
        players = {"Alice": STRATEGIES[self.alice], "Bob": STRATEGIES[self.bob]}
        return dict(reversed(players.items())) if self.number % 2 else players


@dataclass(frozen=True)
class Played:
    """What was said in a game: node and words, in order, and what both decided; None where that cannot be read."""

    said: tuple[tuple[str, str], ...]
    alice: str | None
    bob: str | None


@dataclass
class DilemmaReport:
    """Bob's decisions in all games."""

    model: str
    games: int
    seed: int
    temperature: float
    cooperated: dict[str, dict[str, list[bool]]] = field(default_factory=dict)
    """By Alice's strategy and variant, game by game."""
    unread: dict[str, int] = field(default_factory=dict)
    """Decisions of Bob's that cannot be read, by variant; they count as no cooperation."""

    def score(self, alice: str, variant: str) -> Score:
        """How often Bob cooperated."""
        games = self.cooperated[alice][variant]
        return Score(sum(games), len(games))

    def difference(self, alice: str, variant: str) -> Difference:
        """How much more often than under the baseline, game by game."""
        return Difference.of(self.cooperated[alice][variant], self.cooperated[alice]["baseline"])

    def as_object(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


async def play(
    engine: Engine,
    game: Game,
    variant: Variant,
    sampling: Sampling,
    on_message: Callable[[str, str], None] | None = None,
) -> Played:
    """Play one game.

    Args:
        engine: With the method `baseline` for that variant, else `choreo`.
        game: Which.
        variant: What Bob sees of Alice.
        sampling: How they choose tokens; the seed of every call is made of the game's number and its place, so that
            the plans are the same in all variants.
        on_message: Told of every message, with the node that said it.
    """
    graph = seen_by_bob(prisoners_dilemma(game.strategies(), game=game.rules(), sampling=sampling), variant)
    with engine.scope():
        app = graph.compile(engine=engine)
        config: Any = {"configurable": {"seed": game.number}}
        said: list[tuple[str, str]] = []
        async for update in app.astream({"messages": []}, config, stream_mode="updates"):
            for node, change in update.items():
                words = [str(message.text) for message in change["messages"] if isinstance(message, AIMessage)]
                said += [(node, each) for each in words]
                for each in words if on_message is not None else ():
                    assert on_message is not None
                    on_message(node, each)
    last = dict(said)
    return Played(tuple(said), decided(last["alice"]), decided(last["bob"]))


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
    sampling = Sampling(temperature=temperature, max_tokens=24)
    served: list[tuple[str, Variant, Path | None]] = [(variant, variant, None) for variant in variants]
    for name, variant, tuned in [*served, *([(TUNED, VARIANTS[1], adapter)] if adapter is not None else [])]:
        method: Any = "baseline" if variant == "baseline" else "choreo"
        with Engine.load(model, method=method, memory=Memory(kv_budget_bytes=kv_budget_bytes), adapter=tuned) as engine:
            for alice in alices:
                numbers = range(seed, seed + games)
                played = asyncio.run(
                    _play_all(engine, [Game(n, alice) for n in numbers], variant, sampling, on_progress)
                )
                report.cooperated.setdefault(alice, {})[name] = [game.bob == "cooperate" for game in played]
                unread = sum(game.bob is None for game in played)
                report.unread[name] = report.unread.get(name, 0) + unread
    return report


async def _play_all(
    engine: Engine, games: Sequence[Game], variant: Variant, sampling: Sampling, on_progress: Callable[[str], None]
) -> list[Played]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(game: Game) -> Played:
        async with turn:
            played = await play(engine, game, variant, sampling)
        on_progress(variant)
        return played

    return await asyncio.gather(*(one(game) for game in games))
