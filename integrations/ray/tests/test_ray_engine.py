"""Calls that run in actors."""

from __future__ import annotations

from collections.abc import Callable

from choreo_ray import RayEngine

from choreo_agents import Engine, MessageHandle, Sampling

Make = Callable[..., RayEngine]


def said(engine: Engine) -> list[str]:
    """A few messages of three agents that read each other, greedy and sampled."""
    alice = engine.prefill("Alice: the record says nine.", author="alice")
    bob = engine.prefill("Bob: it says four.", author="bob")
    made: list[MessageHandle] = []
    for heat in (0.0, 0.9):
        one = Sampling(max_tokens=12, temperature=heat, seed=5)
        carol = engine.decode("Carol:", parents=[alice, bob], author="carol", sampling=one)
        other = Sampling(max_tokens=12, temperature=heat)
        dan = engine.decode("Dan:", parents=[bob, carol], author="dan", sampling=other)
        made += [carol, dan]
    return [engine.text(each) for each in made]


def test_it_says_what_an_engine_in_this_process_says(front: Make) -> None:
    with Engine.load("embedded") as here:
        assert said(front()) == said(here)
