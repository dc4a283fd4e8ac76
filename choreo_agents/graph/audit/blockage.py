"""Which pairs of one view do not know of each other: the later was encoded without the earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from choreo_agents.graph.audit.chart import Chart, ChartNode, names_of
from choreo_agents.graph.audit.report import Blocked
from choreo_agents.graph.visibility import START_SOURCE


def blocked(chart: Chart) -> Iterator[Blocked]:
    """For every reader, pairs of what it sees of which the later was encoded without the earlier."""
    numbers = _numbers(chart)
    read = {node.name: _read(chart, node, numbers) for node in chart.nodes}
    own: dict[str, int] = {}
    for node in chart.nodes:
        own[node.persona] = own.get(node.persona, 0) | sum(1 << numbers[name] for name in names_of(node.name))
    for reader in chart.nodes:
        if reader.is_function:
            continue
        seen = [source for source in reader.rules if read[reader.name] >> numbers[source] & 1]
        for later in seen:
            mode = reader.rules[later].mode
            if not mode.hands_on_encodings:
                continue
            if reader.has_system:
                yield Blocked(reader=reader.name, earlier=f"{reader.persona}.system", later=later)
            if reader.schema is not None:
                yield Blocked(reader=reader.name, earlier=reader.schema, later=later)
            blind = 0
            for node in chart.inside(later) if later != START_SOURCE else ():
                # What another model has said is encoded alone.
                blind |= ~(read[node.name] | own[node.persona]) if node.speaks_to(reader) else -1
            if blind & read[reader.name] & ~(1 << numbers[later]):
                for earlier in seen:
                    if earlier != later and blind >> numbers[earlier] & 1:
                        yield Blocked(reader=reader.name, earlier=earlier, later=later)


def _numbers(chart: Chart) -> Mapping[str, int]:
    """Of all names under which anything is read or said."""
    names = (name for node in chart.nodes for name in (*node.rules, *names_of(node.name)))
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _read(chart: Chart, node: ChartNode, numbers: Mapping[str, int]) -> int:
    """The sources of which a node sees anything, as bits."""
    found = 0
    for source, rule in node.rules.items():
        if (source == START_SOURCE and rule.mode.shows) or any(
            node.reads(source, each) for each in chart.inside(source)
        ):
            found |= 1 << numbers[source]
    return found
