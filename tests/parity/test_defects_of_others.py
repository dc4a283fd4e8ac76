"""What the reference releases of the papers get wrong, each as a test that it is right here.

Prompt Choreography's release, run: the first five. Prompt Cache's: the sixth.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.exact import TOLERANCE
from support.families import FAMILIES, save_tiny
from support.oracle import Oracle

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling
from choreo_agents.errors import ForeignHandleError, UnknownHandleError

Seen = dict[int, list[torch.Tensor]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", FAMILIES["llama"], seed=3)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Oracle:
    return Oracle(model_path)


@pytest.fixture
def engine(model_path: Path):
    with Engine.load(model_path, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        yield engine
        engine.check()


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 360) for _ in range(count)]


def forced(tokens: list[int], seed: int) -> Sampling:
    return Sampling(forced_token_ids=tuple(tokens), seed=seed)


def require_close(mine: list[torch.Tensor], theirs: torch.Tensor) -> None:
    assert len(mine) == len(theirs)
    assert (torch.stack(mine) - theirs).abs().max() <= TOLERANCE


def test_a_call_without_parents_leaves_none_to_the_next_node(
    engine: Engine, oracle: Oracle, logits_by_seed: Seen
) -> None:
    """A stateless call (a router, a judge) attends to what it was given; the node after it must not see that."""
    rng = random.Random(1)
    context, asked, header, rest = draw(rng, 30), draw(rng, 9), draw(rng, 3), draw(rng, 6)
    shown = engine.prefill(context)
    with engine.scope():
        engine.decode(asked, [shown], sampling=forced(rest, 1))
    engine.decode(header, sampling=forced(rest, 2))
    alone = oracle.encode(header + rest, [], [], 0)
    require_close(logits_by_seed[2], oracle.logits(alone)[2:-1])


def test_what_a_short_parallel_call_has_written_is_not_seen_by_the_last_node(
    engine: Engine, oracle: Oracle, logits_by_seed: Seen
) -> None:
    """Parallel calls of different lengths: slots of those that end early are nobody's."""
    rng = random.Random(2)
    context = draw(rng, 30)
    root, base = engine.prefill(context), oracle.encode(context, [], [], 0)
    branches = [draw(rng, count) for count in (1, 4, 12)]
    calls = [Decode([5 + i], [root], sampling=forced(tokens, 10 + i)) for i, tokens in enumerate(branches)]
    *_, longest = engine.decode(calls)
    rest = draw(rng, 6)
    engine.decode([9], [root, longest], sampling=forced(rest, 20))
    seen = oracle.encode([7, *branches[2]], [base], [0], 30)
    last = oracle.encode([9, *rest], [base, seen], [0, 30], 43)
    require_close(logits_by_seed[20], oracle.logits(last)[:-1])


def test_an_unknown_parent_is_refused(engine: Engine) -> None:
    known = engine.prefill([5, 6, 7])
    made_up = known.model_copy(update={"id": "0" * 32})
    for call in (lambda: engine.decode([9], [known, made_up]), lambda: engine.prefill([9], [made_up])):
        with pytest.raises(UnknownHandleError):
            call()
    with pytest.raises(ForeignHandleError):
        engine.decode([9], [known.model_copy(update={"model": "another"})])
    assert engine.stats().messages == 1 and engine.stats().unfinished == 0


@pytest.mark.parametrize("own_end", [False, True])
def test_a_closing_token_stands_where_it_is_read(
    engine: Engine, oracle: Oracle, logits_by_seed: Seen, own_end: bool
) -> None:
    """A forced end token is encoded at the position after the last one, whether the model has said it or not."""
    rng = random.Random(4)
    context, said, rest = draw(rng, 20), draw(rng, 7), draw(rng, 6)
    root, base = engine.prefill(context), oracle.encode(context, [], [], 0)
    sampling = forced([*said, 2] if own_end else said, 1)
    message = engine.decode([5], [root], sampling=sampling, turn_suffix=[2, 11])
    assert engine.tokens(message) == [5, *said, 2, 11]
    engine.decode([9], [root, message], sampling=forced(rest, 2))
    written = oracle.encode([5, *said, 2, 11], [base], [0], 20)
    reader = oracle.encode([9, *rest], [base, written], [0, 20], 30)
    require_close(logits_by_seed[2], oracle.logits(reader)[:-1])


def test_moving_a_shared_parent_for_one_reader_leaves_it_where_it_was_for_the_others(
    engine: Engine, oracle: Oracle, logits_by_seed: Seen
) -> None:
    rng = random.Random(5)
    first, second = draw(rng, 25), draw(rng, 15)
    a, b = engine.prefill(first), engine.prefill(second)
    seen = [oracle.encode(first, [], [], 0), oracle.encode(second, [], [], 0)]
    rest = draw(rng, 5)
    views: list[tuple[list[MessageHandle], list[int], int]] = [
        ([a, b], [0, 25], 40),
        ([b], [0], 15),
        ([b, a], [0, 15], 40),
        ([a, b], [0, 25], 40),
    ]
    for number, (parents, offsets, new) in enumerate(views):
        engine.decode([9], parents, offsets, new, sampling=forced(rest, number), idempotency_key=str(number))
        wanted = oracle.encode([9, *rest], [seen[[a, b].index(p)] for p in parents], offsets, new)
        require_close(logits_by_seed[number], oracle.logits(wanted)[:-1])


@pytest.mark.parametrize("tier", ["host", "disk", "lineage"])
def test_modules_come_back_in_the_order_of_the_request_not_of_their_use(
    model_path: Path, oracle: Oracle, logits_by_seed: Seen, tmp_path: Path, tier: str
) -> None:
    """Modules used often and seldom leave the device and come back together: each has its own KV still."""
    rng = random.Random(6)
    below = {"host": {"host_bytes": 1 << 22}, "disk": {"disk": tmp_path}, "lineage": {}}[tier]
    with Engine.load(model_path, memory=Memory(kv_budget_bytes=1 << 23, **below)) as engine:
        words = [draw(rng, count) for count in (20, 7, 33)]
        modules = [engine.prefill(tokens) for tokens in words]
        for number, uses in enumerate((1, 5, 3)):
            for use in range(uses):
                with engine.scope():
                    engine.decode([5 + use], [modules[number]], sampling=forced([4], 100))
        engine.kv.offload()
        order = [2, 0, 1]
        rest = draw(rng, 5)
        engine.decode([9], [modules[i] for i in order], sampling=forced(rest, 1))
        offsets = [0, 33, 53]
        seen = [oracle.encode(words[i], [], [], 0) for i in order]
        wanted = oracle.encode([9, *rest], seen, offsets, 60)
        require_close(logits_by_seed[1], oracle.logits(wanted)[:-1])
        engine.check()
