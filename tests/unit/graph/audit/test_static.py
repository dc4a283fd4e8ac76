"""What is found of all contexts at once, against one context after the other."""

import json
import pickle
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.graph.audit.chart import Chart, ChartNode, Policy
from choreo_agents.graph.audit.report import Blocked, Finding, PrivateContext
from choreo_agents.graph.audit.static import Reach, audit_chart, cut, nearest, reach, violations_of
from choreo_agents.graph.visibility import START_SOURCE, VisibilityRule

NAMES = ("a", "b", "c", "team|d", "team|e", "f")


@st.composite
def charts(draw: st.DrawFn) -> Chart:
    """Nodes of several personas, models and kinds, that read each other at random."""
    names = NAMES[: draw(st.integers(2, len(NAMES)))]
    sources = [*names, "team", START_SOURCE]
    contexts = [f"{name}.system" for name in names] + list(names)
    rules = st.one_of(
        st.sampled_from([VisibilityRule(), VisibilityRule("reencoded"), VisibilityRule("private")]),
        st.builds(lambda named: VisibilityRule("reencoded", scope=(named,)), st.sampled_from(contexts)),
    )
    flag = st.booleans()
    nodes = [
        ChartNode(
            name,
            persona=draw(st.sampled_from([name, "a"])),
            model=draw(st.sampled_from(["", "one", "two"])),
            is_function=(is_function := draw(st.sampled_from([False, False, True]))),
            has_system=draw(flag) and not is_function,
            has_prompt=draw(flag) and not is_function,
            may_be_sent=draw(flag) and not is_function,
            confidential=draw(flag),
            thinks=draw(flag) and not is_function,
            calls=draw(flag) and not is_function,
            recalls=draw(flag),
            schema=draw(st.sampled_from([None, "trip"])),
            modules=draw(st.sampled_from([(), ("trip/plan",)])),
            rules={}
            if is_function
            else {s: draw(rules) for s in draw(st.lists(st.sampled_from(sources), unique=True)) if s != name},
            undeclared=frozenset(draw(st.lists(st.sampled_from(sources), max_size=2))),
        )
        for name in names
    ]
    named = draw(st.lists(st.sampled_from(contexts), max_size=2, unique=True))
    channels = draw(st.sampled_from([frozenset({"encoding"}), frozenset({"encoding", "words"})]))
    policy = Policy(confidential={name: frozenset({names[0]}) for name in named}, channels=channels)
    return Chart(tuple(nodes), policies=(("", policy),))


def one_by_one(chart: Chart) -> Iterator[tuple[PrivateContext, str, str, Reach, str | None]]:
    """What is found, by following each context by itself."""
    for context in chart.contexts:
        found = reach(chart, context)
        personas = dict.fromkeys(
            node.persona for node in chart.nodes if not node.is_function and node.name not in context.owners
        )
        for persona in personas:
            for channel in ("encoding", "words"):
                if nearest(chart, found, persona, channel) is not None:
                    yield context, persona, channel, found, None
    for source, reader in chart.private_pairs():
        said = tuple(node.name for node in chart.inside(source))
        context = PrivateContext(name=source, kind="message", owners=said)
        if (found := reach(chart, context)).has(reader, "encoding"):
            yield context, chart.by_name[reader].persona, "encoding", found, reader


@given(charts())
def test_all_contexts_at_once_get_where_each_gets_by_itself(chart: Chart) -> None:
    report = audit_chart(chart)
    expected = [*one_by_one(chart)]
    assert len(report.findings) == len(expected) and bool(report.findings) == bool(expected)
    for finding, (context, persona, channel, found, reader) in zip(report.findings, expected, strict=True):
        assert (finding.context, finding.reader, finding.channel) == (context.name, reader or persona, channel)
        node = reader or nearest(chart, found, persona, channel)
        assert node is not None and finding.path == found.path(node, channel)
        assert finding.cut == cut(chart, found, persona, channel)
        forbidden = reader is not None or chart.forbids(context, persona, channel)
        assert bool(finding.violation) == forbidden
    assert report.violations == tuple(finding for finding in report.findings if finding.violation)
    assert report.violations == tuple(violations_of(chart))
    for persona in {node.persona for node in chart.nodes if not node.is_function}:
        for channel in ("encoding", "words"):
            named = {f.context for f in report.findings if (f.reader, f.channel) == (persona, channel)}
            assert named <= report.reached(persona, channel)


def pairs_one_by_one(chart: Chart) -> Iterator[Blocked]:
    """What is blocked, by looking at each pair."""

    def sees(node: ChartNode, source: str) -> bool:
        if source == START_SOURCE:
            return source in node.rules and node.rules[source].mode.shows
        return any(node.reads(source, other) for other in chart.inside(source))

    def own(node: ChartNode, source: str) -> bool:
        return any(other.persona == node.persona for other in chart.inside(source))

    for reader in chart.nodes:
        seen = [] if reader.is_function else [source for source in reader.rules if sees(reader, source)]
        for later in seen:
            if not reader.rules[later].mode.shares_kv:
                continue
            if reader.has_system:
                yield Blocked(reader=reader.name, earlier=f"{reader.persona}.system", later=later)
            if reader.schema is not None:
                yield Blocked(reader=reader.name, earlier=reader.schema, later=later)
            for earlier in seen if later != START_SOURCE else ():
                blind = any(
                    not n.speaks_to(reader) or not (sees(n, earlier) or own(n, earlier)) for n in chart.inside(later)
                )
                if earlier != later and blind:
                    yield Blocked(reader=reader.name, earlier=earlier, later=later)


@given(charts())
def test_what_is_blocked_is_what_pairs_one_by_one_say(chart: Chart) -> None:
    assert audit_chart(chart).blocked == tuple(pairs_one_by_one(chart))


def chain(length: int) -> Chart:
    """Agents with system prompts, each of whom reads the one before."""
    return Chart(
        tuple(
            ChartNode(f"a{n}", persona=f"a{n}", has_system=True, rules={f"a{n - 1}": VisibilityRule()} if n else {})
            for n in range(length)
        )
    )


def test_a_long_chain_is_audited_without_its_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[PrivateContext] = []

    def counted(chart: Chart, context: PrivateContext) -> Reach:
        followed.append(context)
        return reach(chart, context)

    monkeypatch.setattr("choreo_agents.graph.audit.static.reach", counted)
    report = audit_chart(chain(2000))
    assert not report.violations and not followed and "findings" not in vars(report)
    report = audit_chart(chain(500))
    assert len(report.findings) == 499 * 500 // 2, "one for each agent after another"
    [*few] = islice(report.findings, 5)
    assert not followed and [len(each.path) for each in few] == [2, 3, 4, 5, 6] and len(followed) == 1


def test_a_report_is_written_as_json() -> None:
    report = audit_chart(chain(4))
    said = json.loads(report.to_json())
    assert [each["path"][-1]["reader"] for each in said["findings"]] == ["a1", "a2", "a3", "a2", "a3", "a3"]
    assert said["contexts"][0] == {"name": "a0.system", "kind": "system", "owners": ["a0"]}
    assert report.findings[0] != report.findings[1] and len({*report.findings}) == 6
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report and hash(copied) == hash(report) and copied.violations == ()
    assert pickle.loads(pickle.dumps(copied)) == copied
    found = Finding(context="a", reader="b", channel="words")
    assert (found.path, found.cut) == ((), ())
