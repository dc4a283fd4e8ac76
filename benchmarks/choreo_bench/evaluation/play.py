"""Plays one problem on an engine: every message encoded after its parents, what is to be said decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from choreo_agents.engine import Engine
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling
from choreo_bench.language import Problem, ProblemMessage, siblings

Layout = Literal["sequential", "parallel"]
"""Where the messages of a view appear: one after the other, or neighbours that have not seen each other at one offset,
what follows starting after the longest of them."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


async def play(
    engine: Engine, problem: Problem, *, sampling: Sampling, layout: Layout = "sequential", seed: int = 0
) -> dict[str, str]:
    """Say everything that a problem leaves to be said; later messages see what was said, not what would be right.

    On an engine with the method `choreo` each message keeps the encoding that its own parents gave it; with
    `baseline` or `naive` every view is re-encoded as one ordinary prompt.

    Args:
        engine: Encodes and decodes.
        problem: Its messages come in an order in which parents come first.
        sampling: How tokens are chosen; its seed is replaced.
        layout: Where messages appear in views; `parallel` is for engines that read caches.
        seed: Each message to be said samples by a seed made of this and its place.

    Returns:
        The words of every message that was said, by name: of all that are to be, unless the problem stopped early.

    Raises:
        ValueError: There is no such layout, or the engine re-encodes text, whose messages follow each other.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    if layout != "sequential" and engine.method != "choreo":
        raise ValueError(f"an engine with the method {engine.method!r} cannot place messages at one offset")
    handles: dict[str, MessageHandle] = {}
    answers: dict[str, str] = {}
    root: list[MessageHandle] = []
    try:
        if engine.chat.bos:
            root.append(await engine.aprefill(engine.chat.bos, role="system"))
        for place, message in enumerate(problem.messages):
            parents = [*root, *(handles[name] for name in message.parents)]
            offsets, start = _offsets(engine, problem, message, root, handles, layout)
            if message.is_answer:
                chosen = sampling.model_copy(update={"seed": seed * 1_000_003 + place})
                handle = await engine.adecode(
                    engine.chat.header(message.author),
                    parents,
                    offsets,
                    start,
                    sampling=chosen,
                    author=message.author,
                    turn_suffix=engine.chat.turn_end,
                )
                answers[message.name] = _words(engine, handle, message.author)
                if problem.stop is not None and problem.stop(answers):
                    handles[message.name] = handle
                    break
            else:
                turn = engine.chat.turn(message.role, message.text, message.author)
                handle = await engine.aprefill(turn, parents, offsets, start, author=message.author, role=message.role)
            handles[message.name] = handle
        return answers
    finally:
        for handle in [*handles.values(), *root]:
            engine.release(handle)


def _words(engine: Engine, handle: MessageHandle, author: str | None) -> str:
    """Return the text of an answer, without the header and the end of its turn."""
    header = engine.model.encode(engine.chat.header(author))
    return engine.model.decode(engine.tokens(handle)[len(header) :], special=False).strip()


def _offsets(
    engine: Engine,
    problem: Problem,
    message: ProblemMessage,
    root: Sequence[MessageHandle],
    handles: dict[str, MessageHandle],
    layout: Layout,
) -> tuple[list[int | None] | None, int | None]:
    """The offset of every parent and of the message itself; None for one after the other."""
    if layout == "sequential":
        return None, None
    offsets: list[int | None] = [0 for _ in root]
    start = sum(len(engine.tokens(handle)) for handle in root)
    for group in siblings(problem, message.parents):
        offsets += [start] * len(group)
        start += max(len(engine.tokens(handles[name])) for name in group)
    return offsets, start
