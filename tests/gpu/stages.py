"""The stages, in the order in which what they find is worth most."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from choreo_agents import Decode, Engine, MessageHandle, Sampling
from choreo_agents.attention.backends import backend_name, why_not_faster
from choreo_agents.models.random_llama import SHAPES, LlamaShape
from choreo_agents.tracing import StepRan
from gpu import exact
from gpu.models import drawn_llama
from gpu.rows import Table

SHARED, NEW = 8192, 32
"""Tokens that are reused, and that are new, in the table."""
MEASURED: dict[str, float] = {}
"""GB/s of a copy and TFLOP/s of a product, once they are known."""


def facts(table: Table) -> None:
    """What the machine can do at best."""
    import transformers

    device = table.device
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU: a dry run"
    table.row("device", name)
    table.row("versions", f"torch {torch.__version__}, transformers {transformers.__version__}")
    size = 1 << (20 if table.is_dry else 30)
    one = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    MEASURED["GB/s"] = 2 * size / table.milliseconds(lambda: other.copy_(one)) / 1e6
    table.row("copy, GB/s read and written", round(MEASURED["GB/s"], 1))
    side = 256 if table.is_dry else 8192
    left, right = torch.randn(2, side, side, device=device).bfloat16()
    MEASURED["TFLOP/s"] = 2 * side**3 / table.milliseconds(lambda: left @ right) / 1e9
    table.row("product of bfloat16s, TFLOP/s", round(MEASURED["TFLOP/s"], 2))
    few = torch.zeros(8, device=device)
    table.wait()
    begun = time.perf_counter()
    for _ in range(2000):
        few.add_(1)
    table.wait()
    table.row("a launch, microseconds", round((time.perf_counter() - begun) / 2000 * 1e6, 2))


def exactness(table: Table) -> None:
    """What each backend computes, alone, in company, from the host and replayed: see `exact`."""
    for name, value, met in exact.run(table.device, table.seconds_left):
        table.row(name, value, bar="all of it", met=met)


def figures(table: Table) -> None:
    """Decode, first token and prefill of an 8B-shaped Llama, beside what the device can do at best.

    The bars are those of the backend that `auto` takes: the others are told beside it.
    """
    shape = LlamaShape(2, 64, 128, 4, 2, 320) if table.is_dry else SHAPES["llama-8b"]
    shared, new = (40, 4) if table.is_dry else (SHARED, NEW)
    dtype = torch.bfloat16
    for name in exact.backends_of(table.device, dtype)[::-1]:
        if table.is_over(f"what {name} takes"):
            continue
        model = drawn_llama(shape, table.device, dtype, name)
        is_usual = backend_name(model.backend(name)) == backend_name(model.backend("auto"))  # type: ignore[arg-type]
        table.has_bars = is_usual and not table.is_dry
        ran: list[Any] = []
        room = {} if table.is_dry else {"kv_budget_bytes": 16 << 30}
        with exact.engine_of(model, name, ran.append, **room) as engine:
            _prefills(table, engine, ran, model, name, shared)
            trunk = engine.prefill(_tokens(shared, 0), [])
            for rows in (2, 3) if table.is_dry else (16, 64):
                _decodes(table, engine, ran, model, name, rows, trunk, shared)
            most = 3 if table.is_dry else 64
            step = _decode_ms(engine, ran, most, trunk, 3 if table.is_dry else 32, {"temperature": 0.7, "top_p": 0.95})
            table.row(f"{name}: decode step of {most} rows at T 0.7, top-p 0.95, ms", round(step, 3))
            _first_token(table, engine, name, trunk, new)
            backend = model.backend(name)  # type: ignore[arg-type]
            table.row(f"{name}: serves", f"{backend_name(backend)} {why_not_faster(backend)}")
            stats = engine.admin.stats()
            table.row(f"{name}: passes captured", f"{stats.graphs} {stats.graphs_why}")
            table.row(f"{name}: steps ahead", f"{stats.steps_ahead} of {stats.steps}")
        del model, engine
        if table.device.type == "cuda":
            torch.cuda.empty_cache()


def _tokens(count: int, seed: int) -> list[int]:
    drawn_tokens = random.Random(seed)
    return [drawn_tokens.randrange(3, 300) for _ in range(count)]


def _weights(model: Any) -> int:
    """Parameters that each step reads: all but the embedding."""
    return int(model.adapter.parameters - model.adapter.model.get_input_embeddings().weight.numel())


def _prefills(table: Table, engine: Engine, ran: list[Any], model: Any, name: str, tokens: int) -> None:
    taken = []
    ran.clear()
    for seed in range(1, 2 if table.is_dry else 4):
        table.wait()
        begun = time.perf_counter()
        engine.release(engine.prefill(_tokens(tokens, seed), []))
        table.wait()  # nothing is sampled: the engine is done when all is told
        taken.append(time.perf_counter() - begun)
    passes = [f"{event.tokens}: {event.duration_s * 1e3:.1f}" for event in ran if isinstance(event, StepRan)]
    table.row(f"{name}: prefills, ms", f"{[round(each * 1e3, 1) for each in taken]}; passes {passes}")
    config = model.adapter.model.config
    products = 2 * _weights(model) * tokens + 2 * config.num_hidden_layers * config.hidden_size * tokens**2
    share = products / median(taken) / 1e12 / MEASURED["TFLOP/s"]
    table.row(
        f"{name}: prefill of {tokens}, of the rate of products", round(share, 3), **table.bar(share >= 0.6, ">= 0.6")
    )


def _decodes(
    table: Table, engine: Engine, ran: list[Any], model: Any, name: str, rows: int, trunk: Any, shared: int
) -> None:
    steps = 3 if table.is_dry else 32
    step = _decode_ms(engine, ran, rows, trunk, steps)
    each = model.adapter.geometry.bytes_per_token
    read = 2 * _weights(model) + each * (shared + rows * steps // 2)
    ratio = step / (read / MEASURED["GB/s"] / 1e6)
    table.row(f"{name}: decode step of {rows} rows, ms", round(step, 3))
    table.row(f"{name}: the same, of reading its bytes", round(ratio, 3), **table.bar(ratio <= 1.3, "<= 1.3"))


def _decode_ms(
    engine: Engine, ran: list[Any], rows: int, trunk: Any, steps: int, asked: dict[str, Any] | None = None
) -> float:
    """The median from one step's end to the next one's."""
    sampling = Sampling(max_tokens=steps, stop_tokens=(), **(asked or {}))
    ran.clear()
    for handle in engine.decode([Decode([3 + row], [trunk], sampling=sampling) for row in range(rows)]):
        engine.release(handle)
    ends = [event.time_s for event in ran if isinstance(event, StepRan) and event.decode_rows == rows]
    return median(later - earlier for earlier, later in pairwise(ends)) * 1e3


def _first_token(table: Table, engine: Engine, name: str, trunk: Any, new: int) -> None:
    taken = []
    for seed in range(2 if table.is_dry else 11):
        header = _tokens(new, 100 + seed)
        table.wait()
        begun = time.perf_counter()
        told_ = engine.stream(header, [trunk], sampling=Sampling(max_tokens=1, stop_tokens=()))
        next(told_)
        taken.append((time.perf_counter() - begun) * 1e3)
        [handle] = told_
        assert isinstance(handle, MessageHandle)
        engine.release(handle)
    table.row(f"{name}: first tokens, ms", str([round(each, 2) for each in taken]))
    usual = median(taken[-7:])
    table.row(f"{name}: first token, once its sizes recur, ms", round(usual, 3), **table.bar(usual <= 10, "<= 10"))


STAGES = {"facts": facts, "exactness": exactness, "figures": figures}
