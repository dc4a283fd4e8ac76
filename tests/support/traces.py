"""Random traces, and what an engine says when it makes them call by call."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from choreo_agents import Decode, Engine, MessageHandle, Prefill, Sampling
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.step import StepAttention
from choreo_agents.kv.pool import KVPool
from choreo_agents.models import LoadedModel
from choreo_agents.models.lora import LoraAdapter, LowRank, hook_layers
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.training.trace import Trace, TraceMessage


def draw_trace(rng: random.Random, messages: int = 8, *, longest: int = 20, name: str = "trace") -> Trace:
    """Views that are reordered, with gaps, or anywhere: parents over each other, new messages before or inside them."""
    made: list[TraceMessage] = []
    for number in range(messages):
        parents = rng.sample(made, rng.randint(0, min(4, len(made))))
        offsets, new_offset = _draw_offsets(rng, [len(parent.tokens) for parent in parents])
        tokens = draw_tokens(rng, rng.randint(2, longest))
        learn = None
        if number == messages - 1 or rng.random() < 0.6:
            start = rng.randint(1, len(tokens) - 1)
            learn = (start, rng.randint(start + 1, len(tokens)))
        names = tuple(parent.name for parent in parents)
        made.append(TraceMessage(f"m{number}", tokens, names, tuple(offsets), new_offset, learn))
    return Trace(name, tuple(made))


def draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """All different: what a decode is closed with must not be there already."""
    return tuple(rng.sample(range(3, 360), count))


def _draw_offsets(rng: random.Random, lengths: list[int]) -> tuple[list[int], int]:
    kind = rng.choice(["sequential", "gapped", "anywhere"])
    offsets, at = [], 0
    for length in lengths:
        if kind == "anywhere":
            at = rng.randrange(200)
        offsets.append(at)
        at += length + (rng.randrange(50) if kind == "gapped" else 0)
    return offsets, rng.randrange(200) if kind == "anywhere" else at


def engine_logits(engine: Engine, trace: Trace) -> Tensor:
    """[learnt tokens, vocabulary], the logits that the engine's decodes of the trace are sampled from."""
    seen: list[Tensor] = []
    engine_handles(engine, trace, lambda logits: seen.append(logits.detach().clone().float()))
    return torch.stack(seen)


def engine_handles(
    engine: Engine, trace: Trace, watch: Callable[[Tensor], None] | None = None
) -> dict[str, MessageHandle]:
    """The trace's messages, made by an engine call by call."""
    handles: dict[str, MessageHandle] = {}
    for message in trace.messages:
        parents = [handles[parent] for parent in message.parents]
        if message.learn is None:
            call = Prefill(message.tokens, parents, message.offsets, message.position)
            [handles[message.name]] = engine.prefill([call])
            continue
        start, end = message.learn
        decode = Decode(
            message.tokens[:start],
            parents,
            message.offsets,
            message.position,
            sampling=Sampling(forced_token_ids=message.tokens[start:end]),
            turn_suffix=message.tokens[end:],
            logits_callback=watch,
        )
        [handles[message.name]] = engine.decode([decode])
        made = engine.tokens(handles[message.name])
        assert tuple(made) == message.tokens, "the forced end closes the message already: draw other tokens"
    return handles


def with_adapters(trace: Trace, names: list[str | None], rng: random.Random) -> Trace:
    """The same trace, each message by an adapter drawn from these."""
    return Trace(trace.id, tuple(replace(message, adapter=rng.choice(names)) for message in trace.messages))


@torch.inference_mode()
def stepwise_logits(
    model: LoadedModel, trace: Trace, adapters: Mapping[str, LoraAdapter], mapper: CacheMapper | None = None
) -> Tensor:
    """The same by the slow reference backend, a message at a time: with adapters, and messages that are mapped."""
    adapter = model.adapter
    total = sum(len(message.tokens) for message in trace.messages)
    pool = KVPool(adapter.geometry, (total + 1) * adapter.geometry.bytes_per_token, adapter.device, 1)
    places: dict[str, tuple[int, int]] = {}
    seen: list[Tensor] = []
    at = 0
    for message in trace.messages:
        count = len(message.tokens)
        places[message.name] = at, message.position
        own = tuple(range(message.position, message.position + count))
        slots = tuple(range(at, at + count))
        at += count
        if message.mapped:
            assert mapper is not None
            first, _ = places[message.parents[0]]
            for layer, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
                source = slice(first, first + count)
                mapped = mapper.map(layer, keys[:, source], values[:, source], torch.tensor(own))
                keys[:, slots[0] : at], values[:, slots[0] : at] = mapped
            continue
        reads = [Read(slots[0], count, own[0], (QuerySpan(0, count, 0),), causal=True)]
        for parent, offset in zip(message.parents, message.offsets, strict=True):
            start, native = places[parent]
            length = len(trace.by_name[parent].tokens)
            reads.append(Read(start, length, native, (QuerySpan(0, count, offset - native),)))
        layout = Layout(own, slots, tuple(reads))
        attention = StepAttention(layout, pool, ReferenceBackend(), adapter.kinds)
        wanted = range(message.learn[0] - 1, message.learn[1] - 1) if message.learn else range(0)
        adapted = [] if message.adapter is None else [(adapters[message.adapter], None)]
        seen.append(adapter.logits(message.tokens, own, attention, wanted, adapted).float())
    return torch.cat(seen)


def draw_adapter(model: LoadedModel, name: str, *, seed: int, rank: int = 3) -> LoraAdapter:
    """An adapter of random weights for all linear layers of attention, ready for the model."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for module, layer in model.adapter.model.named_modules():
        if isinstance(layer, torch.nn.Linear) and "attn" in module.split(".")[-2:][0]:
            drawn = (torch.randn(rank, layer.in_features), torch.randn(layer.out_features, rank))
            down, up = (0.3 * torch.randn(part.shape, generator=generator).to(layer.weight) for part in drawn)
            parts[module] = LowRank(down.requires_grad_(), up.requires_grad_(), 0.5)
    hook_layers(model.adapter.model, list(parts))
    return LoraAdapter(name, name, parts)


def draw_mapper(model: LoadedModel, seed: int) -> CacheMapper:
    """A mapper that changes what it maps."""
    torch.manual_seed(seed)
    mapper = CacheMapper(model.adapter.geometry, model.adapter.kinds)
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return mapper


def with_mapped(trace: Trace, rng: random.Random) -> Trace:
    """The same trace, each later view showing mapped copies of some of its messages instead of these."""
    made: list[TraceMessage] = []
    copies: dict[str, str] = {}
    for message in trace.messages:
        seen = tuple(copies.get(parent, parent) if rng.random() < 0.7 else parent for parent in message.parents)
        made.append(replace(message, parents=seen))
        if rng.random() < 0.6:
            copies[message.name] = f"{message.name} mapped"
            place = {"offsets": (0,), "position": message.position, "mapped": True}
            made.append(TraceMessage(copies[message.name], message.tokens, (message.name,), **place))
    return Trace(trace.id, tuple(made))
