"""Whether each backend computes what it should, for each dtype that it serves: jobs that need nothing of each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any, NamedTuple

import torch
from support.backends import available_backends

from choreo_agents import Decode, Engine, Memory, Sampling, Scheduling
from choreo_agents.attention.backends import make_backend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import HeadShape
from choreo_agents.errors import InvalidRequestError
from choreo_agents.sampling import BatchSampler, Draw, DrawKernel
from choreo_agents.sampling.noise import noise_key
from choreo_agents.testing.conformance import CASES, KINDS, TELLING, TOLERANCE, drawn, kind_of
from gpu.models import SMALL, drawn_llama

BACKENDS: tuple[str, ...] = ("folded", "native", "varlen", "triton")
"""The fastest last."""
JOBS_AT_ONCE = 6
"""On a GPU: compiling kernels takes most of the time, one CPU for each job."""


class Found(NamedTuple):
    """A row of the table."""

    name: str
    value: str
    met: bool | None = None
    """None: it is told without a bar."""


def served(device: torch.device) -> Iterator[tuple[str, torch.dtype, str]]:
    """Every backend for a device, every dtype, and why it is not served, or nothing."""
    is_dry = device.type == "cpu"
    for name in BACKENDS:
        if is_dry and name not in available_backends():
            continue
        for dtype in TOLERANCE:
            try:
                make_backend(name, dtype, device)  # type: ignore[arg-type]
            except InvalidRequestError as reason:
                yield name, dtype, str(reason)
                continue
            yield name, dtype, ""


def backends_of(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Those that serve a model of a dtype, by name; the fastest last."""
    is_dry = device.type == "cpu"
    return [
        name
        for name, each, why in served(device)
        if each == dtype and not why and not (is_dry and name in ("varlen", "native"))
    ]


def engine_of(model: Any, backend: str, sink: Any = None, *, scheduling: Any = None, **memory: Any) -> Engine:
    device = model.adapter.device
    room = {"kv_budget_bytes": 1 << 24} | memory
    steps = Scheduling(max_batched_tokens=512 if device.type == "cpu" else 4096, **(scheduling or {}))
    return Engine.load(
        model,
        backend=backend,  # type: ignore[arg-type]
        memory=Memory(**room),
        scheduling=steps,
        sink=sink or (lambda _: None),
    )


def conformance(device: torch.device, name: str, dtype: torch.dtype) -> list[Found]:
    """A backend beside the reference in doubles: every layout, and every kind of layer."""
    todo = [(case, "plain") for case in CASES] + [(case, kind) for case in TELLING for kind in KINDS if kind != "plain"]
    if device.type == "cpu":
        todo = [("no tree", kind) for kind in KINDS] + [("a tree", "plain")]
    worst, wrong = 0.0, []
    for case_name, kind_name in todo:
        case = CASES[case_name]
        kind = kind_of(case.head_dim, **KINDS[kind_name])
        given = drawn(case, dtype)
        scale = case.head_dim**-0.5
        wanted = ReferenceBackend().prepare(case.layout, kind).attend(*(each.double() for each in given), scale)
        try:
            made = make_backend(name, dtype, device, HeadShape(case.heads, case.kv_heads, case.head_dim))  # type: ignore[arg-type]
            moved = (each.to(device) for each in given)
            got = made.prepare(case.layout, kind).attend(*moved, scale)
            off = float((got.cpu().double() - wanted).abs().max())
        except Exception as error:  # one case says nothing of the next
            wrong.append(f"{case_name}, {kind_name}: {error!r:.150}")
            continue
        worst = max(worst, off)
        if not off <= TOLERANCE[dtype]:
            wrong.append(f"{case_name}, {kind_name}: {off:.1e}")
    about = f"{name}, {dtype}: conforming"
    found = [Found(about, f"{len(todo) - len(wrong)} of {len(todo)}, {worst:.1e} off at most", not wrong)]
    return found + ([Found(f"{about}: off", str(wrong[:8]))] if wrong else [])


def company(device: torch.device, name: str, dtype: torch.dtype) -> list[Found]:
    """A row says the same alone and among others; KV that went to the host and came back is what it was.

    In bf16 the first is told without a bar: products of other shapes round otherwise, and ties are common.
    """
    count, steps = (3, 2) if device.type == "cpu" else (8, 32)
    sampling = Sampling(max_tokens=steps, stop_tokens=())
    model, about = drawn_llama(SMALL, device, dtype, name), f"{name}, {dtype}"
    found = []
    with engine_of(model, name) as engine:
        shared = [engine.prefill([7 + i, *range(9, 40)], []) for i in range(2)]
        calls = [Decode([5 + i], shared[::-1] if i % 2 else shared, sampling=sampling) for i in range(count)]
        alone = [engine.tokens(engine.decode([call])[0]) for call in calls[:2]]
        same = alone == [engine.tokens(handle) for handle in engine.decode(calls)][:2]
        met = same if dtype == torch.float32 else None
        found.append(Found(f"{about}: words alone and among {count}", "the same" if same else "others", met))
    least = model.adapter.geometry.bytes_per_token * 16 * 5
    with engine_of(model, name, kv_budget_bytes=least, host_bytes=1 << 24) as engine:
        first = engine.prefill([*range(9, 40)], [])
        call = Decode([5], [first], sampling=sampling)
        before = engine.tokens(engine.decode([call])[0])
        for i in range(2):
            engine.release(engine.prefill([11 + i, *range(9, 50)], []))
        same, stats = before == engine.tokens(engine.decode([call])[0]), engine.admin.stats()
        back = f"{stats.restored_from_host} messages, words are {'the same' if same else 'others'}"
        found.append(Found(f"{about}: to the host and back", back, same and stats.restored_from_host > 0))
    return found


