"""Live displays of a workflow that runs: messages in rows, a debate in columns, a tree as a tree."""

from __future__ import annotations

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

from choreo_agents.workflows.cases.answers import read_answer

if TYPE_CHECKING:
    from choreo_agents.workflows.playing import Place, Setting

_TOKENS = ("tokens_reused", "tokens_encoded")


@dataclass
class TranscriptRow:
    """A message, as far as it has come."""

    node: str
    place: Place
    words: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """How many its call has read and encoded, by `_TOKENS`; empty until it is over."""

    @property
    def cost(self) -> str:
        read, encoded = (self.tokens.get(name, 0) for name in _TOKENS)
        return f"{read:,} read, {encoded:,} encoded" if self.tokens else ""


@dataclass(frozen=True)
class Level:
    """A level of a tree."""

    candidates: list[tuple[str, TranscriptRow]]
    """Each with its name."""
    voters: list[TranscriptRow]
    votes: Counter[str]
    """How many voted for what, once they have."""
    elected: list[int]
    """The candidates that go on, the best first."""


class PlayDisplay:
    """A row for each message, in the order in which they are asked for; rows fill side by side."""

    more: ClassVar[str] = ""
    """Options that show another side of it."""

    def __init__(self, console: Console, setting: Setting) -> None:
        self.setting, self.setup, self.item = setting, setting.setup, setting.item
        self.options: Any = self.setup.options
        self._spoken: dict[str, TranscriptRow] = {}
        self._live = Live(self.shown(), console=console, refresh_per_second=20)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.update(self.shown())
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()  # without a cursor to move, the last frame ends in the middle of a line

    def add(self, node: str, message_id: str, text: str, place: Place) -> None:
        """Append a piece of text to a node's message."""
        self._spoken.setdefault(message_id, TranscriptRow(node, place)).words += text
        self._live.update(self.shown())

    def told(self, cost: Mapping[str, Any]) -> None:
        """Note what an agent read for the message that it has just said."""
        waiting = [each for each in self._spoken.values() if each.node == cost["agent"] and not each.tokens]
        for each in sorted(waiting, key=lambda each: each.words.strip() != cost["words"].strip())[:1]:
            each.tokens = {name: cost[name] for name in _TOKENS}
        self._live.update(self.shown())

    def of(self, *nodes: str) -> list[TranscriptRow]:
        """Return the messages of these nodes, or of all, in the order of their places."""
        said = (each for each in self._spoken.values() if not nodes or each.node in nodes)
        return sorted(said, key=lambda each: (each.place, each.node))

    def opening(self, model: str, variant: str) -> RenderableType:
        """Return the panel above the display: model, method, and what is to be done."""
        lines = Table.grid(padding=(0, 1))
        lines.add_column(style="bold")
        lines.add_column()
        for row in self.rows():
            lines.add_row(*row)
        title = f"{self.setup.case.name.replace('_', ' ')} on {escape(model)}, method {variant}"
        return Panel(lines, title=title, title_align="left", expand=False)

    def rows(self) -> Iterator[tuple[str, Text]]:
        """The names of what is given, and what they stand for."""
        from choreo_agents.workflows.playing import item_words

        hidden = ("answer", "answers", "concepts")
        yield from ((name, Text(words)) for name, words in item_words(self.item) if name not in hidden)

    def shown(self) -> RenderableType:
        """Return what is seen now."""
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for each in self.of():
            table.add_row(each.node, self.words(each))
        return table

    def words(self, said: TranscriptRow, *, cost: bool = True) -> Text:
        """A message and what it cost, green if it states the answer."""
        right = self.score(said)
        style = "" if right is None else "green" if right else "yellow" if said.tokens else ""
        return Text.assemble((said.words.strip(), style), (f"\n{said.cost}" if cost and said.cost else "", "dim"))

    def score(self, said: TranscriptRow) -> float | None:
        """1 if a message states the right answer, None if nobody can say."""
        known = getattr(self.item, "answer", None) is not None and "answer" in self.setup.prompts.texts
        return self.item.score(read_answer(said.words, self.setup.prompts("answer"))) if known else None

    def messages(self) -> list[dict[str, Any]]:
        """All that was said, as JSON."""
        return [self.who(each) | {"words": each.words, "score": self.score(each), **each.tokens} for each in self.of()]

    def who(self, said: TranscriptRow) -> dict[str, Any]:
        """Return the speaker of a message, as JSON."""
        return {"node": said.node}

    def facts(self) -> dict[str, Any]:
        """Return what the display shows beside messages, as JSON."""
        return {}


