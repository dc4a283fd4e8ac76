"""Mapped messages have the KV that plain Hugging Face and two matrix products give, to 1e-4 in fp32."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.adapters import random_mapper, save_mapper
from support.exact import TOLERANCE, doubled, exactly, plain_model
from support.families import FAMILIES, save_tiny
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling, Scheduling
from choreo_agents.engine.branches import MergedView
from choreo_agents.synthesis.mapper import CacheMapper

SERVED = ("llama", "qwen3", "phi3", "gpt_neox", "stablelm", "smollm3", "cohere", "glm4")
KeysValues = list[tuple[Tensor, Tensor]]
"""Of each layer: [1, kv_heads, tokens, head_dim]."""


class Oracle:
    """Plain forwards in doubles over caches put together by hand; a mapper applied with transformers' own rotation."""

    def __init__(self, path: Path) -> None:
        self.model = doubled(plain_model(path))
        module = inspect.getmodule(type(self.model))
        self._rotate_half = module.rotate_half
        self._neighbours = "repeat_interleave" in inspect.getsource(module.apply_rotary_pos_emb)
        self._rotary = next(m for name, m in self.model.named_modules() if name.endswith("rotary_emb"))
        self._turns = getattr(self.model.config, "no_rope_layers", None)  # 1 where a layer has positions

    @exactly()
    def encode(self, tokens: Sequence[int], at: int, seen: Sequence[KeysValues] = ()) -> tuple[KeysValues, Tensor]:
        """A message's KV and logits, [tokens, vocabulary]; it attends to all of `seen`."""
        cache = DynamicCache()
        for layer, parts in enumerate(zip(*seen, strict=True)):
            cache.update(torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2), layer)
        positions = torch.arange(at, at + len(tokens))[None]
        ids = torch.tensor([list(tokens)])
        logits = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[0]
        own = slice(-len(tokens), None)
        return [(layer.keys[:, :, own], layer.values[:, :, own]) for layer in cache.layers], logits

    @exactly()
    def shown(self, known: KeysValues, at: int, where: int, mapper: CacheMapper | None) -> KeysValues:
        """KV encoded at a position, mapped if there is a mapper, and moved to another."""
        found: KeysValues = []
        for layer, (keys, values) in enumerate(known):
            plain, side = self._turned(layer, keys, at, -1), values
            if mapper is not None:
                plain = plain + residual(mapper, "key", layer, plain)
                side = side + residual(mapper, "value", layer, side)
            found.append((self._turned(layer, plain, where, 1), side))
        return found

    def _turned(self, layer: int, x: Tensor, at: int, sign: int) -> Tensor:
        if self._turns is not None and not self._turns[layer]:
            return x
        positions = torch.arange(at, at + x.shape[2])[None]
        cos, sin = self._rotary(x, positions)
        if self._neighbours:
            cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, dim=-1) for each in (cos, sin))
        turned = x[..., : cos.shape[-1]]
        turned = turned * cos[:, None] + sign * self._rotate_half(turned) * sin[:, None]
        return torch.cat([turned, x[..., cos.shape[-1] :]], dim=-1)


def residual(mapper: CacheMapper, side: str, layer: int, x: Tensor) -> Tensor:
    """What a mapper adds to [1, kv_heads, tokens, head_dim]: heads are concatenated in a token's vector."""
    down, up, bias = (mapper.state_dict()[f"{side}_{part}"][layer].double() for part in ("down", "up", "bias"))
    flat = x[0].permute(1, 0, 2).flatten(1)
    added = torch.stack([up @ (down @ vector) + bias for vector in flat])
    return added.view(len(flat), x.shape[1], x.shape[3]).permute(1, 0, 2)[None]


@pytest.fixture(scope="module", params=SERVED)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param], seed=3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", {}, seed=3)


def draw(seed: int, *counts: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 360) for _ in range(count)] for count in counts]


def watched(engine: Engine, header: list[int], view: MergedView, rest: list[int]) -> Tensor:
    """The logits before each token of a forced decode, [tokens, vocabulary]."""
    seen: list[Tensor] = []
    forced = Sampling(forced_token_ids=tuple(rest))
    watch = lambda logits: seen.append(logits.clone())  # noqa: E731
    [said] = engine.decode([Decode(header, view.handles, view.offsets, view.end, forced, logits_callback=watch)])
    engine.release(said)
    return torch.stack(seen)


def require_close(mine: Tensor, theirs: Tensor) -> None:
    error = (mine - theirs).abs().max().item()
    assert error <= TOLERANCE * max(1.0, theirs.abs().max().item() / 10), f"logits differ by {error}"