def graphs(device: torch.device, name: str, dtype: torch.dtype) -> list[Found]:
    """Replayed a step ahead, replayed, or launch by launch: the same words, and the same bits of their likelihoods."""
    count, steps = (2, 2) if device.type == "cpu" else (9, 40)
    model = drawn_llama(SMALL, device, dtype, name)
    said: list[Any] = []
    counts: list[str] = []
    for scheduling in ({}, {"ahead": False}, {"graphs": False}):
        with engine_of(model, name, scheduling=scheduling) as engine:
            shared = [engine.prefill([7 + i, *range(9, 40 + i)], []) for i in range(3)]
            calls = []
            for i in range(count):
                sampling = Sampling(max_tokens=steps + 3 * i, stop_tokens=(), temperature=0.7, top_p=0.95, seed=3)
                calls.append(Decode([5 + i, 6], shared[i % 3 :][::-1], sampling=sampling.model_copy(update=_LIKELY)))
            handles = [*engine.decode(calls), *engine.decode(calls[:3])]
            said.append([(engine.tokens(handle), engine.logprobs(handle)) for handle in handles])
            stats = engine.admin.stats()
            counts.append(f"{stats.graphs} captured {stats.graphs_why}, {stats.steps_ahead} steps ahead")
            is_seen = count == 2 or scheduling or (stats.graphs and stats.steps_ahead)
            found = [Found(f"{name}, {dtype}: captured, ahead", counts[0], bool(is_seen))]
    for other, about in zip(said[1:], ("ahead and not", "ahead and launch by launch"), strict=True):
        same = other == said[0]
        found.append(Found(f"{name}, {dtype}: {about}", "the same bits" if same else "others", same))
    return found


def drawing(device: torch.device, name: str, dtype: torch.dtype) -> list[Found]:
    """Tokens drawn in one launch and by torch's operators: the same."""
    kernel = DrawKernel.on(device)
    assert kernel is not None
    one, other = BatchSampler(kernel), BatchSampler()
    rows, words, rounds = (2, 700, 1) if device.type == "cpu" else (64, 128256, 4)
    different = total = 0
    for settings in _DRAWN:
        for nth in range(rounds):
            torch.manual_seed(nth)
            logits = (torch.randn(rows, words, device=device) * (1 + 3 * nth)).to(dtype)
            draws = [Draw(Sampling(**settings), noise_key(nth, row)) for row in range(rows)]
            pairs = zip(one.draw(logits, draws), other.draw(logits, draws), strict=True)
            different += sum(mine != theirs for mine, theirs in pairs)
            total += rows
    told = f"{total - different} of {total} the same"
    return [Found(f"{dtype}: tokens drawn in one launch", told, not different)]


_LIKELY = {"logprobs": 2}
_DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
]


JOBS: dict[str, Callable[[torch.device, str, torch.dtype], list[Found]]] = {
    "graphs": graphs,
    "drawing": drawing,
    "company": company,
    "conformance": conformance,
}


def jobs(device: torch.device) -> Iterator[tuple[str, str, torch.dtype]]:
    """All there are, those first whose result is worth most."""
    there = [(name, dtype) for name, dtype, why in served(device) if not why]
    for job in JOBS:
        for name, dtype in there[::-1]:
            has_model = name in backends_of(device, dtype) and dtype != torch.float16
            is_ours = name == "triton" and (has_model or job == "drawing") and dtype != torch.float16
            if job == "conformance" or is_ours or (has_model and job == "company"):
                yield job, name, dtype


def run(device: torch.device, seconds: float) -> Iterator[Found]:
    """All of them within a time: on a GPU several at once, each in a process of its own."""
    until = time.monotonic() + seconds
    for name, dtype, why in served(device):
        if why:
            yield Found(f"{name}, {dtype}: not served", why)
    if device.type == "cpu":
        for job, name, dtype in jobs(device):
            if time.monotonic() < until:
                yield from JOBS[job](device, name, dtype)
            else:
                yield Found(f"{job} {name} {dtype}", "left out: the time is over", met=False)
        return
    os.environ["OMP_NUM_THREADS"] = "2"  # of the reference's products; many processes with many threads each are slow
    with ProcessPoolExecutor(JOBS_AT_ONCE, mp_context=get_context("spawn")) as pool:
        asked = {pool.submit(_run_job, *each): each for each in jobs(device)}
        try:
            for done in as_completed(asked, timeout=seconds):
                try:
                    yield from done.result()
                except Exception as error:
                    yield Found(" ".join(map(str, asked[done])), f"failed: {error!r:.1000}", met=False)
        except TimeoutError:
            for given_up in [each for each in asked if not each.done()]:
                yield Found(" ".join(map(str, asked[given_up])), "given up: the time is over", met=False)
            for worker in active_children():
                worker.kill()


def _run_job(job: str, name: str, dtype: torch.dtype) -> list[Found]:
    torch.set_num_threads(2)
    return JOBS[job](torch.device("cuda"), name, dtype)
