"""How soon an answer to a prompt begins: with its modules in each memory, and with all of it encoded from text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Literal

from choreo_agents.engine import Engine, Memory, StreamedToken
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.pml import Assembly, CompiledSchema, Prompt, Schema, SchemaLibrary, compile_prompt, compile_schema
from choreo_agents.sampling import Sampling

Source = Literal["text", "disk", "host", "device"]
"""Where modules are; `text`: nowhere."""
_ONE = Sampling(temperature=0.0, max_tokens=1)
_ROOM = 1.5
"""Memory for what blocks of slots leave empty, and for the header of an answer."""


@dataclass(frozen=True)
class FirstTokenTime:
    """What lay between a prompt and the first token of its answer."""

    seconds: float
    encoded: int
    """Tokens that were encoded: of the prompt, and of the header that an answer starts with."""
    reused: int


def room_for(model: LoadedModel, compiled: CompiledSchema, prompt: Prompt) -> int:
    """Bytes of KV memory in which a whole schema and an answer of one token have room."""
    assembly = compile_prompt(compiled, prompt, model)
    pieces = [len(piece.tokens) for piece in compiled.pieces.values()] + [len(text.tokens) for text in assembly.fresh]
    tokens = sum(16 + length for length in pieces) + assembly.end + 1
    return int(_ROOM * tokens * model.adapter.geometry.bytes_per_token) + (1 << 20)


class PromptTimer:
    """A schema and a prompt on an engine and a library of their own. Close it, or use it as a block.

    Args:
        model: What runs.
        schema: Is encoded once.
        prompt: Is answered again and again.
    """

    def __init__(self, model: LoadedModel, schema: Schema, prompt: Prompt) -> None:
        self.prompt = prompt
        budget = room_for(model, compile_schema(schema, model), prompt)
        memory = Memory(kv_budget_bytes=budget, host_bytes=budget)
        self.engine = Engine.load(model, memory=memory, salt=secrets.token_hex())
        self._folder = TemporaryDirectory()
        self.library = SchemaLibrary(self.engine, self._folder.name)
        self.library.register(schema, encode="eager")
        self._twin = Engine.load(model, method="naive", memory=Memory(kv_budget_bytes=budget))
        self._header = len(model.encode(self.engine.chat.header(None)))

    @cached_property
    def tokens(self) -> list[int]:
        """All that an answer attends to, in the order of positions."""
        with self.library.assemble(self.prompt) as view:
            return [token for handle in view.handles for token in self.engine.tokens(handle)]

    def first_token(self, source: Source) -> FirstTokenTime:
        """One first token, with the modules where they are said to be."""
        fresh, cached = self._assembly.fresh_tokens + self._header, self._assembly.cached_tokens
        if source == "text":
            return FirstTokenTime(self._text(), fresh + cached, 0)
        return FirstTokenTime(self._cached(source), fresh, cached)

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
            return _first(self.library.stream(self.prompt, _ONE)) - started

    def _text(self) -> float:
        engine, tokens = self._twin, self.tokens
        with engine.scope():
            started = time.perf_counter()
            prompt = engine.prefill(tokens)
            return _first(engine.stream(engine.chat.header(None), [prompt], sampling=_ONE)) - started

    def close(self) -> None:
        """End the engines, and remove the folder."""
        self.library.close()
        self.engine.close()
        self._twin.close()
        self._folder.cleanup()

    def __enter__(self) -> PromptTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first(stream: Iterator[StreamedToken | MessageHandle]) -> float:
    """When the first token came. What comes after it is waited for: nothing is to run during the next measurement."""
    times = [time.perf_counter() for _ in stream]
    return times[0]
