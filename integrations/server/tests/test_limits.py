"""What is too much is refused at once; who leaves is served no longer; what is stopping takes nothing new."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from choreo_server import Keys, Limits, server_app
from choreo_server.body import _SIGNS, require_few
from choreo_server.errors import RefusedError
from support.chatty import save_chatty
from support.serving import CHAT, QUESTION, WEATHER, Talk, asked, client_of

from choreo_agents import Engine, Memory, Scheduling
from choreo_agents.errors import DeviceLostError, EngineFailedError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.constraints import Grammars
from choreo_agents.runtime.scheduler import FirstComeFirstServed

MILLION = b'{"messages": [' + b'{"role":"user","content":""},' * 1_000_000 + b"{}]}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_chatty(tmp_path_factory.mktemp("chatty")))


class Slowly(FirstComeFirstServed):
    """Steps that take a while, counted."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0

    def plan(self, *args: Any) -> Any:
        self.steps += 1
        time.sleep(self.seconds)
        return super().plan(*args)


class Signs:
    """A body's signs, counted as they are looked at."""

    def __init__(self, signs: re.Pattern[bytes]) -> None:
        self.signs, self.seen = signs, 0

    def finditer(self, body: bytes) -> Iterator[re.Match[bytes]]:
        for sign in self.signs.finditer(body):
            self.seen += 1
            yield sign


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> Signs:
    signs = Signs(_SIGNS)
    monkeypatch.setattr("choreo_server.body._SIGNS", signs)
    return signs


@pytest.fixture
def slowly() -> Slowly:
    return Slowly(0.02)


@pytest.fixture
def engine(model: LoadedModel, slowly: Slowly, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr("choreo_agents.engine.messages.thread_leases.IDLE_RUNS", 0)
    memory, scheduling = Memory(kv_budget_bytes=1 << 25), Scheduling(policy=slowly)
    with Engine.load(model, memory=memory, scheduling=scheduling) as engine:
        yield engine
        engine.check()


class TestWhatIsTooLarge:
    async def test_a_length_is_enough_to_refuse_it(self, engine: Engine) -> None:
        read = 0

        async def body() -> AsyncIterator[bytes]:
            nonlocal read
            for _ in range(50):
                read += 1
                yield bytes(1 << 20)

        async with client_of(engine) as client:
            response = await client.post(CHAT, content=body(), headers={"Content-Length": str(50 << 20)})
            assert response.status_code == 413 and read == 0
            assert "4 MB at most (--max-body-mb)" in response.json()["error"]["message"]
            response = await client.post(CHAT, content=body(), headers={"Transfer-Encoding": "chunked"})
            assert response.status_code == 413 and read == 5

    async def test_so_are_a_million_messages(self, engine: Engine, signs: Signs) -> None:
        async with client_of(engine, limits=Limits(body_bytes=1 << 26)) as client:
            response = await client.post(CHAT, content=MILLION)
            assert response.status_code == 413 and "4096 messages" in response.json()["error"]["message"]
        # An object has seven of them, and a comma: they are looked at until there are too many.
        assert signs.seen <= 4096 * 8 + 8

    @pytest.mark.parametrize(
        "body",
        [
            b'{"messages": [' + b"1," * 1_000_000 + b"1]}",
            b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}",
            b'{"messages": [{"a": [' + b"[]," * 1_000_000 + b"[]]}]}",
            b'{"messages": [' + b"[" * 1_000_000 + b"1,1" + b"," * 5000,
            b'{"messages": [' + b'"\\\\\\",",' * 300_000 + b"1]}",
            b'{"a":1,' * 1_000_000,
        ],
    )
    def test_so_is_whatever_has_as_many_values(self, body: bytes, signs: Signs) -> None:
        with pytest.raises(RefusedError):
            require_few(body, 4096)
        assert signs.seen <= 4096 * 32 + 2

    @pytest.mark.parametrize("end", [b"", b"\\"])
    def test_a_string_that_nothing_ends_is_looked_through_once(self, end: bytes, signs: Signs) -> None:
        require_few(b'{"messages": ["' + b'\\"' * 10_000 + b"," * 5000 + end, 4096)
        assert signs.seen == 4, "two brackets, a name and the string"

    def test_what_is_said_may_hold_anything(self) -> None:
        words = ', {"role": "user"}, [1, 2], "so" \\ ' * 10_000
        told = [{"role": "user", "content": words}] * 3
        require_few(json.dumps({"messages": told}).encode(), 3)
        with pytest.raises(RefusedError):
            require_few(json.dumps({"messages": [*told, told[0]]}).encode(), 3)

    async def test_what_never_arrives_is_not_waited_for(self, engine: Engine) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

        async with client_of(engine, limits=Limits(body_s=0.05)) as client:
            response = await client.post(CHAT, content=body())
            assert response.status_code == 408 and "longer than 0.05 s" in response.json()["error"]["message"]


