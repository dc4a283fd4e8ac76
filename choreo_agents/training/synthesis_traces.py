"""Traces of syntheses: an answer that reads branches which were encoded apart, or the same as one ordinary prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from choreo_agents.errors import TrainingError
from choreo_agents.models import LoadedModel
from choreo_agents.models.chat.format import Role
from choreo_agents.synthesis.placing import SynthesisLayout, place_branches
from choreo_agents.training.trace import Trace, TraceMessage
from choreo_agents.training.tuning import Example

ROOT = "begin of sequence"
QUESTIONS = 6
"""Most questions about one set of branches. Branches are long and answers short: six answers teach six times as much as
one, and cost little more."""


@dataclass(frozen=True)
class BranchExample:
    """A shared trunk, parallel branches of workers, and the synthesizer's messages after them.

    Messages have neither parents nor positions: `cache_trace` and `text_trace` place them.
    """

    id: str
    trunk: tuple[TraceMessage, ...]
    """Messages that all workers see, including the beginning of the sequence."""
    branches: tuple[tuple[tuple[TraceMessage, ...], TraceMessage], ...]
    """Private context and answer of each worker."""
    following: tuple[TraceMessage, ...]
    """Messages of the synthesizer: each sees the trunk, the answers of all branches, and its own earlier messages."""
    boundaries: tuple[tuple[int, ...], ...] = ()
    """Tokens that a synthesizer may read after each branch."""
    others: tuple[tuple[TraceMessage, ...], ...] = ()
    """Messages of further syntheses of the same branches, none of which sees another."""


def boundaries_of(model: LoadedModel, branches: Sequence[TraceMessage]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that an engine encodes after each branch; empty if the chat template opens turns by nothing."""
    boundaries = tuple(tuple(model.encode(model.opening(branch.tokens))) for branch in branches)
    return boundaries if all(boundaries) else ()


def asked_together(fans: Sequence[BranchExample]) -> BranchExample:
    """Combine examples with the same trunk and branches into one, so that these are encoded once.

    Raises:
        ValueError: Their trunks or branches differ.
    """
    first, *more = fans
    if any((fan.trunk, fan.branches) != (first.trunk, first.branches) for fan in more):
        raise ValueError(f"the messages of {first.id!r} do not all have its branches")
    numbered = enumerate(more, start=2)
    renamed = tuple(tuple(replace(t, name=f"{t.name} {number}") for t in fan.following) for number, fan in numbered)
    return replace(first, others=renamed)


def root_of(model: LoadedModel) -> list[TraceMessage]:
    """Return the beginning of the sequence as a message, if the model has one."""
    return [TraceMessage(ROOT, tuple(model.encode(model.chat.bos)), role="system")] if model.chat.bos else []


def turn_message(
    model: LoadedModel,
    name: str,
    role: Role,
    text: str,
    author: str | None = None,
    *,
    learn: bool = False,
    tokens: Sequence[int] | None = None,
) -> TraceMessage:
    """Return a turn that is not placed yet; with `learn`, its text and the token that ends a decode are learnt.

    A learnt turn is an answer as its readers see it: without thoughts and without an empty block of thoughts. If the
    chat template does not close turns, it ends with the model's stop token, and no message may follow it.

    Raises:
        TrainingError: A learnt turn does not start with the header that a decode starts with.
    """
    whole = tuple(model.encode(model.chat.turn(role, text, author)) if tokens is None else tokens)
    if not learn:
        return TraceMessage(name, whole, author=author, role=role)
    header = tuple(model.encode(model.chat.assistant.opening(author).rstrip(" ")))
    whole = (*header, *_answer_tokens(model, name, author, whole, header))
    closing = tuple(model.encode(model.chat.turn_end))
    if not closing:
        whole += _stop(model) if whole[-1] not in model.adapter.end_tokens else ()
    unsaid = len(closing) - model.turn_end_length(closing) if closing and whole[-len(closing) :] == closing else 0
    return TraceMessage(name, whole, learn=(len(header), len(whole) - unsaid), author=author, role=role)


def _answer_tokens(
    model: LoadedModel, name: str, author: str | None, whole: tuple[int, ...], header: tuple[int, ...]
) -> tuple[int, ...]:
    """Return an answer's tokens after its header, which readers see as `header`, and decodes maybe in another form."""
    headers = [header, tuple(model.encode(model.chat.header(author)))]
    begun = max((prefix for prefix in headers if whole[: len(prefix)] == prefix), key=len, default=None)
    opened = () if model.chat.thoughts is None else tuple(model.encode(model.chat.header(None, thinking=True)))
    thinks = begun is not None and begun[: len(opened)] != opened == whole[: len(opened)]
    if begun is None or thinks:
        raise TrainingError(f"the tokens of {name!r} do not start with the header of its author {author!r}")
    return whole[len(begun) :]


