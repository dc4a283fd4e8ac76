"""Plays a synthesis problem: workers encode or say their branches, and the answer is made from words or from caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from choreo_agents.engine import Engine
from choreo_agents.engine.calls import Decode
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import SynthesisLayout, place_branches, require_synthesis_layout
from choreo_bench.language import Problem, ProblemMessage
from choreo_bench.language.synthesis import Parts, SpokenBranch

Workers = Literal["given", "say"]
"""Whether branches are given words, encoded where their workers would have said them, or really said by workers whose
notes tell them what to say."""


@dataclass(frozen=True)
class Merged:
    """Result of playing a synthesis problem."""

    texts: dict[str, str]
    """The words of the answer, and of every branch that its worker really said."""
    tokens: tuple[int, ...]
    """Of the answer: its header and the end of the turn included."""
    ended: bool
    """Whether the model ended the turn itself, before it had to stop."""


async def play_synthesis(
    engine: Engine,
    problem: Problem,
    *,
    sampling: Sampling,
    layout: SynthesisLayout = "sequential",
    workers: Workers = "given",
    adapter: str | None = None,
    seed: int = 0,
) -> Merged:
    """Let workers have their say, each after the trunk and what it was told alone, and answer from all they said.

    On an engine with the method `choreo` the answer reads the workers' own encodings; with `baseline` or `naive` their
    words are re-encoded as one ordinary prompt.

    Args:
        engine: Encodes and decodes; workers run on its own adapter, if it has one.
        problem: A synthesis problem.
        sampling: How tokens are chosen, of workers and answer; its seed is replaced.
        layout: Where branches appear to the synthesizer; one that is not `sequential` is for engines that read caches.
        workers: Whether branches are given or really said.
        adapter: Encodes what the synthesizer is asked and what it answers, and maps the branches if it has a cache
            mapper; None: the engine's own, if it has one.
        seed: Everything that is sampled has a seed made of this and its place.

    Raises:
        ValueError: It is no synthesis problem, there is no such layout, or the engine re-encodes text, which a layout
            cannot change.
    """
    require_synthesis_layout(layout)
    if engine.method != "choreo" and layout != "sequential":
        raise ValueError(f"an engine with the method {engine.method!r} cannot place messages")
    parts = Parts.of(problem)
    play = _Play(engine, sampling, seed, list(problem.by_name))
    try:
        trunk: list[MessageHandle] = []
        if engine.chat.bos:
            trunk.append(await play.keep(await engine.aprefill(engine.chat.bos, role="system")))
        for message in parts.trunk:
            trunk.append(await play.prefill(message, trunk))
        starts, branches = await play.branches(parts.branches, trunk, workers)
        shown = await engine.branches.amap(branches, adapter) if engine.branches.maps(adapter) else branches
        lengths = [(start, branch.length) for start, branch in zip(starts, branches, strict=True)]
        shared, anchors, end = place_branches(layout, [handle.length for handle in trunk], lengths)
        behind = await play.boundaries(shown, anchors, trunk, shared, adapter)
        view, offsets = [*trunk, *shown], [*shared, *anchors]
        for handle, at in behind:
            view.append(handle)
            offsets.append(at)
        for message in parts.asks:
            view.append(await play.prefill(message, view, offsets, end, adapter))
            offsets.append(end)
            end += view[-1].length
        [answer] = await engine.adecode([play.decode(parts.answer, view, offsets, end, adapter)])
        await play.keep(answer)
        sampled = [chosen.token for chosen in engine.logprobs(answer)]
        ending = engine.model.encode(engine.chat.turn_end)
        texts = {name: play.words(problem.by_name[name], handle) for name, handle in play.spoken.items()}
        texts[parts.answer.name] = play.words(parts.answer, answer)
        ended = len(sampled) < sampling.max_tokens or sampled[-1] in ending
        return Merged(texts, tuple(engine.tokens(answer)), ended)
    finally:
        for handle in play.held:
            engine.release(handle)


class _Play:
    """State of a problem under way."""

    def __init__(self, engine: Engine, sampling: Sampling, seed: int, places: Sequence[str]) -> None:
        self.engine, self.sampling, self.seed, self.places = engine, sampling, seed, places
        self.held: list[MessageHandle] = []
        self.spoken: dict[str, MessageHandle] = {}
        """What workers really said, by name."""

    async def keep(self, handle: MessageHandle) -> MessageHandle:
        """Hold a message until the end."""
        self.held.append(handle)
        return handle

    async def prefill(
        self,
        message: ProblemMessage,
        view: Sequence[MessageHandle],
        offsets: Sequence[int] | None = None,
        start: int | None = None,
        adapter: str | None = None,
    ) -> MessageHandle:
        """Encode a given message after a view."""
        turn = self.engine.chat.turn(message.role, message.text, message.author)
        return await self.keep(
            await self.engine.aprefill(
                turn, view, offsets, start, author=message.author, role=message.role, adapter=adapter
            )
        )

    async def branches(
        self, branches: Sequence[SpokenBranch], trunk: Sequence[MessageHandle], workers: Workers
    ) -> tuple[list[int], list[MessageHandle]]:
        """Every branch, and where its worker encoded it; those that are said are said together."""
        starts: list[int] = []
        made: dict[str, MessageHandle] = {}
        calls: dict[str, Decode] = {}
        for branch in branches:
            view = list(trunk)
            for message in branch.private:
                view.append(await self.prefill(message, view))
            starts.append(sum(handle.length for handle in view))
            # Without notes nobody could know what to say.
            if workers == "say" and any(message.role == "system" for message in branch.private):
                calls[branch.words.name] = self.decode(branch.words, view)
            else:
                made[branch.words.name] = await self.prefill(branch.words, view)
        if calls:
            answers = await self.engine.adecode(list(calls.values()))
            self.held += answers
            self.spoken = dict(zip(calls, answers, strict=True))
        made |= self.spoken
        return starts, [made[branch.words.name] for branch in branches]

    async def boundaries(
        self,
        shown: Sequence[MessageHandle],
        anchors: Sequence[int],
        trunk: Sequence[MessageHandle],
        offsets: Sequence[int],
        adapter: str | None,
    ) -> list[tuple[MessageHandle, int]]:
        """Encode the boundary that the adapter reads behind each branch; return each handle with its position."""
        calls = self.engine.branches.boundaries(shown, trunk, offsets, anchors, adapter)
        handles = await self.engine.aprefill(calls) if calls else []
        self.held += handles
        return [(handle, at + branch.length) for handle, at, branch in zip(handles, anchors, shown, strict=False)]

    def decode(
        self,
        message: ProblemMessage,
        view: Sequence[MessageHandle],
        offsets: Sequence[int] | None = None,
        start: int | None = None,
        adapter: str | None = None,
    ) -> Decode:
        """A call that says a message after a view."""
        seed = self.seed * 1_000_003 + self.places.index(message.name)
        opening, ending = self._around(message)
        return Decode(
            opening,
            view,
            offsets,
            start,
            sampling=self.sampling.model_copy(update={"seed": seed}),
            author=message.author,
            turn_suffix=ending,
            adapter=adapter,
        )

    def words(self, message: ProblemMessage, handle: MessageHandle) -> str:
        """Return the text of an answer, without the header and the end of its turn."""
        opening = self.engine.model.encode(self._around(message)[0])
        return self.engine.model.decode(self.engine.tokens(handle)[len(opening) :], special=False).strip()

    def _around(self, message: ProblemMessage) -> tuple[PromptText, str]:
        """Return the header and the end of a turn; a report is a user's turn."""
        chat = self.engine.chat
        if message.role == "assistant":
            return chat.header(message.author), chat.turn_end
        # Where instructions stand in the first user's turn, a turn of them is a user's.
        turn = chat.user if message.role == "user" or chat.leads else chat.system
        return turn.opening(message.author).rstrip(" "), turn.after