@pytest.mark.parametrize("parallel", [True, False])
def test_mapped_branches_equal_the_oracle_wherever_they_are_shown(
    model_path: Path, tmp_path: Path, parallel: bool
) -> None:
    root, one, two, header, rest = draw(1, 23, 19, 14, 2, 7)
    oracle = Oracle(model_path)
    trunk, _ = oracle.encode(root, 0)
    branches = [oracle.encode(tokens, 23, [trunk])[0] for tokens in (one, two)]
    starts = [23, 23 if parallel else 23 + 19]
    end = 23 + 19 if parallel else 23 + 19 + 14
    with Engine.load(
        model_path, memory=Memory(kv_budget_bytes=1 << 23), scheduling=Scheduling(max_batched_tokens=16)
    ) as engine:
        engine.load_adapter(save_mapper(tmp_path / "mapper", engine.model))
        mapper = random_mapper(engine.model)
        parent = engine.prefill(root)
        made = [engine.prefill(tokens, [parent]) for tokens in (one, two)]
        wanted = {}
        for name, used in (("mapper", mapper), ("base", None)):
            shown = [oracle.shown(kv, 23, at, used) for kv, at in zip(branches, starts, strict=True)]
            wanted[name] = oracle.encode([*header, *rest], end, [trunk, *shown])[1][1:-1]
            sources = made if used is None else engine.branches.map(made, adapter=name)
            mine = watched(engine, header, MergedView([parent, *sources], [0, *starts], end), rest)
            require_close(mine, wanted[name])
        assert (wanted["mapper"] - wanted["base"]).abs().max() > 0.1, "the mapper matters"
        assert engine.stats().tokens_mapped == 19 + 14
        engine.check()


def test_mapped_keys_are_those_before_rotation(llama: Path, tmp_path: Path) -> None:
    """The outputs of Llama's own projections, corrected, then rotated by transformers' own function."""
    root, one, header, rest = draw(2, 12, 20, 1, 6)
    model = doubled(plain_model(llama))
    caught: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    for layer in model.model.layers:
        for name, kept in caught.items():
            getattr(layer.self_attn, name).register_forward_hook(lambda _, __, out, kept=kept: kept.append(out))
    cache = DynamicCache()
    with exactly():
        model(input_ids=torch.tensor([root]), past_key_values=cache, use_cache=True)
        trunk = [(each.keys.clone(), each.values.clone()) for each in cache.layers]
        for kept in caught.values():
            kept.clear()
        model(input_ids=torch.tensor([one]), past_key_values=cache, use_cache=True)
    with Engine.load(llama, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        engine.load_adapter(save_mapper(tmp_path / "mapper", engine.model))
        mapper = random_mapper(engine.model)
        parent = engine.prefill(root)
        [mapped] = engine.branches.map([engine.prefill(one, [parent])], adapter="mapper")
        mine = {at: watched(engine, header, MergedView([parent, mapped], [0, at], 77), rest) for at in (12, 40, 5)}
    with exactly():
        for at, logits in mine.items():
            again = DynamicCache()
            for layer, (keys, values) in enumerate(trunk):
                sides = []
                for side, out in (("key", caught["k_proj"][layer]), ("value", caught["v_proj"][layer])):
                    heads = out.view(1, 20, 2, 16).transpose(1, 2)
                    sides.append(heads + residual(mapper, side, layer, heads))
                cos, sin = model.model.rotary_emb(values, torch.arange(at, at + 20)[None])
                _, turned = apply_rotary_pos_emb(sides[0], sides[0], cos, sin)
                again.update(torch.cat([keys, turned], 2), torch.cat([values, sides[1]], 2), layer)
            ids, places = torch.tensor([[*header, *rest]]), torch.arange(77, 77 + 7)[None]
            theirs = model(input_ids=ids, position_ids=places, past_key_values=again, use_cache=True).logits[0]
            require_close(logits, theirs[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mapper_of_zeros_changes_no_bit(model_path: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    root, one, two, header, rest = draw(3, 9, 21, 13, 2, 6)
    with Engine.load(
        model_path, memory=Memory(kv_budget_bytes=1 << 23), dtype=dtype, scheduling=Scheduling(max_batched_tokens=16)
    ) as engine:
        adapter = engine.model.adapter
        CacheMapper(adapter.geometry, adapter.kinds).save(tmp_path, adapter.weights)
        engine.load_adapter(tmp_path, "zero")
        parent = engine.prefill(root)
        branches = [engine.prefill(tokens, [parent], [3], 12 + 3) for tokens in (one, two)]
        mapped = engine.branches.map(branches, adapter="zero")
        assert [copy.id for copy in mapped] != [branch.id for branch in branches]
        for offsets in ([0, 9, 9], [3, 15, 36]):
            views = [MergedView([parent, *both], [*offsets], 80) for both in (branches, mapped)]
            plain, copied = (watched(engine, header, view, rest) for view in views)
            assert torch.equal(plain, copied)


def test_copies_of_copies_and_of_adapted_messages_are_others(llama: Path, tmp_path: Path) -> None:
    with Engine.load(llama, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        engine.load_adapter(save_mapper(tmp_path / "one", engine.model))
        engine.load_adapter(save_mapper(tmp_path / "two", engine.model, seed=2))
        source = engine.prefill(draw(4, 20)[0])
        names: dict[MessageHandle, tuple[str, ...]] = {}
        for path in (("one",), ("two",), ("one", "one"), ("one", "two"), ("two", "one")):
            copy = source
            for adapter in path:
                [copy] = engine.branches.map([copy], adapter=adapter)
            names[copy] = path
            assert engine.tokens(copy) == engine.tokens(source) and copy.base_model == source.model
        assert len(names) == 5 and engine.stats().tokens_mapped == 5 * 20
        engine.check()
        engine.release(source)
        assert engine.stats().messages == engine.stats().kv_bytes == 0
