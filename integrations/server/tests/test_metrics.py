"""What is told as metrics can be read as metrics, and as a log: every request has its line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from choreo_server import Keys, server_app
from choreo_server.metrics import Waits, exposition
from support.served import numbers
from support.serving import CHAT, QUESTION, asked, client_of, streamed

from choreo_agents import Engine, EngineStats


def test_every_field_of_the_stats_is_a_number_or_a_label() -> None:
    with Engine.load("embedded") as engine:
        stats = replace(engine.stats(), graphs_why='"no"\nsuch \\ thing', backend="ours")
    lines = exposition(stats, {200: 3}, 1, Waits()).splitlines()
    read = numbers(lines)
    for field in fields(EngineStats):
        if field.type == "str":
            assert f'{field.name}="' in next(line for line in lines if line.startswith("choreo_engine_info{"))
        else:
            assert read[field.name] == getattr(stats, field.name)
    assert read["answers_under_way"] == 1 and read['http_requests_total{status="200"}'] == 3
    assert all(re.fullmatch(r"# TYPE \w+ (counter|gauge|histogram)|\w+(\{.*\})? [-+.e\d]+", line) for line in lines)
    assert r'graphs_why="\"no\"\nsuch \\ thing"' in "\n".join(lines)


async def test_how_long_answers_are_waited_for_is_told_to_who_sees_all(engine: Engine) -> None:
    app = server_app(engine, keys=Keys(["k-root operator", "k-ann ann"]))
    async with client_of(app, "k-ann") as ann, client_of(app, "k-root") as root:
        await asked(ann, n=2, max_tokens=6)
        await streamed(ann, max_tokens=6)
        assert "_seconds" not in (await ann.get("/metrics")).text
        read = numbers((await root.get("/metrics")).text.splitlines())
    for name, least, most in (
        ("time_to_first_token", 3, 3),
        ("inter_token_latency", 3, 18),
        ("request_queue_time", 2, 3),
    ):
        buckets = [count for said, count in read.items() if said.startswith(f"{name}_seconds_bucket")]
        count = read[f"{name}_seconds_count"]
        assert least <= count <= most and read[f"{name}_seconds_sum"] > 0
        assert buckets == sorted(buckets) and read[f'{name}_seconds_bucket{{le="+Inf"}}'] == count


@pytest.mark.parametrize("stream", [True, False])
async def test_every_request_has_a_line_of_its_own(
    stream: bool, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "choreo_server.access")
    async with client_of(engine) as client:
        body = {"messages": QUESTION, "max_tokens": 3, "stream": stream}
        said = await client.post(CHAT, json=body, headers={"x-request-id": "ours-1"})
        assert said.headers["x-request-id"] == "ours-1"
        wrong = await client.post(CHAT, json={}, headers={"x-request-id": "two words"})
        lost = await client.get("/v1/no%0Athing")
    first, second, third = caplog.messages
    line = r"request=ours-1 method=POST path=/v1/chat/completions status=200 prompt_tokens=\d+ completion_tokens=3"
    assert re.fullmatch(line + r" duration_s=\d+\.\d{3}", first)
    made = re.match(r"request=([0-9a-f]{32}) method=POST .* status=400 prompt_tokens=- completion_tokens=- ", second)
    assert made is not None and made[1] == wrong.headers["x-request-id"]
    assert f"request={lost.headers['x-request-id']} method=GET path=/v1/no%0Athing status=404 " in third


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load("embedded") as engine:
        yield engine
