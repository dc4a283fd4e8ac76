"""What a cached token takes in each memory, measured on an engine."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from tempfile import TemporaryDirectory

from choreo_agents.engine import Engine, Memory
from choreo_agents.models import LoadedModel


@dataclass(frozen=True)
class TokenMemory:
    """What one cached token takes in each memory, in bytes (Prompt Cache, table 2)."""

    device: float
    host: float
    disk: float


def token_memory(model: LoadedModel, tokens: int = 256) -> TokenMemory:
    """Measured on a text of so many tokens (less where the model's context is shorter), headers of files included."""
    count = min(tokens, model.adapter.max_positions)
    budget = 4 * (count + 16) * model.adapter.geometry.bytes_per_token
    with (
        TemporaryDirectory() as folder,
        Engine.load(model, memory=Memory(kv_budget_bytes=budget, host_bytes=budget), salt=token_hex()) as engine,
    ):
        handle = engine.prefill([number % min(256, model.adapter.vocabulary_size) for number in range(count)])
        device = engine.stats().kv_bytes
        store = engine.kv.store(folder)
        store.save(engine.kv.key(handle), engine.kv.read(handle))
        engine.kv.park([handle])
        return TokenMemory(device / count, engine.stats().host_bytes / count, store.used_bytes() / count)
