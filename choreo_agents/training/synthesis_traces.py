"""Synthesis as traces: branches encoded apart and shown to an answer somewhere, or all of it as one ordinary prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from choreo_agents.errors import TrainingError
from choreo_agents.models import LoadedModel
from choreo_agents.models.chat import Role
from choreo_agents.synthesis.placing import SynthesisLayout, place_branches
from choreo_agents.training.trace import Trace, TraceMessage
from choreo_agents.training.tuning import Example

ROOT = "begin of sequence"
QUESTIONS = 6
"""That are asked at most of one set of branches. Branches are long and answers short: six answers teach six times as
much as one, and cost little more."""


@dataclass(frozen=True)
class Span:
    """The tokens of one message, wherever it stands."""

    name: str
    tokens: tuple[int, ...]
    learn: tuple[int, int] | None = None
    """As of `TraceMessage`."""
    author: str | None = None
    role: str | None = None


@dataclass(frozen=True)
class BranchExample:
    """A trunk, branches that leave it, and what follows after all of them."""

    id: str
    trunk: tuple[Span, ...]
    """The beginning of the sequence included."""
    branches: tuple[tuple[tuple[Span, ...], Span], ...]
    """Each worker's private context, and its words."""
    following: tuple[Span, ...]
    """The synthesizer's own: each of them sees the trunk, all branches' words, and what of this comes before."""
    boundaries: tuple[tuple[int, ...], ...] = ()
    """What a synthesizer may read behind each branch, as tokens."""
    others: tuple[tuple[Span, ...], ...] = ()
    """Other calls of synthesizers over the same branches, none of which sees another's."""


def boundaries_of(model: LoadedModel, branches: Sequence[Span]) -> tuple[tuple[int, ...], ...]:
    """What an engine encodes behind each branch, as tokens; none, where the chat template opens turns with nothing."""
    found = tuple(tuple(model.encode(model.opening(branch.tokens))) for branch in branches)
    return found if all(found) else ()


def asked_together(fans: Sequence[BranchExample]) -> BranchExample:
    """One fan of several that have the same trunk and branches: these are encoded once for all of them.

    Raises:
        ValueError: They differ in more than in what follows.
    """
    first, *others = fans
    if any((other.trunk, other.branches) != (first.trunk, first.branches) for other in others):
        raise ValueError(f"not all of what is asked together with {first.id!r} has its branches")
    renamed = tuple(
        tuple(replace(one, name=f"{one.name} {number}") for one in other.following)
        for number, other in enumerate(others, start=2)
    )
    return replace(first, others=renamed)


def root_of(model: LoadedModel) -> list[Span]:
    """The beginning of the sequence, if the model has one."""
    return [Span(ROOT, tuple(model.encode(model.chat.bos)), role="system")] if model.chat.bos else []


def span(
    model: LoadedModel,
    name: str,
    role: Role,
    text: str,
    author: str | None = None,
    *,
    learn: bool = False,
    tokens: Sequence[int] | None = None,
) -> Span:
    """One turn as tokens; of a learnt one, the words and the token that ends a decode are learnt, the rest is given.

    A learnt turn is an answer as its readers get it: without thoughts, and without the empty block of an answer that
    was decoded without any. Where nothing closes a turn, it ends with the token that the model stops at: then nothing
    may follow it.

    Raises:
        TrainingError: A learnt turn does not start with the header that a decode starts with.
    """
    whole = tuple(model.encode(model.chat.turn(role, text, author)) if tokens is None else tokens)
    if not learn:
        return Span(name, whole, None, author, role)
    header = tuple(model.encode(model.chat.assistant.opening(author).rstrip(" ")))
    whole = (*header, *_words(model, name, author, whole, header))
    closing = tuple(model.encode(model.chat.turn_end))
    if not closing:
        whole += _stop(model) if whole[-1] not in model.adapter.end_tokens else ()
    unsaid = len(closing) - model.said_of(closing) if closing and whole[-len(closing) :] == closing else 0
    return Span(name, whole, (len(header), len(whole) - unsaid), author, role)


def _words(
    model: LoadedModel, name: str, author: str | None, whole: tuple[int, ...], header: tuple[int, ...]
) -> tuple[int, ...]:
    """What follows the header of an answer, which readers have as `header`."""
    headers = [header, tuple(model.encode(model.chat.header(author)))]
    begun = max((each for each in headers if whole[: len(each)] == each), key=len, default=None)
    opened = () if model.chat.thoughts is None else tuple(model.encode(model.chat.header(None, thinking=True)))
    thinks = begun is not None and begun[: len(opened)] != opened == whole[: len(opened)]
    if begun is None or thinks:
        raise TrainingError(f"the tokens of {name!r} do not start with the header of its author {author!r}")
    return whole[len(begun) :]


