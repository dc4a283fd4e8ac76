"""Influence is followed back through the messages of a run, step by step."""

from collections.abc import Sequence

from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.influence import Influence, InfluenceTracker, _Step


class Debate(InfluenceTracker):
    """Messages, each of whose authors read the text of all messages before; two of them repeat each other's."""

    def __init__(self) -> None:
        super().__init__([], Chart(()), [])
        self.expanded_steps = 0

    def _expand(self, step: _Step) -> tuple[frozenset[Influence], Sequence[_Step]]:
        self.expanded_steps += 1
        before = {*range(step.entry), *({1, 2} if step.entry in (1, 2) else ())}
        own = frozenset([Influence(f"a{step.entry}", step.channel)])
        return own, [_Step(f"m{number}", number, "words") for number in sorted(before)]


def test_each_step_is_followed_once_for_all_messages() -> None:
    debate, count = Debate(), 50
    for number in range(count):
        reached = debate._trace_all(_Step(f"m{number}", number, "encoding"))
        read = {*range(number), *({1, 2} if number in (1, 2) else ())}
        words = {Influence(f"a{before}", "words") for before in read}
        assert reached == words | {Influence(f"a{number}", "encoding")}
    assert debate.expanded_steps <= 2 * count