class TestWhatIsTooMuch:
    async def test_answers_beyond_the_limit_are_asked_again(self, engine: Engine) -> None:
        async with client_of(engine, limits=Limits(answers=2)) as client:
            request = {"json": {"messages": QUESTION, "max_tokens": 8}}
            found = await asyncio.gather(*(client.post(CHAT, **request) for _ in range(4)))  # type: ignore[arg-type]
            refused = [each for each in found if each.status_code == 429]
            assert len(refused) == 2 and all(each.headers["retry-after"] for each in refused)
            assert refused[0].json()["error"]["type"] == "rate_limit_error"
            assert (await asked(client, 429, n=3))["error"]["code"] == "too_many_requests"
            assert await asked(client, n=2, max_tokens=2)

    async def test_so_are_those_beyond_a_tenants_own(self, engine: Engine) -> None:
        app = server_app(engine, keys=Keys(["k-ann ann", "k-bob bob"]), limits=Limits(tenant_answers=1))
        async with client_of(app, "k-ann") as ann, client_of(app, "k-bob") as bob:
            first = asyncio.create_task(asked(ann, max_tokens=12))
            await asyncio.sleep(0.1)
            assert (await asked(ann, 429))["error"]["code"] == "no_capacity"
            assert await asked(bob, max_tokens=2) and await first

    async def test_what_takes_too_long_ends(self, engine: Engine, slowly: Slowly) -> None:
        async with client_of(engine, limits=Limits(request_s=0.1)) as client:
            assert (await asked(client, 504, max_tokens=500, temperature=1.0, seed=1))["error"]["code"] == "timeout"
        # Long enough for a first piece, and too short for twenty.
        slowly.seconds = 0.2
        async with client_of(engine, limits=Limits(request_s=3.0)) as client:
            response = await client.post(
                CHAT, json={"messages": QUESTION, "max_tokens": 500, "temperature": 1.0, "seed": 1, "stream": True}
            )
            *_, error, done, rest = response.text.split("\n\n")
            assert response.status_code == 200 and (done, rest) == ("data: [DONE]", "")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"


async def test_calls_beyond_a_tenants_rate_wait(model: LoadedModel) -> None:
    """A request makes several: its messages, and its answer. Without keys nobody has a rate."""
    limits = Limits(tenant_calls_per_second=0.001, request_s=1.0)
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        async with client_of(engine, key="k-ann", keys=Keys(["k-ann ann"]), limits=limits) as ann:
            error = (await asked(ann, 504))["error"]
            assert error["code"] == "timeout" and "calls_per_second" in error["message"]
        async with client_of(engine, limits=Limits(tenant_calls_per_second=0.001)) as anybody:
            assert await asked(anybody, max_tokens=2)


