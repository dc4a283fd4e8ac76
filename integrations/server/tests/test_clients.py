"""A real process, and the clients that people have: each says what it would to OpenAI's own server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from support.served import Served, environment, serving
from support.serving import QUESTION, WEATHER

pytestmark = pytest.mark.slow
KEY = "k-ann"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 10}


class Boats(BaseModel):
    """What somebody has."""

    count: Literal[3, 5]
    colour: Literal["red", "blue"]


@tool
def get_weather(location: Literal["Rome", "Paris"]) -> str:
    """Get the weather at a location."""
    return f"It's sunny in {location}."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{KEY} ann\nk-root operator\n")
    with serving("embedded", "--keys", str(keys), "--max-body-mb", "1") as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


class TestTheOpenAIClient:
    def test_says_and_streams(self, client: openai.OpenAI) -> None:
        said = client.chat.completions.create(model="embedded", messages=QUESTION, **SAMPLED)  # type: ignore[arg-type]
        assert said.choices[0].message.content and said.usage is not None
        with client.chat.completions.stream(
            model="embedded",
            messages=QUESTION,
            stream_options={"include_usage": True},
            **SAMPLED,  # type: ignore[arg-type]
        ) as stream:
            events = [*stream]
            whole = stream.get_final_completion()
        assert sum(event.type == "content.delta" for event in events) > 2
        assert whole.choices[0].message.content.strip() == said.choices[0].message.content  # type: ignore[union-attr]
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[operator]

    def test_calls_tools(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {
            "model": "embedded",
            "messages": QUESTION,
            "tools": [WEATHER],
            "tool_choice": "required",
        }
        said = client.chat.completions.create(**asked, max_tokens=150)
        [call] = said.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"location"}
        with client.chat.completions.stream(**asked, max_tokens=150) as stream:
            whole = stream.get_final_completion()
        [again] = whole.choices[0].message.tool_calls or ()
        assert again.function.arguments == call.function.arguments

    def test_parses_and_counts(self, client: openai.OpenAI) -> None:
        parsed = client.chat.completions.parse(
            model="embedded", messages=QUESTION, response_format=Boats, max_tokens=60
        )  # type: ignore[arg-type]
        assert isinstance(parsed.choices[0].message.parsed, Boats)
        several = client.chat.completions.create(
            model="embedded",
            messages=QUESTION,
            n=2,
            logprobs=True,
            top_logprobs=3,
            **SAMPLED,  # type: ignore[arg-type]
        )
        for choice in several.choices:
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)

    def test_raises_what_it_raises_elsewhere(self, client: openai.OpenAI, served: Served) -> None:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
            create(model="gpt-4o", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="context"):
            create(model="embedded", messages=[{"role": "user", "content": "so " * 3000}])
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="eve", max_retries=0).models.list()
        with pytest.raises(openai.APIStatusError, match="1 MB at most"):
            create(model="embedded", messages=[{"role": "user", "content": "so " * 700_000}])
        assert [each.id for each in client.models.list()] == ["embedded"]

    def test_reads_our_fields(self, client: openai.OpenAI) -> None:
        told: Any = [
            {"role": "system", "content": "Notes: Bob has 5 blue boats."},
            {"role": "user", "content": "What does Bob have?"},
        ]
        said = client.chat.completions.create(
            model="embedded", messages=told, temperature=0, extra_body={"choreo": {"thread": "notes"}}
        )
        assert said.model_extra is not None
        handle = said.model_extra["choreo"]["handle"]
        read = client.chat.completions.create(
            model="embedded", messages=told[1:], temperature=0, extra_body={"choreo": {"parents": [handle]}}
        )
        assert read.choices[0].message.content == "Bob has 5 blue boats."


class TestChatOpenAI:
    @pytest.fixture
    def chat(self, served: Served) -> ChatOpenAI:
        return ChatOpenAI(model="embedded", base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, **SAMPLED)  # type: ignore[arg-type]

    def test_says_and_streams(self, chat: ChatOpenAI) -> None:
        said = chat.invoke("What does Bob have?")
        assert said.text and said.usage_metadata is not None and said.usage_metadata["input_tokens"] > 0
        whole = AIMessageChunk("")
        for piece in chat.stream("What does Bob have?", stream_usage=True):
            whole += piece  # type: ignore[assignment]
        assert whole.text.strip() == said.text and whole.usage_metadata is not None
        with_logprobs = chat.bind(logprobs=True, top_logprobs=1).invoke("What does Bob have?")
        assert with_logprobs.response_metadata["logprobs"]["content"]

    def test_calls_tools_and_keeps_to_schemas(self, chat: ChatOpenAI) -> None:
        longer = chat.model_copy(update={"max_tokens": 150})
        said = longer.bind_tools([get_weather], tool_choice="any").invoke("What is the weather?")
        assert isinstance(said, AIMessage) and said.tool_calls[0]["name"] == "get_weather"
        for method in ("json_schema", "function_calling"):
            found = longer.with_structured_output(Boats, method=method).invoke("What does Bob have?")  # type: ignore[arg-type]
            assert isinstance(found, Boats)


class TestPydanticAI:
    @pytest.fixture
    def model(self, served: Served) -> OpenAIChatModel:
        return OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key=KEY))

    async def test_says_and_streams(self, model: OpenAIChatModel) -> None:
        agent = Agent(model, instructions="Notes: Bob has 5 blue boats.", model_settings={"temperature": 0.0})
        result = await agent.run("What does Bob have?")
        assert result.output == "Bob has 5 blue boats."
        async with agent.run_stream("What does Bob have?") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        assert "".join(pieces).strip() == result.output

    async def test_output_is_of_a_type(self, model: OpenAIChatModel) -> None:
        agent = Agent(model, output_type=Boats, model_settings={"max_tokens": 150})
        assert isinstance((await agent.run("What does Bob have?")).output, Boats)


class TestCurl:
    def said(self, served: Served, *more: str, body: Any = None) -> str:
        told = {"messages": QUESTION, "max_tokens": 5} if body is None else body
        command = ["curl", "-sS", f"{served.url}/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}", *more]
        sent = ["-H", "Content-Type: application/json", "-d", json.dumps(told)]
        return subprocess.run([*command, *sent], capture_output=True, text=True, check=True, timeout=60).stdout

    def test_says_and_streams(self, served: Served) -> None:
        assert json.loads(self.said(served))["choices"][0]["message"]["role"] == "assistant"
        told = self.said(served, "-N", body={"messages": QUESTION, "max_tokens": 5, "stream": True})
        assert told.startswith("data: {") and told.endswith("data: [DONE]\n\n")

    def test_is_told_what_is_wrong(self, served: Served) -> None:
        found = self.said(served, "-w", "%{http_code}", body={"messages": QUESTION, "top_p": 7})
        assert found.endswith("400") and "top_p" in found

    def test_cannot_send_fifty_megabytes(self, served: Served, tmp_path: Path) -> None:
        large = tmp_path / "large.json"
        large.write_bytes(b'{"messages": ["' + b"x" * (50 << 20) + b'"]}')
        for more in ((), ("-H", "Transfer-Encoding: chunked")):
            told = [
                "curl",
                "-sS",
                "-o",
                os.devnull,
                "-w",
                "%{http_code} %{time_starttransfer}",
                "--data-binary",
                f"@{large}",
            ]
            key = ["-H", f"Authorization: Bearer {KEY}", *more]
            found = subprocess.run(
                [*told, *key, f"{served.url}/v1/chat/completions"], capture_output=True, text=True, check=False
            )
            assert found.stdout.split()[0] == "413", found


def test_who_hangs_up_is_not_served_any_more(served: Served) -> None:
    async def run() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps({"messages": QUESTION, "max_tokens": 1500, "temperature": 2.0, "stream": True}).encode()
        key = f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{key}\r\n\r\n".encode() + body)
        await reader.readuntil(b'"delta"')
        writer.close()

    before = served.metrics("k-root")
    asyncio.run(run())
    until = time.monotonic() + 10
    while (now := served.metrics("k-root"))["answers_under_way"] or now["unfinished"]:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert now["cancelled"] == before["cancelled"] + 1


def test_it_stops_when_what_runs_has_ended() -> None:
    with serving("embedded") as served:
        body = json.dumps({"messages": QUESTION, "max_tokens": 400, "temperature": 2.0, "seed": 1})
        command = ["curl", "-sS", f"{served.url}/v1/chat/completions", "-d", body]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while not served.metrics()["answers_under_way"]:
            time.sleep(0.005)
        served.process.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=60)
        assert json.loads(out)["usage"]["completion_tokens"] > 20
        assert served.process.wait(30) == 0
    assert served.said.rstrip().endswith("stopped"), "its engine was closed before"
    assert "method=POST path=/v1/chat/completions status=200" in served.said


def test_it_warns_who_lets_everybody_in(tmp_path: Path) -> None:
    with serving("embedded", "--host", "0.0.0.0", "--log-level", "warning") as served:
        pass
    assert "method=" not in served.said
    assert "warning: listening on 0.0.0.0 without keys" in served.said
    (tmp_path / "keys").write_text("one\n")
    code = subprocess.run(
        [sys.executable, "-m", "choreo_server", "embedded", "--keys", str(tmp_path / "keys")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert code.returncode == 1 and code.stderr.strip().endswith("a key and its tenant, separated by a space")