def _stop(model: LoadedModel) -> tuple[int, ...]:
    """The token that a model stops at where nothing closes its turn: rather the one that opens the next."""
    ends = model.adapter.end_tokens
    opening = tuple(model.encode(model.chat.start("user")))[:1]
    return opening if opening and opening[0] in ends else ends[:1]


def cache_trace(
    fan: BranchExample,
    layout: SynthesisLayout,
    *,
    mapped: bool = False,
    adapter: str | None = None,
    boundaries: bool = False,
) -> Trace:
    """The answer from the workers' own encodings, placed as `place_branches` says.

    Args:
        fan: What is said by whom.
        layout: Where branches appear to the synthesizer.
        mapped: Whether it sees what a cache mapper makes of each branch, named `branch mapped`, in its place.
        adapter: Encodes the synthesizer's own messages; the workers' are the model's alone.
        boundaries: Whether it reads what stands behind each branch, named `branch end`.
    """
    made: list[TraceMessage] = []
    trunk = _chain(made, fan.trunk, [])
    shown: list[str] = []
    for private, words in fan.branches:
        _, own = _chain(made, [*private, words], trunk)[-1]
        shown.append(words.name)
        if mapped:
            shown[-1] = f"{words.name} mapped"
            seen: Any = {"parents": (words.name,), "offsets": (own,)}
            made.append(replace(made[-1], name=shown[-1], **seen, learn=None, mapped=True))
    encoded = {message.name: message for message in made}
    placed = [(encoded[name].position, len(encoded[name].tokens)) for name in shown]
    offsets, anchors, end = place_branches(layout, [len(one.tokens) for one in fan.trunk], placed)
    view = list(zip([name for name, _ in trunk] + shown, offsets + anchors, strict=True))
    if boundaries and fan.boundaries:
        after = sum(len(one.tokens) for one in fan.trunk)
        for name, anchor, tokens in zip(shown, anchors, fan.boundaries, strict=True):
            _chain(made, [Span(f"{name} end", tokens)], [*trunk, (name, after)], adapter=adapter)
            view.append((made[-1].name, anchor + len(encoded[name].tokens)))
    for following in (fan.following, *fan.others):
        _chain(made, following, view, end, adapter)
    return Trace(fan.id, tuple(made))


def text_trace(fan: BranchExample) -> Trace:
    """The same answer from the same words as one ordinary prompt: each message sees all before it, but other answers.

    The learnt tokens are those of `cache_trace`, in their order.
    """
    made: list[TraceMessage] = []
    seen = _chain(made, [*fan.trunk, *(words for _, words in fan.branches)], [])
    for following in (fan.following, *fan.others):
        _chain(made, following, seen)
    return Trace(f"{fan.id} text", tuple(made))


@dataclass(frozen=True)
class Views:
    """How examples are shown."""

    layouts: Sequence[SynthesisLayout] = ("parallel",)
    """Each example has one of these."""
    mapped: bool = False
    """As for `cache_trace`, which says of `adapter` too."""
    adapter: str | None = None
    boundaries: bool = False
    """As for `cache_trace`."""
    text: bool = True
    """Whether the text trace is made as well."""

    def example(self, fan: BranchExample, rng: random.Random) -> Example:
        """Show one."""
        layout = rng.choice(self.layouts)
        cache = cache_trace(fan, layout, mapped=self.mapped, adapter=self.adapter, boundaries=self.boundaries)
        return Example(cache, text_trace(fan) if self.text else None)


def _chain(
    made: list[TraceMessage],
    spans: Sequence[Span],
    seen: Sequence[tuple[str, int]],
    start: int | None = None,
    adapter: str | None = None,
) -> list[tuple[str, int]]:
    """Append messages one after the other, each seeing what was seen before and those before it.

    Args:
        made: Where they are appended.
        spans: Their tokens.
        seen: Messages and where they appear.
        start: Of the first; None: after the last that is seen.
        adapter: Encodes them.

    Returns:
        What is seen now.
    """
    known = {message.name: len(message.tokens) for message in made}
    view = list(seen)
    at = start if start is not None else max((offset + known[name] for name, offset in view), default=0)
    for one in spans:
        parents, offsets = tuple(name for name, _ in view), tuple(offset for _, offset in view)
        told = (one.learn, adapter, False, one.author, one.role)
        made.append(TraceMessage(one.name, one.tokens, parents, offsets, at, *told))
        view.append((one.name, at))
        at += len(one.tokens)
    return view
