"""What rounds of forks add up to, and the bars that they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from choreo_agents.lab.evaluation.intervals import mean_interval
from choreo_agents.lab.experiments.bench_fork.measure import FORK, SAME, SAME_TEXT, TEXT, WAYS, Way
from choreo_agents.training.journal import Record

COLUMNS = (
    "way",
    "first token, ms",
    "spread",
    "of the soonest, ms",
    "tokens encoded",
    "own prompts",
    "besides",
    "right",
)
MOST_TOKENS, LEAST_SOONER = 1.1, 5.0
SOONER_AT = {"model": "smollm2-135m", "subagents": 8, "tokens": 4096}
"""Of what the bar on time is meant: smaller models and shorter conversations have less to save."""


@dataclass(frozen=True)
class ForkBar:
    """What is wanted of the fork, and what was found."""

    what: str
    wanted: float
    found: float
    met: bool

    def line(self) -> str:
        """It in words."""
        return f"{'met' if self.met else 'missed'}: {self.what} {self.wanted:g}x: {self.found:.2f}x"


@dataclass(frozen=True)
class ForkingReport:
    """Rounds of one model.

    Args:
        settings: Model, dtype, threads, device, sizes, versions.
        records: As in a journal.
    """

    settings: Mapping[str, Any]
    records: Sequence[Record]

    def _runs(self, way: Way) -> list[Record]:
        return [record["ways"][way] for record in self.records]

    def seconds(self, way: Way, of: Callable[[Sequence[float]], float] = mean) -> float:
        """The median over rounds of the mean over subagents, or of another figure."""
        return median(of(run["first_token_s"]) for run in self._runs(way))

    def count(self, way: Way, name: str) -> float:
        """The mean of a figure over rounds, whose words are not the same."""
        return mean(float(run[name]) for run in self._runs(way))

    def besides(self, way: Way) -> float:
        """Tokens encoded, without the subagents' own system prompts."""
        return self.count(way, "tokens_encoded") - self.count(way, "tokens_own")

    def bars(self) -> list[ForkBar]:
        """What is wanted, and found."""
        found = []
        for other, whose in ((SAME, "ours"), (SAME_TEXT, "the prefix cache's")):
            ratio = self.besides(FORK) / self.besides(other)
            what = f"tokens encoded besides own prompts, of a byte-identical fork ({whose}), at most"
            found.append(ForkBar(what, MOST_TOKENS, ratio, ratio <= MOST_TOKENS))
        if any(self.settings[name] != value for name, value in SOONER_AT.items()):
            return found
        ratio = self.sooner(mean)
        what = "first token, sooner than with the prefix cache, at least"
        return [*found, ForkBar(what, LEAST_SOONER, ratio, ratio >= LEAST_SOONER)]

    def sooner(self, of: Callable[[Sequence[float]], float]) -> float:
        """How many times as long the prefix cache's way takes, to a figure of subagents' first tokens."""
        return self.seconds(TEXT, of) / self.seconds(FORK, of)

    def lines(self) -> list[str]:
        """The bars, and what a fork changes."""
        times = f"{self.sooner(mean):.2f}x sooner; the soonest subagent's {self.sooner(min):.2f}x"
        said = [*(bar.line() for bar in self.bars()), f"first token, fork beside prefix cache, own prompts: {times}"]
        loss, rounding = self.loss("loss"), self.loss("rounding")
        within = mean_interval([record["loss"]["kl"] for record in self.records])
        spread = "" if within is None else f" (95 % over conversations: {within[0]:.2g} to {within[1]:.2g})"
        return [
            *said,
            f"loss, from the fork to all re-encoded under the own prompt: KL {loss['first_kl']:.2g} nats at the first "
            f"token, {loss['kl']:.2g}{spread} a token of {sum(record['loss']['tokens'] for record in self.records)}; "
            f"the same choice at {loss['agreement']:.1%}",
            f"rounding, from one prompt in our engine to the same in the baseline: KL {rounding['first_kl']:.2g} and "
            f"{rounding['kl']:.2g}; the same choice at {rounding['agreement']:.1%}",
        ]

    def loss(self, name: str) -> dict[str, float]:
        """The mean over rounds."""
        return {key: mean(record[name][key] for record in self.records) for key in ("first_kl", "kl", "agreement")}

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells."""
        for way in WAYS:
            times = [1000 * mean(each["first_token_s"]) for each in self._runs(way)]
            yield (
                way,
                f"{median(times):,.0f}",
                f"{min(times):,.0f} to {max(times):,.0f}" if len(times) > 1 else "",
                f"{1000 * self.seconds(way, min):,.0f}",
                f"{self.count(way, 'tokens_encoded'):,.0f}",
                f"{self.count(way, 'tokens_own'):,.0f}",
                f"{self.besides(way):,.0f}",
                f"{self.count(way, 'right'):.0%}",
            )

    def title(self) -> str:
        """What the table is of."""
        said = self.settings
        threads = f"{said['threads']} thread{'' if said['threads'] == 1 else 's'}"
        return (
            f"{said['model']}, {said['dtype']}, {said['device']}, {threads}; {said['subagents']} subagents, a "
            f"conversation of {said['tokens']:,} tokens in {said['messages']} messages, medians of {len(self.records)}"
        )

    def as_object(self) -> dict[str, Any]:
        """Settings, bars, losses and raw rounds as plain JSON."""
        return {
            "settings": dict(self.settings),
            "bars": [asdict(bar) for bar in self.bars()],
            "first_token_ratio": self.sooner(mean),
            "loss": self.loss("loss"),
            "rounding": self.loss("rounding"),
            "rounds": list(self.records),
        }


def as_markdown(report: ForkingReport, command: str) -> str:
    """The table, with the command that makes it again."""
    versions = ", ".join(f"{name} {report.settings[name]}" for name in ("torch", "transformers"))
    lines = [f"`{command}`", "", f"{report.title()}. {versions}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "--:|" * (len(COLUMNS) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in report.rows()]
    return "\n".join([*lines, "", *(f"- {line}" for line in report.lines()), ""])
