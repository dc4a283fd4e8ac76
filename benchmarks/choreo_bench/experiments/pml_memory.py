"""Memory that a cached token takes on each tier, measured on an engine (Prompt Cache, table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from choreo_agents.engine import Engine, Memory
from choreo_agents.models import LoadedModel
from choreo_bench.harness import Report, Table

PLACES = ("device", "host", "disk")


def token_memory(model: LoadedModel, tokens: int = 256) -> dict[str, Any]:
    """Measure the bytes of a token in each place, headers of files included.

    Args:
        model: Encodes a text.
        tokens: Of the text; less where the context is shorter.
    """
    count = min(tokens, model.adapter.max_positions)
    geometry = model.adapter.geometry
    budget = 4 * (count + 16) * geometry.bytes_per_token
    with TemporaryDirectory() as folder:
        memory = Memory(kv_budget_bytes=budget, host_bytes=budget, persist_dir=Path(folder))
        with Engine.load(model, memory=memory, salt=token_hex()) as engine:
            handle = engine.prefill([number % min(256, model.adapter.vocabulary_size) for number in range(count)])
            device = engine.stats().kv_bytes
            engine.kv.offload([handle])
            host = engine.stats().host_bytes
            engine.kv.persist([handle])
            engine.kv.flush()
            disk = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    dtype = str(geometry.dtype).removeprefix("torch.")
    return {"dtype": dtype, "device": device / count, "host": host / count, "disk": disk / count}


def memory_report(rows_by_model: Mapping[str, Mapping[str, Any]]) -> Report:
    """Report a row for each model, by its name."""
    rows = [
        [name, row["dtype"], *(f"{row[place] / 1024:,.2f}" for place in PLACES), f"{(1 << 30) / row['device']:,.0f}"]
        for name, row in rows_by_model.items()
    ]
    columns = ["model", "kept as", *PLACES, "tokens in 1 GiB"]
    lines = ["in 16 bits a Llama 7B takes 512 KiB (Prompt Cache, table 2)"]
    return Report([Table(columns, rows, "KiB that a cached token takes", words=2)], dict(rows_by_model), lines=lines)