class DebateDisplay(PlayDisplay):
    """One column an agent, one row a round; cells fill while the agents speak."""

    more = "--agents 5 --rounds 3"

    @property
    def _agents(self) -> list[str]:
        case: Any = self.setup.case
        return list(case.agents(self.options, self.setup.prompts))

    def rows(self) -> Iterator[tuple[str, Text]]:
        """The question, what all agents read, what each was told alone, and what to watch for."""
        yield "asked", Text(self.item.question)
        if record := self.item.record:
            begins = " ".join(record[0].split()[:14])
            held = f"{len(record)} reports, {self.facts()['record_tokens']:,} tokens, read by all: "
            yield "record", Text.assemble(held, (f"{begins} ...", "dim"))
        mistaken = [self._agents[place] for place in self.item.mistaken if place < len(self._agents)]
        for agent, notes in zip(self._agents, self.item.notes, strict=False):
            yield agent, Text(notes, style="yellow" if agent in mistaken else "dim")
        if mistaken:
            wrong = f"The notes of {' and '.join(mistaken)} are wrong on purpose"
            yield "watch", Text(f"{wrong}: see who convinces whom.", style="bold")

    def shown(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        table.add_column("round", justify="right", style="dim")
        for agent in self._agents:
            table.add_column(agent, ratio=1, overflow="fold")
        said = [self.of(agent) for agent in self._agents]
        over = min(sum(bool(each.tokens) for each in of_one) for of_one in said)
        for at in range(self.options.rounds):
            waits = Text("reads ..." if over >= at else "", style="dim")
            table.add_row(str(at + 1), *(self.words(each[at]) if at < len(each) else waits for each in said))
        return table

    def who(self, said: TranscriptRow) -> dict[str, Any]:
        return {"round": 1 + self.of(said.node).index(said), "agent": said.node}

    def facts(self) -> dict[str, Any]:
        model = self.setting.model
        tokens = sum(len(model.encode(model.chat.turn("user", report))) for report in self.item.record)
        return {"question": self.item.question, "record_tokens": tokens}


class TreeDisplay(PlayDisplay):
    """Each level's candidates with the votes for them, then what the last speaker makes of the best."""

    more = "--depth 2 --keep 2"

    def rows(self) -> Iterator[tuple[str, Text]]:
        yield from super().rows()
        watch = "Candidates slip, and so do voters, who read them all: see what most vote for."
        yield "watch", Text(watch, style="bold")

    def shown(self) -> RenderableType:
        from choreo_agents.workflows.graphs.tree_of_thoughts import FINALIST

        tree, best = Tree(Text(self.item.question, style="bold"), guide_style="dim"), ""
        last, voter = self.setup.prompts.names("speakers")[:2]
        for number, level in enumerate(self.levels(), start=1):
            names = [name for name, _ in level.candidates]
            branch = tree.add(f"[bold]level {number}[/]")
            for at, (name, said) in enumerate(level.candidates):
                chosen = ("bold reverse", "  goes on") if at in level.elected else ("bold", "")
                branch.add(self._leaf(name, said, *chosen))
            tally = ", ".join(f"{cast} for {vote.removesuffix('.')}" for vote, cast in level.votes.most_common())
            polled = tree.add(Text(f"votes: {tally}", style="bold")) if level.voters else tree
            for place, said in enumerate(level.voters, start=1):
                polled.add(self._leaf(f"{voter} {place}", said))
            best = names[level.elected[0]] if level.elected else ""
        for said in self.of(FINALIST):
            tree.add(self._leaf(f"{last}, who reads {best}'s thought", said))
        return Group("", tree, "")

    def _leaf(self, name: str, said: TranscriptRow, style: str = "bold", more: str = "") -> Text:
        words = self.words(said, cost=False)
        return Text.assemble((name, style), (more, "bold"), (f"  {said.cost}", "dim"), "\n", words)

    def levels(self) -> list[Level]:
        """Each level, as far as it has come."""
        from choreo_agents.workflows.cases.tree_of_thoughts import ballot_of
        from choreo_agents.workflows.graphs.tree_of_thoughts import THINKER, VOTER, candidate_name, elect

        prompts, size, found = self.setup.prompts, self.options, list[Level]()
        names = map(partial(candidate_name, prompts.names("speakers")), count())
        steps = [[[*said] for _, said in groupby(self.of(node), lambda it: it.place[0])] for node in (THINKER, VOTER)]
        for thinkers, voters in zip_longest(*steps, fillvalue=[]):
            candidates = [(next(names), said) for said in thinkers]
            cast = [said.words for said in voters if said.tokens]
            ballots = [ballot_of(prompts)(name, said.words.strip()) for name, said in candidates]
            elected = (
                elect(cast, ballots, answer_prefix=prompts("answer_prefix"), seats=size.keep)
                if len(cast) == size.voters
                else []
            )
            votes = Counter(words.rpartition(prompts("answer_prefix"))[2].strip() for words in cast)
            found.append(Level(candidates, voters, votes, elected))
        return found

    def facts(self) -> dict[str, Any]:
        told = []
        for level in self.levels():
            names = [name for name, _ in level.candidates]
            told.append({"candidates": names, "votes": level.votes, "elected": [names[at] for at in level.elected]})
        return {"levels": told}


DISPLAYS: Mapping[str, type[PlayDisplay]] = {"debate": DebateDisplay, "tree_of_thoughts": TreeDisplay}
"""By workflow, of those that have their own."""
