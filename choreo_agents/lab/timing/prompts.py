"""How soon an answer to a prompt begins: with its modules in each memory, and with all of it encoded from text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from choreo_agents.engine import Engine, Memory, StreamedToken
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.pml import Assembly, CompiledSchema, Prompt, Schema, SchemaLibrary, compile_prompt, compile_schema
from choreo_agents.pml.shelf import OnReady
from choreo_agents.sampling import Sampling

Source = Literal["text", "disk", "host", "device"]
SOURCES: tuple[Source, ...] = ("text", "disk", "host", "device")
_ONE = Sampling(temperature=0.0, max_tokens=1)
_ROOM = 1.5
"""Memory for what blocks of slots leave empty, and for the header of an answer."""


@dataclass(frozen=True)
class FirstTokenTime:
    """What lay between a prompt and the first token of its answer."""

    source: Source
    """Where the modules were; `text`: nowhere."""
    seconds: float
    """The median, if there are several."""
    encoded: int
    """Tokens that were encoded: of the prompt, and of the header that an answer starts with."""
    reused: int


def room_for(model: LoadedModel, compiled: CompiledSchema, prompt: Prompt, added: int) -> int:
    """Bytes of KV memory in which a whole schema and an answer of so many tokens have room."""
    assembly = compile_prompt(compiled, prompt, model)
    pieces = [len(piece.tokens) for piece in compiled.pieces.values()] + [len(text.tokens) for text in assembly.fresh]
    tokens = sum(16 + length for length in pieces) + assembly.end + added
    return int(_ROOM * tokens * model.adapter.geometry.bytes_per_token) + (1 << 20)


class PromptTimer:
    """A schema and a prompt on an engine and a library of their own. Close it, or use it as a block.

    Args:
        model: What runs.
        schema: Is encoded once.
        prompt: Is answered again and again.
        folder: For files; None: one that goes with it.
        speaker: Who answers.
        added: Tokens that an answer may have.
        on_ready: Is told of tokens that have been encoded, or are on disk already.
        salt: The secret that files in `folder` are sealed with; of no meaning without one.
    """

    def __init__(
        self,
        model: LoadedModel,
        schema: Schema,
        prompt: Prompt,
        folder: Path | None = None,
        speaker: str | None = None,
        added: int = 64,
        on_ready: OnReady = lambda _: None,
        salt: str = "",
    ) -> None:
        if prompt.schema != schema.tree:
            raise InvalidRequestError(f"the prompt is of schema {prompt.schema.name!r}, not {schema.name!r}")
        self.prompt, self.speaker = prompt, speaker
        budget = room_for(model, compile_schema(schema, model), prompt, added)
        self._own = TemporaryDirectory() if folder is None else None
        secret = secrets.token_hex() if folder is None else salt
        self.engine = Engine.load(model, memory=Memory(kv_budget_bytes=budget, host_bytes=budget), salt=secret)
        self.library = SchemaLibrary(self.engine, folder or Path(self._own.name if self._own else ""))
        self.library.register(schema, encode="eager", on_ready=on_ready)
        self._twin = Engine.load(model, method="naive", memory=Memory(kv_budget_bytes=budget))
        self._header = len(model.encode(self.engine.chat.header(speaker)))

    def answer(self, sampling: Sampling) -> Iterator[StreamedToken | MessageHandle]:
        """Each token of an answer as it comes, and its handle last."""
        return self.library.stream(self.prompt, sampling, author=self.speaker)

    def from_text(self, sampling: Sampling) -> str:
        """What the model answers when it reads the same as an ordinary prompt."""
        engine = self._twin
        with engine.scope():
            said = engine.decode(
                engine.chat.header(self.speaker),
                [engine.prefill(self.tokens())],
                sampling=sampling,
                closing=engine.chat.turn_end,
            )
            header = self._header
            return engine.model.decode(engine.tokens(said)[header:], special=False).strip()

    def tokens(self) -> list[int]:
        """All that an answer attends to, in the order of positions."""
        with self.library.assemble(self.prompt) as view:
            return [token for handle in view.handles for token in self.engine.tokens(handle)]

    def measure(self, repeats: int, on_progress: Callable[[], None] = lambda: None) -> list[FirstTokenTime]:
        """First tokens from every source, taken in turn; the first round of each is not counted."""
        found: dict[Source, list[FirstTokenTime]] = {source: [] for source in SOURCES}
        for _ in range(repeats + 1):
            for source in SOURCES:
                found[source].append(self.first_token(source))
                on_progress()
        return [replace(each[-1], seconds=median(one.seconds for one in each[1:])) for each in found.values()]

    def first_token(self, source: Source) -> FirstTokenTime:
        """One first token, with the modules where they are said to be."""
        fresh, cached = self._assembly.fresh_tokens + self._header, self._assembly.cached_tokens
        if source == "text":
            return FirstTokenTime(source, self._text(self._tokens), fresh + cached, 0)
        return FirstTokenTime(source, self._cached(source), fresh, cached)

    def copied(self) -> float:
        """Seconds that all that the prompt imports takes from host memory to the device, with nothing beside it."""
        with self.library.assemble(self.prompt) as view:
            cached = {piece.offset for piece in self._assembly.cached}
            handles = [handle for offset, handle in view.placed if offset in cached]
            self.engine.kv.park()
            started = time.perf_counter()
            self.engine.kv.restore(handles)
            return time.perf_counter() - started

    @cached_property
    def _tokens(self) -> list[int]:
        return self.tokens()

    @cached_property
    def _assembly(self) -> Assembly:
        return compile_prompt(self.library.compiled(self.prompt.schema.name), self.prompt, self.engine.model)

    def _cached(self, source: Source) -> float:
        name = self.prompt.schema.name
        self.library.load(name)
        if source == "host":
            self.engine.kv.park()
        elif source == "disk":
            self.library.evict(name)
        with self.engine.scope():
            started = time.perf_counter()
            return _first(self.library.stream(self.prompt, _ONE, author=self.speaker)) - started

    def _text(self, tokens: list[int]) -> float:
        engine = self._twin
        with engine.scope():
            started = time.perf_counter()
            prompt = engine.prefill(tokens)
            header = engine.chat.header(self.speaker)
            return _first(engine.stream(header, [prompt], sampling=_ONE)) - started

    def close(self) -> None:
        """End the engines, and remove the folder if it is its own."""
        self.library.close()
        self.engine.close()
        self._twin.close()
        if self._own is not None:
            self._own.cleanup()

    def __enter__(self) -> PromptTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first(stream: Iterator[StreamedToken | MessageHandle]) -> float:
    """When the first token came. What comes after it is waited for: nothing is to run during the next measurement."""
    times = [time.perf_counter() for _ in stream]
    return times[0]
