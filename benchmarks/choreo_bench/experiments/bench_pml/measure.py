"""Times first tokens of prompts whose modules are in every memory; what is known already is not timed again.

Prompts have so many cached tokens of random words, or are those of example schemas.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import torch

from choreo_agents.engine import Engine, Memory, StreamedToken
from choreo_agents.errors import PMLError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.pml import (
    Assembly,
    CompiledSchema,
    Prompt,
    Schema,
    SchemaLibrary,
    compile_prompt,
    compile_schema,
)
from choreo_agents.sampling import Sampling
from choreo_agents.training.journal import Journal, Record
from choreo_bench.competitors import PlainGenerate
from choreo_bench.language import vocabulary
from choreo_bench.timing import rest

MODULE_TOKENS = 1024
"""Of each module, the last one excepted."""
NEW_TOKENS = 50
"""That are encoded with the prompt: a question, and the header of the answer (Prompt Cache, section 5.4)."""
_SUFFIX, _PROMPT = ".pml", ".prompt.pml"


@dataclass(frozen=True)
class PromptCase:
    """A prompt of a schema."""

    name: str
    """In tables and journals."""
    schema: Schema
    prompt: Prompt
    length: int | None = None
    """The cached tokens that were asked for; None: an example."""

    def sizes(self, model: LoadedModel) -> tuple[int, int]:
        """Tokens of modules that the prompt imports, and tokens that are encoded with it, the answer's header too."""
        assembly = compile_prompt(compile_schema(self.schema, model), self.prompt, model)
        header = len(model.encode(model.chat.header(None)))
        return assembly.cached_tokens, assembly.fresh_tokens + header


def case_of_length(model: LoadedModel, length: int, new: int = NEW_TOKENS) -> PromptCase:
    """A prompt of so many cached tokens in modules, and so many new ones; exactly so where a word is one token.

    Raises:
        ValueError: `length` or `new` leaves no room for a word.
    """
    rng = random.Random(f"modules {length}")
    chat = model.chat
    word = vocabulary.PEOPLE[0]
    around = len(model.encode(chat.turn("user", word))) - len(model.encode(f" {word}"))
    around += len(model.encode(chat.header(None)))
    left, words_left = length - len(model.encode(chat.bos)), new - around
    if left < 1 or words_left < 1:
        raise ValueError(f"{length} cached and {new} new tokens leave no space for text: raise them")
    modules: list[str] = []
    while left:
        tokens = min(left, MODULE_TOKENS)
        modules.append(f'<module name="part-{len(modules) + 1}">{_words(model, tokens, rng)}</module>')
        left -= tokens
    text = f'<schema name="random-{length}" xml:space="preserve">{"".join(modules)}</schema>'
    schema = Schema.from_text(text)
    imports = "".join(f"<part-{number}/>" for number in range(1, len(modules) + 1))
    prompt = schema.prompt(f"{imports}<user>{_words(model, words_left, rng).strip()}</user>")
    return PromptCase(f"{length:,} tokens", schema, prompt, length)


def example_cases(folder: Path) -> list[PromptCase]:
    """The schemas of a folder, each with the prompt beside it: `NAME.pml` and `NAME.prompt.pml`.

    Raises:
        PMLError: With all that is wrong in one of them. OSError: It cannot be read.
    """
    cases = []
    for path in sorted(folder.glob(f"*{_PROMPT}")):
        schema = Schema.from_file(path.with_name(path.name.removesuffix(_PROMPT) + _SUFFIX))
        cases.append(PromptCase(schema.name, schema, schema.prompt_file(path)))
    return cases


def that_fit(cases: Sequence[PromptCase], model: LoadedModel, say: Callable[[str], None]) -> list[PromptCase]:
    """Leave out the cases that do not fit into the model's context, and say which."""
    fitting = []
    for case in cases:
        try:
            case.sizes(model)
            fitting.append(case)
        except PMLError as error:
            say(f"{case.name} is left out: {error}")
    return fitting


def _words(model: LoadedModel, tokens: int, rng: random.Random) -> str:
    """Random words, a blank before each, up to so many tokens."""
    words = list[str]()
    while tokens > 0:
        words.append(f" {rng.choice(vocabulary.words())}")
        tokens -= len(model.encode(words[-1]))
    return "".join(words)


