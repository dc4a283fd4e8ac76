"""What is known here of a thread's lineage, while several of its nodes look and add."""

from __future__ import annotations

from choreo_agents.graph.durable.run_lineage import ThreadNotes


def test_answers_are_looked_through_while_nobody_adds_any() -> None:
    known = ThreadNotes(store=None)
    known.add([], {"call 1": "a", "call 2": "b"})

    class Held(list[str]):
        def __contains__(self, each: object) -> bool:
            assert known.lock.locked(), "another node of the thread could add an answer now"
            return super().__contains__(each)

    assert known.answering(Held(["b"])) == {"call 2": "b"}
