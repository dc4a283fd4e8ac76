"""Live terminal displays of a running workflow: messages in rows, a debate in columns, a tree of thoughts as a tree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from choreo_agents.workflows.answers import read_answer

if TYPE_CHECKING:
    from choreo_agents.workflows.playing import Place, Setting

_TOKENS = ("tokens_reused", "tokens_encoded")


@dataclass
class TranscriptRow:
    """A message as far as it has been decoded."""

    node: str
    place: Place
    words: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that its call reused and encoded, by `_TOKENS`; empty until the call is over."""

    @property
    def cost(self) -> str:
        read, encoded = (self.tokens.get(name, 0) for name in _TOKENS)
        return f"{read:,} read, {encoded:,} encoded" if self.tokens else ""


class PlayDisplay:
    """A display with a row for each message, in the order of supersteps; rows of one superstep fill side by side."""

    more: ClassVar[str] = ""
    """Options that are worth a try next."""

    def __init__(self, console: Console, setting: Setting) -> None:
        self.setting, self.setup, self.item = setting, setting.setup, setting.item
        self.options: Any = self.setup.options
        self._spoken: dict[str, TranscriptRow] = {}
        self._live = Live(self.render(), console=console, refresh_per_second=20)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.update(self.render())
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()  # without a cursor to move, the last frame ends in the middle of a line

    def add(self, node: str, message_id: str, text: str, place: Place) -> None:
        """Append a chunk of text to a node's message."""
        self._spoken.setdefault(message_id, TranscriptRow(node, place)).words += text
        self._live.update(self.render())

    def add_cost(self, cost: Mapping[str, Any]) -> None:
        """Attach the token counts of a finished call to its message.

        Parallel branches may leave several messages without counts: the one with the call's text is preferred.
        """
        waiting = [row for row in self._spoken.values() if row.node == cost["agent"] and not row.tokens]
        for row in sorted(waiting, key=lambda row: row.words.strip() != cost["words"].strip())[:1]:
            row.tokens = {name: cost[name] for name in _TOKENS}
        self._live.update(self.render())

    def of(self, *nodes: str) -> list[TranscriptRow]:
        """Return the messages of these nodes, or of all nodes, by superstep and branch."""
        rows = (row for row in self._spoken.values() if not nodes or row.node in nodes)
        return sorted(rows, key=lambda row: (row.place, row.node))

    def opening(self, model: str, variant: str) -> RenderableType:
        """Return the panel above the display: model, method and task."""
        lines = Table.grid(padding=(0, 1))
        lines.add_column(style="bold")
        lines.add_column()
        for row in self.rows():
            lines.add_row(*row)
        title = f"{self.setup.case.name.replace('_', ' ')} on {escape(model)}, method {variant}"
        return Panel(lines, title=title, title_align="left", expand=False)

    def rows(self) -> Iterator[tuple[str, Text]]:
        """Yield the rows of the opening panel: names and texts of the item's fields, without the right answers."""
        hidden = {"id", "answer", "answers", "concepts"}
        for name, value in self.item.model_dump(exclude=hidden, exclude_none=True).items():
            for part in value if isinstance(value, list | tuple) else [value]:
                yield name, Text(part if isinstance(part, str) else json.dumps(part))

    def render(self) -> RenderableType:
        """Return the display's current frame."""
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for row in self.of():
            table.add_row(row.node, self.words(row))
        return table

    def words(self, row: TranscriptRow, *, cost: bool = True) -> Text:
        """Return a message's text and its cost: green if it states the right answer, yellow if it is over without."""
        right = self.score(row)
        style = "" if right is None else "green" if right else "yellow" if row.tokens else ""
        return Text.assemble((row.words.strip(), style), (f"\n{row.cost}" if cost and row.cost else "", "dim"))

    def score(self, row: TranscriptRow) -> float | None:
        """Return 1 if a message states the right answer, 0 if not, None if the item or the prompts define none."""
        has_answer = getattr(self.item, "answer", None) is not None and "answer" in self.setup.prompts.texts
        return self.item.score(read_answer(row.words, self.setup.prompts("answer"))) if has_answer else None

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages as plain JSON, by superstep and branch."""
        return [{"node": row.node, "words": row.words, "score": self.score(row), **row.tokens} for row in self.of()]


class DebateDisplay(PlayDisplay):
    """A display with a column for each agent and a row for each round; cells fill while the agents speak."""

    more = "--agents 5 --rounds 3"

    @property
    def _agents(self) -> list[str]:
        case: Any = self.setup.case
        return list(case.agents(self.options, self.setup.prompts))

    def rows(self) -> Iterator[tuple[str, Text]]:
        """Yield the question, the start of the shared record, each agent's private notes, and which notes are wrong."""
        yield "asked", Text(self.item.question)
        if record := self.item.record:
            begins = " ".join(record[0].split()[:14])
            model = self.setting.model
            tokens = sum(len(model.encode(model.chat.turn("user", report))) for report in record)
            size = f"{len(record)} reports, {tokens:,} tokens, read by all: "
            yield "record", Text.assemble(size, (f"{begins} ...", "dim"))
        mistaken = [self._agents[place] for place in self.item.mistaken if place < len(self._agents)]
        for agent, notes in zip(self._agents, self.item.notes, strict=False):
            yield agent, Text(notes, style="yellow" if agent in mistaken else "dim")
        if mistaken:
            wrong = f"The notes of {' and '.join(mistaken)} are wrong on purpose"
            yield "watch", Text(f"{wrong}: see which agent convinces the others.", style="bold")

    def render(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        table.add_column("round", justify="right", style="dim")
        for agent in self._agents:
            table.add_column(agent, ratio=1, overflow="fold")
        columns = [self.of(agent) for agent in self._agents]
        over = min(sum(bool(row.tokens) for row in column) for column in columns)
        for at in range(self.options.rounds):
            waits = Text("reads ..." if over >= at else "", style="dim")
            table.add_row(str(at + 1), *(self.words(column[at]) if at < len(column) else waits for column in columns))
        return table


class TreeDisplay(PlayDisplay):
    """A display of each level's candidates and votes, then of the final answer, as a tree."""

    more = "--depth 2 --keep 2"

    def rows(self) -> Iterator[tuple[str, Text]]:
        yield from super().rows()
        watch = "Candidates make mistakes, and so do voters, who read them all: watch the majority."
        yield "watch", Text(watch, style="bold")

    def render(self) -> RenderableType:
        from choreo_agents.workflows.cases import ballot_of
        from choreo_agents.workflows.graphs.tree_of_thoughts import FINALIST, THINKER, VOTER, candidate_name, elect

        tree, best = Tree(Text(self.item.question, style="bold"), guide_style="dim"), ""
        prompts, size = self.setup.prompts, self.options
        speakers, prefix, ballot = prompts.names("speakers"), prompts("answer_prefix"), ballot_of(prompts)
        last, voter = speakers[:2]
        names = map(partial(candidate_name, speakers), count())
        steps = [[[*rows] for _, rows in groupby(self.of(node), lambda row: row.place[0])] for node in (THINKER, VOTER)]
        for level, (thinkers, voters) in enumerate(zip_longest(*steps, fillvalue=[]), start=1):
            candidates = [(next(names), row) for row in thinkers]
            cast = [row.words for row in voters if row.tokens]
            ballots = [ballot(name, row.words.strip()) for name, row in candidates]
            # Nobody is elected before all have voted.
            elected = elect(cast, ballots, answer_prefix=prefix, seats=size.keep) if len(cast) == size.voters else []
            branch = tree.add(f"[bold]level {level}[/]")
            for at, (name, row) in enumerate(candidates):
                chosen = ("bold reverse", "  goes on") if at in elected else ("bold", "")
                branch.add(self._leaf(name, row, *chosen))
            votes = Counter(words.rpartition(prefix)[2].strip() for words in cast)
            tally = ", ".join(f"{number} for {vote.removesuffix('.')}" for vote, number in votes.most_common())
            polled = tree.add(Text(f"votes: {tally}", style="bold")) if voters else tree
            for place, row in enumerate(voters, start=1):
                polled.add(self._leaf(f"{voter} {place}", row))
            best = candidates[elected[0]][0] if elected else ""
        for row in self.of(FINALIST):
            tree.add(self._leaf(f"{last}, who reads {best}'s thought", row))
        return Group("", tree, "")

    def _leaf(self, name: str, row: TranscriptRow, style: str = "bold", more: str = "") -> Text:
        words = self.words(row, cost=False)
        return Text.assemble((name, style), (more, "bold"), (f"  {row.cost}", "dim"), "\n", words)


DISPLAYS: Mapping[str, type[PlayDisplay]] = {"debate": DebateDisplay, "tree_of_thoughts": TreeDisplay}
"""Displays by workflow; all other workflows have `PlayDisplay`."""