Way = Literal["text", "HF generate", "disk", "host", "device", "host copy"]
"""Where modules are: nowhere, so that the engine or Hugging Face encodes everything; on disk, on the host, on the
device. Last, no first token but a part of that from the host: the copy of its modules to the device, by itself."""
WAYS: tuple[Way, ...] = get_args(Way)
WHOLE: tuple[Way, ...] = ("text", "HF generate")
PLACES: tuple[Way, ...] = ("disk", "host", "device")
REPEATS = 5
"""Timed rounds, in which the ways take turns, after one that is not counted, ..."""
DEAR_TOKENS = 8192
"""... but one alone of what encodes more than these."""
OnProgress = Callable[[str, Way], None]
_ONE = Sampling(temperature=0.0, max_tokens=1)
_ROOM = 1.5
"""Memory for what blocks of slots leave empty, and for the header of an answer."""


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
        self._folder = TemporaryDirectory()
        filed = Memory(kv_budget_bytes=budget, persist_dir=Path(self._folder.name))
        self.engine = Engine.load(model, memory=Memory(kv_budget_bytes=budget, host_bytes=budget))
        self.library = SchemaLibrary(self.engine)
        self.filed = SchemaLibrary(Engine.load(model, memory=filed, salt=secrets.token_hex()))
        for library in (self.library, self.filed):
            library.register(schema, encode="eager")
        self._twin = Engine.load(model, method="naive", memory=Memory(kv_budget_bytes=budget))
        self._header = len(model.encode(self.engine.chat.header(None)))

    @cached_property
    def tokens(self) -> list[int]:
        """All that an answer attends to, in the order of positions."""
        with self.library.assemble(self.prompt) as view:
            return [token for handle in view.handles for token in self.engine.tokens(handle)]

    def run(self, way: Way, competitor: PlainGenerate | None = None) -> Record:
        """Time one run, and count the tokens that it encodes and those that it finds encoded."""
        fresh, cached = self._assembly.fresh_tokens + self._header, self._assembly.cached_tokens
        if way == "host copy":
            return {"seconds": self._copied(), "encoded": 0, "reused": cached}
        if way == "HF generate":
            assert competitor is not None
            header = self.engine.model.encode(self.engine.chat.header(None))
            seconds = competitor.first_token_s([*self.tokens, *header])
        else:
            seconds = self._text() if way == "text" else self._cached(way)
        return {"seconds": seconds} | (
            {"encoded": fresh + cached, "reused": 0} if way in WHOLE else {"encoded": fresh, "reused": cached}
        )

    def _copied(self) -> float:
        """Seconds that all that the prompt imports takes from host memory to the device, with nothing beside it."""
        with self.library.assemble(self.prompt) as view:
            self.engine.kv.offload()
            started = time.perf_counter()
            self.engine.kv.prefetch(view.modules)
            return time.perf_counter() - started

    @cached_property
    def _assembly(self) -> Assembly:
        return compile_prompt(self.library.compiled(self.prompt.schema.name), self.prompt, self.engine.model)

    def _cached(self, source: Way) -> float:
        library = self.filed if source == "disk" else self.library
        library.load(self.prompt.schema.name)
        if source != "device":
            library.engine.kv.offload()
        with library.engine.scope():
            started = time.perf_counter()
            return _first(library.stream(self.prompt, _ONE)) - started

    def _text(self) -> float:
        engine, tokens = self._twin, self.tokens
        with engine.scope():
            started = time.perf_counter()
            prompt = engine.prefill(tokens)
            return _first(engine.stream(engine.chat.header(None), [prompt], sampling=_ONE)) - started

    def close(self) -> None:
        """End the engines, and remove the folder."""
        for library in (self.library, self.filed):
            library.close()
            library.engine.close()
        self._twin.close()
        self._folder.cleanup()

    def __enter__(self) -> PromptTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first(stream: Iterator[StreamedToken | MessageHandle]) -> float:
    """Return the time of the first token, after the stream has ended: nothing may run during the next measurement."""
    times = [time.perf_counter() for _ in stream]
    return times[0]


def key_of(case: PromptCase, way: Way, number: int) -> str:
    """Names a run in a journal."""
    return f"{case.name} | {way} | {number}"


@dataclass(frozen=True)
class ModuleBench:
    """Timer of prompts on one model.

    Args:
        model: Serves both engines.
        path: Its folder, for Hugging Face; None: that is left out.
        dtype: Of weights and KV.
        repeats: Timed rounds.
    """

    model: LoadedModel
    path: Path | None
    dtype: torch.dtype
    repeats: int = REPEATS

    @property
    def ways(self) -> list[Way]:
        """Ways of serving that are timed."""
        return [way for way in WAYS if self.path is not None or way != "HF generate"]

    @cached_property
    def competitor(self) -> PlainGenerate | None:
        """Hugging Face, ready."""
        if self.path is None:
            return None
        competitor = PlainGenerate(self.path, self.dtype, str(self.model.adapter.device))
        competitor.first_token_s([3] * 64)
        return competitor

    def runs(self, case: PromptCase) -> list[tuple[Way, int]]:
        """All that is timed of a case, in this order; those of round 0 are not counted."""
        whole = sum(case.sizes(self.model))
        few = [way for way in self.ways if way in WHOLE and whole > DEAR_TOKENS]
        rounds = range(self.repeats + 1)
        return [(way, number) for number in rounds for way in self.ways if way not in few or number == 1]

    def measure(
        self, case: PromptCase, journal: Journal, on_progress: OnProgress = lambda name, way: None
    ) -> list[Record]:
        """Time what the journal does not hold yet; each run is written when it is over.

        Args:
            case: Its modules are encoded before the clock starts.
            journal: Gets a record of each run.
            on_progress: Told of every run that is over, or was before.

        Returns:
            The records of its runs: a journal may hold more.
        """
        left = {way for way, number in self.runs(case) if number and key_of(case, way, number) not in journal}
        with ExitStack() as stack:
            timer = stack.enter_context(PromptTimer(self.model, case.schema, case.prompt)) if left else None
            for way, number in self.runs(case):
                key = key_of(case, way, number)
                if way in left and key not in journal:
                    assert timer is not None
                    rest()
                    record = timer.run(way, self.competitor)
                    if number:
                        journal.add(key, {"case": case.name, "length": case.length, "way": way, **record})
                on_progress(case.name, way)
        return [journal.records[key_of(case, way, number)] for way, number in self.runs(case) if number]