class TestWhoWaits:
    @pytest.fixture(autouse=True)
    def may(self, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """Until then no engine says a word."""
        may, astream = asyncio.Event(), Engine.astream

        async def waiting(engine: Engine, *args: Any, **options: Any) -> AsyncIterator[Any]:
            await may.wait()
            async for item in astream(engine, *args, **options):
                yield item

        monkeypatch.setattr(Engine, "astream", waiting)
        monkeypatch.setattr("choreo_server.completions.BEGINS_S", 0)
        monkeypatch.setattr("choreo_server.completions.ALIVE_S", 0)
        return may

    @pytest.mark.parametrize("n", [1, 2])
    async def test_for_a_stream_is_told_at_once_that_it_comes(
        self, n: int, model: LoadedModel, may: asyncio.Event
    ) -> None:
        with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
            talk = Talk(server_app(engine), {"messages": QUESTION, "max_tokens": 4, "stream": True, "n": n})
            running = asyncio.create_task(talk.run())
            while len(talk.heard) < 3:
                await asyncio.sleep(0)
                assert not running.done()
            may.set()
            await running
        role, *silence = talk.heard[:3]
        assert role.count(b'"role": "assistant"') == n and silence == [b": keep-alive\n\n"] * 2
        whole = b"".join(talk.heard)
        assert whole.count(b'"role"') == whole.count(b'"finish_reason": "length"') == n
        assert whole.endswith(b"data: [DONE]\n\n")

    async def test_for_a_stream_that_fails_late_is_told_in_it(self, model: LoadedModel, may: asyncio.Event) -> None:
        with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
            talk = Talk(server_app(engine), {"messages": QUESTION, "stream": True})
            running = asyncio.create_task(talk.run())
            await talk.something.wait()
            engine.close()
            may.set()
            await running
        assert talk.status == 200 and b'"role": "assistant"' in talk.heard[0]
        *_, error, done = talk.heard
        assert b'"code": "stopping"' in error and done == b"data: [DONE]\n\n"


class TestWhoLeaves:
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    async def test_is_served_for_two_steps_at_most(self, stream: bool, n: int, engine: Engine, slowly: Slowly) -> None:
        app = server_app(engine)
        async with client_of(app) as client:
            await asked(client, max_tokens=1)
        before = engine.stats()
        talk = Talk(
            app, {"messages": QUESTION, "max_tokens": 400, "temperature": 1.0, "seed": 1, "stream": stream, "n": n}
        )
        running = asyncio.create_task(talk.run())
        if stream:
            await talk.something.wait()
        while engine.stats().steps < before.steps + 5:
            await asyncio.sleep(0.005)
            assert not running.done(), (talk.status, talk.heard)
        talk.leave()
        left = slowly.steps
        await running
        while engine.stats().unfinished:
            await asyncio.sleep(0.005)
        await asyncio.sleep(3 * slowly.seconds)
        assert slowly.steps - left <= 2
        after = engine.stats()
        assert after.cancelled - before.cancelled == n and app.answers == 0
        assert (after.leases, after.unfinished) == (before.leases, 0), "nothing is held for who has left"

    async def test_so_is_who_reads_no_more(self, engine: Engine) -> None:
        app = server_app(engine, limits=Limits(body_s=0.1))
        talk = Talk(app, {"messages": QUESTION, "max_tokens": 400, "temperature": 1.0, "seed": 1, "stream": True})
        talk.takes.clear()
        async with asyncio.timeout(5):
            await talk.run()
        while engine.stats().unfinished:
            await asyncio.sleep(0.005)
        assert app.answers == 0 and len(talk.heard) == 1

    async def test_before_it_is_its_turn_is_forgotten(self, engine: Engine) -> None:
        talk = Talk(server_app(engine), {"messages": QUESTION, "max_tokens": 400, "temperature": 1.0, "seed": 1})
        talk.leave()
        await talk.run()
        assert talk.status is None
        while engine.stats().unfinished:
            await asyncio.sleep(0.005)


async def test_what_is_stopping_takes_nothing_new_and_ends_what_runs(engine: Engine) -> None:
    app = server_app(engine)
    async with client_of(app) as client:
        running = asyncio.create_task(asked(client, max_tokens=12))
        await asyncio.sleep(0.1)
        app.stopping = True
        error = (await asked(client, 503))["error"]
        assert error["code"] == "stopping" and error["type"] == "server_error"
        assert (await client.get("/health")).status_code == 503
        assert (await running)["usage"]["completion_tokens"] >= 12


async def test_an_engine_whose_device_is_lost_is_not_ready(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    assert engine.admin is not None
    monkeypatch.setattr(engine.admin.core.loop, "_failure", DeviceLostError("the device computes no more"))
    async with client_of(engine) as client:
        response = await client.get("/health")
        assert response.status_code == 503 and "device" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "asks",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
)
async def test_others_are_answered_while_a_schema_is_compiled(
    asks: dict[str, Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may = threading.Event(), threading.Event()

    def slowly(made: Callable[..., Any]) -> Callable[..., Any]:
        def make(*told: Any) -> Any:
            begun.set()
            may.wait(60)
            return made(*told)

        return make

    monkeypatch.setattr(Grammars, "_matcher", slowly(Grammars._matcher))
    async with client_of(engine) as client:
        waiting = [asyncio.create_task(asked(client, max_tokens=120, **asks)) for _ in range(2)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert (await client.get("/health")).status_code == 200
        waiting[0].cancel()
        may.set()
        assert (await waiting[1])["choices"][0]["message"]
        assert (await asked(client, max_tokens=120, **asks))["choices"][0]["message"]


@pytest.mark.parametrize("fault", [RuntimeError("broken"), EngineFailedError("broken")])
async def test_what_fails_is_counted_and_logged_and_not_told(
    fault: Exception, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(*_: object) -> None:
        raise fault

    monkeypatch.setattr(Engine, "aprefill", failing)
    transport = httpx.ASGITransport(server_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert "broken" not in str(await asked(client, 500))
        assert 'requests_total{status="500"} 1' in (await client.get("/metrics")).text
    # What is no error of ours goes on to whoever runs the server, and logs it.
    assert ("broken" in caplog.text) == isinstance(fault, EngineFailedError)


async def test_an_engine_that_is_closed_is_not_there(model: LoadedModel) -> None:
    engine = Engine.load(model)
    engine.close()
    async with client_of(engine) as client:
        response = await client.post(CHAT, json={"messages": QUESTION})
        assert isinstance(response, httpx.Response) and response.status_code == 503