def _stop(model: LoadedModel) -> tuple[int, ...]:
    """Return the stop token for a turn that the template does not close: preferably the one that opens the next."""
    ends = model.adapter.end_tokens
    opening = tuple(model.encode(model.chat.start("user")))[:1]
    return opening if opening and opening[0] in ends else ends[:1]


@dataclass(frozen=True)
class Views:
    """Settings that turn examples of branches into traces."""

    layouts: Sequence[SynthesisLayout] = ("parallel",)
    """Layouts, of which each example gets a random one."""
    mapped: bool = False
    """True to read a cache mapper's copy of each branch, named `branch mapped`, instead of the branch."""
    adapter: str | None = None
    """Encodes the synthesizer's own messages; workers' messages are the model's alone."""
    boundaries: bool = False
    """True to read the boundary after each branch, named `branch end`."""
    text: bool = True
    """True if the teacher's text trace is made as well."""

    def example(self, fan: BranchExample, rng: random.Random) -> Example:
        """Return the traces of an example, with a random layout."""
        return Example(cache_trace(fan, rng.choice(self.layouts), self), text_trace(fan) if self.text else None)


def cache_trace(fan: BranchExample, layout: SynthesisLayout, views: Views = Views()) -> Trace:
    """Return the trace of an answer that reads the workers' own KV, at the positions of `place_branches`.

    Args:
        fan: The example.
        layout: Positions of the branches in the synthesizer's view.
        views: What the synthesizer reads, and its adapter; not its layouts.
    """
    messages: list[TraceMessage] = []
    trunk = _chain(messages, fan.trunk, [])
    shown: list[str] = []
    for private, words in fan.branches:
        _, own = _chain(messages, [*private, words], trunk)[-1]
        shown.append(words.name)
        if views.mapped:
            shown[-1] = f"{words.name} mapped"
            link: Any = {"parents": (words.name,), "offsets": (own,)}
            messages.append(replace(messages[-1], name=shown[-1], **link, learn=None, mapped=True))
    encoded = {message.name: message for message in messages}
    placed = [(encoded[name].position, len(encoded[name].tokens)) for name in shown]
    offsets, anchors, end = place_branches(layout, [len(turn.tokens) for turn in fan.trunk], placed)
    view = list(zip([name for name, _ in trunk] + shown, offsets + anchors, strict=True))
    if views.boundaries and fan.boundaries:
        after = sum(len(turn.tokens) for turn in fan.trunk)
        for name, anchor, tokens in zip(shown, anchors, fan.boundaries, strict=True):
            _chain(messages, [TraceMessage(f"{name} end", tokens)], [*trunk, (name, after)], adapter=views.adapter)
            view.append((messages[-1].name, anchor + len(encoded[name].tokens)))
    for following in (fan.following, *fan.others):
        _chain(messages, following, view, end, views.adapter)
    return Trace(fan.id, tuple(messages))


def text_trace(fan: BranchExample) -> Trace:
    """Return the trace of the same answer from one ordinary prompt: each message sees all before it but other answers.

    The learnt tokens are those of `cache_trace`, in the same order.
    """
    messages: list[TraceMessage] = []
    view = _chain(messages, [*fan.trunk, *(words for _, words in fan.branches)], [])
    for following in (fan.following, *fan.others):
        _chain(messages, following, view)
    return Trace(f"{fan.id} text", tuple(messages))


def _chain(
    messages: list[TraceMessage],
    turns: Sequence[TraceMessage],
    before: Sequence[tuple[str, int]],
    start: int | None = None,
    adapter: str | None = None,
) -> list[tuple[str, int]]:
    """Append consecutive messages, each of which sees `before` and the appended messages before it.

    Args:
        messages: The list that they are appended to.
        turns: They, not placed yet.
        before: Names and positions of messages in view.
        start: Position of the first message; None: after the view.
        adapter: Encodes them.

    Returns:
        The view after the last message.
    """
    lengths = {message.name: len(message.tokens) for message in messages}
    view = list(before)
    at = start if start is not None else max((offset + lengths[name] for name, offset in view), default=0)
    for turn in turns:
        parents, offsets = tuple(name for name, _ in view), tuple(offset for _, offset in view)
        messages.append(replace(turn, parents=parents, offsets=offsets, position=at, adapter=adapter))
        view.append((turn.name, at))
        at += len(turn.tokens)
    return view
