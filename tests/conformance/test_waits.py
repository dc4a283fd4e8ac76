"""A step asks a GPU for nothing before the sampler: all that says where things are is made on the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.test_varlen_dialects import played
from support.families import FAMILIES, save_tiny
from support.waits import Waits, counted_waits, mark
from torch import Tensor

from choreo_agents import Decode, Engine, Memory, Sampling
from choreo_agents.attention.backends import make_backend
from choreo_agents.attention.backends.varlen import Dialect, VarlenBackend
from choreo_agents.attention.packing import SentTables
from choreo_agents.models.hook import IMPLEMENTATION
from choreo_agents.runtime import executor
from choreo_agents.tracing import EventList, StepFailed

CPU = torch.device("cpu")
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


class Watch:
    """The waits of each step, up to the sampler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[str]] = []
        self.current: Waits | None = None
        run, choose = executor.Executor._run, executor.choose_tokens

        def watched(ran: executor.Executor, *given: Any) -> Any:
            model, pool = ran.adapter.model, ran.pool
            mark((*model.parameters(), *model.buffers(), *pool.keys, *pool.values))
            with counted_waits() as self.current:
                return run(ran, *given)

        def sent(tables: SentTables, name: str) -> Tensor:
            mark([tables._views[name]])
            return tables._views[name]

        def chosen(*given: Any) -> Any:
            assert self.current is not None
            self.steps.append([*self.current.found])
            return choose(*given)

        monkeypatch.setattr(executor.Executor, "_run", watched)
        monkeypatch.setattr(executor, "choose_tokens", chosen)
        monkeypatch.setattr(SentTables, "__getitem__", sent)

    def unseen(self) -> Any:
        return nullcontext() if self.current is None else self.current.unseen()

    def on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel: what it does is not looked into."""

        def kernel(*given: Any, **options: Any) -> Any:
            with self.unseen():
                return function(*given, **options)

        return kernel


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def speak(model: Path, backend: Any, dtype: torch.dtype) -> None:
    """Two rows decode over messages that both read, moved and reordered, one of them beside the prefill of a third."""
    events = EventList()
    settings: Any = {"backend": backend, "memory": Memory(kv_budget_bytes=1 << 24), "sink": events}
    with Engine.load(model, dtype=dtype, **settings) as engine:
        made = [engine.prefill([5 + i, *range(9, 30)], []) for i in range(3)]
        sampling = Sampling(max_tokens=4, stop_tokens=())
        engine.decode([Decode([7], made[::-1], sampling=sampling), Decode([8], made[:2], sampling=sampling)])
    failed = [event for event in events.events if isinstance(event, StepFailed)]
    assert not failed, "no step had to be run twice"


def test_the_flash_kernel_is_never_waited_for(watch: Watch, tmp_path: Path) -> None:
    kernel = watch.on_device(played(in_place=True, heads_first=True))
    backend = VarlenBackend(torch.bfloat16, CPU, kernel, Dialect(in_place=True, heads_first=True))
    speak(save_tiny(tmp_path, "llama", FAMILIES["llama"]), backend, torch.bfloat16)
    assert len(watch.steps) >= 4 and not any(watch.steps), watch.steps


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and TRITON_INTERPRET=1: make test-triton")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_triton_kernels_are_never_waited_for(
    watch: Watch, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from choreo_agents.attention.backends.triton import launch

    for name in ("store_kernel", "attend_kernel", "merge_kernel"):
        kernel = getattr(launch, name)

        class Launched:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def __getitem__(self, grid: Any) -> Any:
                return watch.on_device(self.inner[grid])

        monkeypatch.setattr(launch, name, Launched(kernel))
    speak(save_tiny(tmp_path, family, FAMILIES[family]), make_backend("triton", torch.float32, CPU), torch.float32)
    assert len(watch.steps) >= 4 and not any(watch.steps), watch.steps


def test_a_backend_that_has_the_device_say_something_is_found(watch: Watch, tmp_path: Path) -> None:
    speak(save_tiny(tmp_path, "llama", FAMILIES["llama"]), make_backend("folded", torch.float32, CPU), torch.float32)
    assert any("to" in step for step in watch.steps), "its tables are copied from memory that is not pinned"


def test_transformers_makes_no_mask() -> None:
    from transformers import AttentionMaskInterface

    assert IMPLEMENTATION not in AttentionMaskInterface().valid_keys()


@pytest.mark.parametrize("ask", [bool, int, Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.cpu, lambda t: t[t > 0]])
def test_whatever_is_asked_of_the_device_is_found(ask: Callable[[Tensor], Any]) -> None:
    there = torch.ones(1)
    mark([there])
    with counted_waits() as waits:
        ask(torch.ones(1))
        assert not waits.found, "the host may ask itself"
        ask(there * 2)
    assert waits.found
