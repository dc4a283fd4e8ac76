"""Many streams at once, some of which their readers leave, against a real server; beside the engine alone.

    python load/load.py --streams 64 --seconds 120

The server with its clients, a process of their own, and an engine that does the same work in a process without a server
take turns on one machine, a few seconds each: the others are halted meanwhile. What is counted are tokens that somebody
hears: those after its reader has left are not. It fails if a request does, or if the server holds more afterwards than
before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import HumanMessage

from choreo_agents import Engine, Memory, Sampling
from choreo_agents.chat import ChatCall, ChatRequest
from choreo_agents.errors import ChoreoError

HELD = ("leases", "messages", "threads", "kv_bytes", "unfinished")
"""What a server has to hold as much of afterwards as before."""


@dataclass(frozen=True)
class Job:
    """One request: the same for a number, whoever does it."""

    number: int
    tokens: int
    leaves: bool
    """Whether its reader goes on the way, and has asked for twice as many."""

    @classmethod
    def nth(cls, number: int, longest: int) -> Job:
        tokens = longest // 2 + number * 7 % (longest // 2)
        return cls(number, tokens // 2 if number % 5 == 0 else tokens, number % 5 == 0)

    @property
    def asked(self) -> int:
        """Tokens of its answer at most."""
        return self.tokens * (1 + self.leaves)

    @property
    def heard(self) -> int:
        """Tokens that its reader stays for."""
        return self.tokens // 4 if self.leaves else self.tokens

    @property
    def text(self) -> str:
        return f"Request {self.number} of many: say whatever comes to your mind about the number {self.number * 37}."

    def body(self) -> bytes:
        asked = {
            "messages": [{"role": "user", "content": self.text}],
            "stream": True,
            "max_tokens": self.asked,
            "seed": self.number,
            "temperature": 1.0,
        }
        return json.dumps(asked).encode()


@dataclass
class Heard:
    """What clients have met with."""

    tokens: int = 0
    answered: int = 0
    left: int = 0
    failed: int = 0
    first: str = ""
    """Of what has failed."""


async def asking(port: int, job: Job, heard: Heard) -> None:
    """Make one request over a socket of its own, at as little cost as can be: the server is measured."""
    body = job.body()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        head = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body)
        told, events = b"", -1  # the first has no token yet
        while piece := await reader.read(1 << 16):
            told = told[-32:] + piece
            said = piece.count(b'"content"')
            heard.tokens, events = heard.tokens + said - (events < 0 < said), events + said
            if b'"error"' in told or (events < 0 and b" 200 " not in told[:64]):
                heard.failed, heard.first = heard.failed + 1, heard.first or told.decode()[-500:]
                return
            if job.leaves and events >= job.heard:
                heard.left += 1
                return
        if b"[DONE]" in told:
            heard.answered += 1
        else:
            heard.failed, heard.first = heard.failed + 1, heard.first or f"it broke off: {told.decode()[-300:]}"
    finally:
        writer.close()


async def streams(number: int, longest: int, do: Callable[[Job], Awaitable[None]], told: Told) -> None:
    """Do one job after the other, so many at once, until it is told to end; then end what is begun."""
    numbers = count()

    async def worker() -> None:
        while not told.ended:
            await do(Job.nth(next(numbers), longest))

    await asyncio.gather(*(worker() for _ in range(number)))


class Told:
    """What a process is told on stdin: a line asks for a count, and the end of all ends it."""

    def __init__(self, counted: Callable[[], int]) -> None:
        self.ended = False
        self._counted = counted
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for _ in sys.stdin:
            print(self._counted(), flush=True)
        self.ended = True


def metrics(port: int) -> dict[str, float]:
    """What the server tells of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as told:
        lines = told.read().decode().splitlines()
    pairs = (line.rsplit(maxsplit=1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("choreo_").removesuffix("_total"): float(value) for name, value in pairs}


def flushed(port: int) -> dict[str, float]:
    """What it holds once nobody asks anything, after so many requests of one kind as are kept for a while."""
    for number in range(64):
        told = {
            "messages": [{"role": "user", "content": "Again."}],
            "max_tokens": 4,
            "seed": number,
            "temperature": 1.0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(told).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).read()
    found = metrics(port)
    return {name: found[name] for name in HELD}


class Process:
    """One that can be halted while others have the machine."""

    def __init__(self, *command: str) -> None:
        path = os.pathsep.join(["", *sys.path]).strip(os.pathsep)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            [sys.executable, *command], env=os.environ | {"PYTHONPATH": path}, text=True, **pipes
        )

    def says(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def count(self) -> int:
        """What it has counted."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.says())

    def halt(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> str:
        """Have it end what it has begun; what it says at last."""
        return self.process.communicate(timeout=600)[0]


@contextmanager
def served(model: str, kv_gib: float, threads: int) -> Iterator[tuple[Process, int]]:
    """A server, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = [f"--port={port}", f"--kv-budget={kv_gib}", f"--threads={threads}"]
    server = Process("-m", "choreo_server", model, *told)
    try:
        for _ in range(1200):
            try:
                metrics(port)
                break
            except OSError:
                assert server.process.poll() is None, "the server has ended before it began"
                time.sleep(0.1)
        yield server, port
    finally:
        server.go_on()
        server.process.terminate()
        server.process.wait(60)


def alone(asked: argparse.Namespace) -> None:
    """The engine without a server: the same calls of it as the server makes, and as many heard of each."""
    torch.set_num_threads(asked.threads)
    heard = Heard()
    memory = Memory(kv_budget_bytes=round(asked.kv_gib * (1 << 30)))
    with Engine.load(asked.model, memory=memory) as engine:

        async def do(job: Job) -> None:
            sampling = Sampling(temperature=1.0, seed=job.number, max_tokens=job.asked)
            call = ChatCall(engine, [HumanMessage(job.text)], ChatRequest(sampling=sampling))
            with engine.scope():
                with closing(call.asked({})) as calls:
                    try:
                        prefills = next(calls)
                        while True:
                            prefills = calls.send(await engine.aprefill(prefills))
                    except StopIteration as done:
                        stream = engine.astream(**vars(done.value))
                tokens = 0
                async with aclosing(stream):
                    async for _ in stream:
                        tokens += 1
                        heard.tokens += tokens <= job.heard
                        if job.leaves and tokens == job.heard:
                            break

        print("begun", flush=True)
        sys.setswitchinterval(0.0005)  # as the server does
        asyncio.run(streams(asked.streams, asked.longest, do, Told(lambda: heard.tokens)))


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All of it. Raises `ChoreoError` if a request fails, or something is not given back."""
    own = [__file__, f"--streams={asked.streams}", f"--longest={asked.longest}", f"--kv-gib={asked.kv_gib}"]
    own += [f"--model={asked.model}", f"--threads={asked.threads}"]
    with served(asked.model, asked.kv_gib, asked.threads) as (server, port):
        before = flushed(port)
        engine = Process(*own, "--alone")
        engine.says()
        time.sleep(asked.warm)
        engine.halt()
        client = Process(*own, f"--client={port}")
        client.says()
        time.sleep(asked.warm)
        counted: dict[str, list[tuple[int, float]]] = {"server": [], "engine": []}
        while sum(seconds for _, seconds in counted["server"]) < asked.seconds:
            counted["server"].append(window(client.count, asked.window))
            client.halt()
            server.halt()
            engine.go_on()
            counted["engine"].append(window(engine.count, asked.window))
            engine.halt()
            server.go_on()
            client.go_on()
        engine.process.kill()
        heard = Heard(**json.loads(client.end()))
        after = flushed(port)
    if heard.failed:
        raise ChoreoError(f"{heard.failed} requests have failed, the first with {heard.first}")
    if before != after:
        raise ChoreoError(f"the server held {before} before, and {after} afterwards")
    rates = {name: sum(n for n, _ in each) / sum(seconds for _, seconds in each) for name, each in counted.items()}
    return {
        "streams": asked.streams,
        "threads": asked.threads,
        "windows": len(counted["server"]),
        "seconds": round(sum(seconds for _, seconds in counted["server"]), 1),
        **vars(heard),
        "server_tokens_per_s": round(rates["server"], 1),
        "engine_tokens_per_s": round(rates["engine"], 1),
        "ratio": round(rates["server"] / rates["engine"], 3),
        "held": after,
    }


def window(counted: Callable[[], int], seconds: float) -> tuple[int, float]:
    """How many more there are after so many seconds, and after how many that really was."""
    before, started = counted(), time.perf_counter()
    time.sleep(seconds)
    return counted() - before, time.perf_counter() - started


def written(folder: str) -> None:
    """Random weights of SmolLM2-135M's shape, each of whose tokens says something: streams are of pieces."""
    made = (
        "import sys, pathlib; from choreo_agents.models.random_llama import SHAPES, save_random_llama; "
        "save_random_llama(SHAPES['smollm2-135m'], pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", made, folder], check=True, stdout=subprocess.DEVNULL)
    config, path = json.loads((Path(folder) / "config.json").read_text()), Path(folder) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({f"\u0120x{number:x}": number for number in range(len(vocabulary), config["vocab_size"])})
    path.write_text(json.dumps(tokenizer))


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--streams", type=int, default=64)
    told.add_argument("--seconds", type=float, default=120.0)
    told.add_argument("--warm", type=float, default=30.0, help="seconds before what is measured")
    told.add_argument("--longest", type=int, default=32, help="tokens of an answer at most")
    told.add_argument("--model", help="by default random weights of SmolLM2-135M's shape")
    told.add_argument("--kv-gib", type=float, default=2.0)
    told.add_argument("--threads", type=int, default=1, help="that an engine computes with, in the server and alone")
    told.add_argument("--window", type=float, default=5.0, help="seconds after which server and engine take turns")
    told.add_argument("--client", type=int, help=argparse.SUPPRESS)
    told.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = told.parse_args()
    if asked.alone:
        alone(asked)
    elif asked.client:
        heard = Heard()
        print("begun", flush=True)
        done = streams(
            asked.streams, asked.longest, lambda job: asking(asked.client, job, heard), Told(lambda: heard.tokens)
        )
        asyncio.run(done)
        print(json.dumps(vars(heard)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            if not asked.model:
                asked.model = str(Path(folder) / "model")
                written(asked.model)
            print(json.dumps(measure(asked)))


if __name__ == "__main__":
    main()
