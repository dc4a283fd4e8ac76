"""What is told as metrics can be read as metrics: every field of the stats is a number of its own, or a label."""

from __future__ import annotations

import re
from dataclasses import fields, replace

from choreo_server.metrics import exposition
from support.served import numbers

from choreo_agents import Engine, EngineStats


def test_every_field_of_the_stats_is_a_number_or_a_label() -> None:
    with Engine.load("embedded") as engine:
        stats = replace(engine.stats(), graphs_why='"no"\nsuch \\ thing', backend="ours")
    lines = exposition(stats, {200: 3}, 1).splitlines()
    read = numbers(lines)
    for field in fields(EngineStats):
        if field.type == "str":
            assert f'{field.name}="' in next(line for line in lines if line.startswith("choreo_engine_info{"))
        else:
            assert read[field.name] == getattr(stats, field.name)
    assert read["answers_under_way"] == 1 and read['http_requests_total{status="200"}'] == 3
    assert all(re.fullmatch(r"# TYPE \w+ (counter|gauge)|\w+(\{.*\})? [-+.e\d]+", line) for line in lines)
    assert r'graphs_why="\"no\"\nsuch \\ thing"' in "\n".join(lines)
