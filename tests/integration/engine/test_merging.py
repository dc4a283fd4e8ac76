"""Branches merged from their caches or from their words: what it costs, where they stand, and what is left of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HoldSteps, MakeEngine
from support.adapters import save_adapter, save_mapper
from support.merges import give_back, heard, require_nothing_left, team, view_of, watching, words
from support.stepping import until

from choreo_agents import Decode, Engine, MessageHandle, Prefill, Sampling, StreamedToken
from choreo_agents.engine.branches import Branches, MergedView
from choreo_agents.engine.request_builder import RequestBuilder
from choreo_agents.errors import (
    ContextLengthError,
    EngineFailedError,
    ForeignHandleError,
    HandleError,
    InvalidRequestError,
    ReleasedHandleError,
    RequestTimeoutError,
    UnknownHandleError,
)
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.executor import Executor
from choreo_agents.synthesis.mapper import write_boundaries

SHORT = Sampling(max_tokens=5, stop_tokens=())
METHODS = ("choreo", "baseline", "naive")
STRATEGIES = ("parallel", "sequential", "text", "summary")


@pytest.fixture(scope="module")
def mapper(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mapper(tmp_path_factory.mktemp("mapper") / "mapper", tiny)


@pytest.fixture(scope="module")
def reader(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mapper that reads boundaries too."""
    folder = save_mapper(tmp_path_factory.mktemp("reader") / "reader", tiny)
    write_boundaries(folder)
    return folder


@pytest.fixture(params=["alone", "mapper", "boundaries"])
def served(request: pytest.FixtureRequest, mapper: Path, reader: Path) -> dict[str, Any]:
    """Options of an engine: the model alone, with a mapper, and with one that reads boundaries."""
    options: dict[str, dict[str, Any]] = {
        "alone": {}, "mapper": {"adapter": mapper}, "boundaries": {"adapter": reader}
    }  # fmt: skip
    return options[request.param]


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_nothing_of_the_branches_is_encoded_again_or_copied(make_engine: MakeEngine, strategy: str) -> None:
    engine = make_engine()
    trunk, branches = team(engine)
    before, memory = engine.stats(), engine._core.pool.used_bytes
    merged = engine.branches.merge(branches, [9, 9, 9], strategy=strategy, header=[10], sampling=SHORT)
    after = engine.stats()
    turn_end = len(engine.model.encode(engine.chat.turn_end))
    assert after.tokens_encoded - before.tokens_encoded == merged.length + 3
    assert merged.length == 1 + 5 + turn_end
    assert after.tokens_mapped == 0
    pool = engine._core.pool
    assert pool.used_bytes - memory == pool.rounded(merged.length) * pool.geometry.bytes_per_token
    # What was asked is given back; it stays in the lineage.
    assert after.messages == before.messages + 1
    assert set(engine.inspect.ancestors(merged)) >= {*trunk, *branches} and len(engine.inspect.ancestors(merged)) == 6


def test_a_branch_is_mapped_once_however_often_it_is_merged(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper)
    _, branches = team(engine)
    mapped = []
    for chosen, strategy in ((branches, "parallel"), (branches[::-1], "sequential"), (branches[:1] * 2, "parallel")):
        encoded = engine.stats().tokens_encoded
        merged = engine.branches.merge(chosen, strategy=strategy, header=[10], sampling=SHORT)
        assert engine.stats().tokens_encoded - encoded == merged.length
        mapped.append(engine.stats().tokens_mapped)
        engine.release(merged)
    assert mapped == [48, 48, 48]
    assert engine.stats().leases == 2 + 3 + 3, "a copy has one lease, that of its source"
    copies = engine.branches.map(branches)
    assert [engine.usage(copy).tokens_encoded for copy in copies] == [0, 0, 0]
    assert engine.stats().tokens_mapped == 48 and len({*copies, *branches}) == 6
    engine.branches.merge(branches, adapter="base", header=[10], sampling=SHORT)
    assert engine.stats().tokens_mapped == 48


def test_copies_live_as_long_as_their_sources(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper)
    [one] = engine.branches.map([source := engine.prefill(words(1, 20))])
    assert engine.prefill(words(1, 20)) == source
    engine.release(source)
    assert engine.tokens(one) == words(1, 20)
    engine.release(source)
    with pytest.raises(ReleasedHandleError):
        engine.tokens(one)
    require_nothing_left(engine)
    with engine.scope():
        inner = engine.prefill(words(2, 20))
        with engine.scope():
            [copy] = engine.branches.map([inner])
        assert engine.tokens(copy), "it lasts as long as what it is a copy of"
    require_nothing_left(engine)


def test_a_copy_that_was_released_early_is_made_again(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper)
    source = engine.prefill(words(1, 20))
    [copy] = engine.branches.map([source])
    engine.release(copy)
    engine.check()
    assert engine.stats().messages == 1
    assert engine.branches.map([source]) == [copy] and engine.tokens(copy) and engine.stats().tokens_mapped == 40
    [again] = engine.branches.map([copy])
    engine.release(copy)
    with pytest.raises(ReleasedHandleError):
        engine.tokens(again)
    engine.release(source)
    require_nothing_left(engine)


def test_a_parked_scope_parks_copies_too(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper, host_bytes=1 << 20)
    kept = engine.prefill(words(2, 16))
    engine.branches.map([kept])
    before = engine.stats().kv_bytes
    with engine.scope() as scope:
        [copy] = engine.branches.map([engine.prefill(words(1, 30))])
        [deeper] = engine.branches.map([copy])
        engine.kv.offload(scope)
        assert engine.stats().kv_bytes == before
        assert heard(engine, MergedView([deeper], [0], 30)).isfinite().all()


def test_a_source_that_goes_while_it_is_mapped_leaves_no_copy(
    make_engine: MakeEngine, mapper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(adapter=mapper)
    branches = [engine.prefill(words(i, 20)) for i in range(3)]
    keep = Branches._attach

    def releasing(*args: Any) -> None:
        engine.release(branches[1])
        keep(*args)

    monkeypatch.setattr(Branches, "_attach", releasing)
    with pytest.raises(ReleasedHandleError):
        engine.branches.map(branches)
    monkeypatch.undo()
    assert engine.stats().messages == 2
    engine.release(branches[0])
    engine.release(branches[2])
    require_nothing_left(engine)


def test_branches_stand_where_they_left_the_trunk(make_engine: MakeEngine) -> None:
    engine = make_engine()
    trunk = [engine.prefill(words(0, 10))]
    for i in range(2):
        trunk.append(engine.prefill(words(i + 1, 10), trunk))
    early = engine.decode([7], trunk[:1], sampling=Sampling(forced_token_ids=tuple(words(5, 7))))
    late = engine.decode([8], trunk, sampling=Sampling(forced_token_ids=tuple(words(6, 4))))
    apart = engine.decode([9], sampling=Sampling(forced_token_ids=tuple(words(7, 3))))
    view = view_of(engine, [early, late], trunk=trunk)
    assert (view.handles, view.offsets, view.end) == ([*trunk, early, late], [0, 10, 20, 10, 30], 35)
    give_back(engine, view)
    view = view_of(engine, [early, late, apart], trunk=trunk)
    assert view.offsets == [0, 10, 20, 10, 30, 30] and view.owned == [], "of the trunk they have seen nothing: after it"
    view = view_of(engine, [early, late], strategy="sequential")
    assert (view.handles, view.offsets, view.end) == ([trunk[0], early, late], [0, 10, 18], 23)
    give_back(engine, view)
    assert engine.stats().leases == 6
    # The place where a branch was encoded changes nothing there: no shift, the very logits of who follows it.
    forced = Sampling(forced_token_ids=(5, 6, 7))
    seen: list[torch.Tensor] = []
    engine.decode([Decode([9], [trunk[0], early], sampling=forced, logits_callback=watching(seen))])
    assert torch.equal(torch.stack(seen), heard(engine, view_of(engine, [early], trunk=trunk[:1])))


def test_text_says_what_a_baseline_engine_says(make_engine: MakeEngine) -> None:
    said = {}
    for method in METHODS:
        engine = make_engine(method=method)
        _, branches = team(engine)
        merged = engine.branches.merge(branches, "What is it?", strategy="text", author="end", sampling=SHORT)
        said[method] = engine.tokens(merged)
        shared = engine.branches.merge(branches, "What is it?", strategy="sequential", author="end", sampling=SHORT)
        said[f"{method} sequential"] = engine.tokens(shared)
        for handle in (merged, shared):
            engine.release(handle)
    assert said["choreo"] == said["baseline"] == said["naive"] == said["baseline sequential"]
    assert said["choreo"] != said["choreo sequential"], "the branches have not seen each other"


def test_text_encodes_words_again_only_where_they_have_another_place(make_engine: MakeEngine) -> None:
    engine = make_engine()
    _, branches = team(engine)
    before = engine.stats().tokens_encoded
    merged = engine.branches.merge(branches, strategy="text", header=[10], sampling=SHORT)
    assert engine.stats().tokens_encoded - before == 20 + 16 + merged.length, "the first is where it was said"
    [first, *others] = engine.inspect.audit([merged]).messages[0].ancestors
    assert {"words"} <= {channel for each in (first, *others) for channel in each.channels}


def test_a_summary_is_said_by_the_branchs_own_worker(
    make_engine: MakeEngine, tiny_path: Path, mapper: Path, tmp_path: Path
) -> None:
    """Encoded as the worker was, after all that it has seen; then mapped for the synthesizer."""
    engine = make_engine(adapter=mapper)
    engine.load_adapter(save_adapter(tmp_path / "worker", tiny_path), "worker")
    root = engine.prefill(words(1, 24))
    branches = engine.decode(
        [
            Decode([7], [root], sampling=Sampling(forced_token_ids=tuple(words(5, 15))), adapter=name)
            for name in (None, "worker")
        ]
    )
    view = view_of(engine, branches, strategy="summary")
    encoders = [handle.model for handle in view.owned if handle != root]
    assert encoders == [branch.model for branch in branches], "what they say"
    assert encoders[0] != encoders[1]
    assert all("~" in handle.model for handle in view.handles[1:])
    give_back(engine, view)
    for handle in (root, *branches):
        engine.release(handle)
    require_nothing_left(engine)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_merging_nothing_is_left_but_what_was_said(
    make_engine: MakeEngine, served: dict[str, Any], method: str, strategy: str
) -> None:
    engine = make_engine(method=method, **served)
    trunk, branches = team(engine)
    before = engine.stats()
    options: dict[str, Any] = {"strategy": strategy, "sampling": SHORT, "author": "end"}
    merged = engine.branches.merge(branches, "What is it?", **options)
    assert merged == asyncio.run(engine.branches.amerge(branches, "What is it?", **options))
    engine.release(merged)
    engine.release(merged)
    copies = 3 if served and method == "choreo" and strategy in ("parallel", "sequential") else 0
    after = engine.stats()
    assert (after.messages, after.leases) == (before.messages + copies, before.leases + copies)
    for handle in (*trunk, *branches):
        engine.release(handle)
    require_nothing_left(engine)


@pytest.mark.parametrize("method", METHODS)
def test_branches_whose_trunk_was_released_are_merged(make_engine: MakeEngine, method: str) -> None:
    said = []
    for early in (False, True):
        engine = make_engine(method=method)
        trunk, branches = team(engine)
        if early:
            for handle in trunk:
                engine.release(handle)
        merged = engine.branches.merge(branches, [9, 9], header=[10], sampling=SHORT)
        said.append(engine.tokens(merged))
        engine.release(merged)
        for handle in (*branches, *([] if early else trunk)):
            engine.release(handle)
        require_nothing_left(engine)
    assert said[0] == said[1]


def test_merging_from_threads_and_event_loops_at_once(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper, max_batched_tokens=16)
    trunk, branches = team(engine)
    said: list[tuple[int, ...]] = []

    async def merge() -> list[MessageHandle]:
        return list(
            await asyncio.gather(*(engine.branches.amerge(branches, header=[10], sampling=SHORT) for _ in range(3)))
        )

    def work(loop: bool) -> None:
        made = asyncio.run(merge()) if loop else [engine.branches.merge(branches, header=[10], sampling=SHORT)]
        for handle in made:
            said.append(tuple(engine.tokens(handle)))
            engine.release(handle)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 12 and len(set(said)) == 1
    assert engine.stats().tokens_mapped == 48 and engine.stats().leases == 2 + 3 + 3
    for handle in (*trunk, *branches):
        engine.release(handle)
    require_nothing_left(engine)


async def test_a_merged_view_streams(engine: Engine) -> None:
    trunk, branches = team(engine)
    view = await engine.branches.aview(branches, [9, 9], strategy="sequential")
    items = [item async for item in engine.astream([10], view.handles, view.offsets, view.end, sampling=SHORT)]
    merged = await engine.branches.amerge(branches, [9, 9], strategy="sequential", header=[10], sampling=SHORT)
    tokens = [item.token for item in items if isinstance(item, StreamedToken)]
    assert tokens == engine.tokens(merged)[1:6]
    for handle in (*view.owned, items[-1], merged, *trunk, *branches):
        engine.release(handle)
    require_nothing_left(engine)


def test_a_view_of_texts_outlives_its_branches(engine: Engine) -> None:
    """Also where a branch that is encoded again has the handle that it had."""
    trunk, branches = team(engine)
    view = view_of(engine, branches, strategy="text")
    assert set(view.handles) & set(branches)
    for handle in branches:
        engine.release(handle)
    merged = engine.decode([10], view.handles, view.offsets, view.end, sampling=SHORT)
    give_back(engine, view)
    for handle in (merged, *trunk):
        engine.release(handle)
    require_nothing_left(engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_merge_ends_with_the_scope_of_its_caller(engine: Engine, strategy: str) -> None:
    trunk, branches = team(engine)
    with engine.scope():
        merge = asyncio.ensure_future(engine.branches.amerge(branches, words(3, 20), strategy=strategy, sampling=SHORT))
        await asyncio.sleep(0)
    with pytest.raises(ReleasedHandleError):
        await merge
    for handle in (*trunk, *branches):
        engine.release(handle)
    require_nothing_left(engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_cancelled_merge_leaves_nothing(
    make_engine: MakeEngine, hold_steps: HoldSteps, served: dict[str, Any], strategy: str
) -> None:
    """At whichever of its steps."""
    engine = make_engine(max_batched_tokens=16, **served)
    trunk, branches = team(engine)
    for step in range(7):
        steps = hold_steps(engine)
        merge = asyncio.create_task(engine.branches.amerge(branches, words(3, 20), strategy=strategy, sampling=SHORT))
        making = asyncio.create_task(steps.amake(step))
        await asyncio.wait([merge, making], return_when=asyncio.FIRST_COMPLETED)
        merge.cancel()
        await asyncio.sleep(0)
        steps.go_on()
        done, _ = await asyncio.wait([merge])
        for each in done:
            if not each.cancelled():
                engine.release(each.result())
        await until(lambda: not engine.stats().unfinished)
    for handle in (*trunk, *branches):
        engine.release(handle)
    require_nothing_left(engine)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_merge_that_fails_leaves_nothing(
    make_engine: MakeEngine, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    engine = make_engine(max_batched_tokens=16, **served)
    trunk, branches = team(engine)
    run = Executor.run
    left = [0]

    def failing(self: Executor, *args: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise RuntimeError("steps fail from here on")
        return run(self, *args)

    monkeypatch.setattr(Executor, "run", failing)
    for step in range(1, 8):
        left[0] = step
        with pytest.raises(EngineFailedError):
            engine.branches.merge(branches, words(3, 20), strategy=strategy, sampling=SHORT)
    left[0] = 1 << 20
    with pytest.raises(RequestTimeoutError):
        engine.branches.merge(branches, words(3, 20), strategy=strategy, sampling=SHORT, timeout_s=0)
    with pytest.raises(ContextLengthError):
        engine.branches.merge(branches, strategy=strategy, sampling=Sampling(max_tokens=1020))
    with pytest.raises(TypeError):
        engine.branches.merge(branches, strategy=strategy, nonsense=1)
    for handle in (*trunk, *branches):
        engine.release(handle)
    require_nothing_left(engine)


def test_a_scope_that_ends_meanwhile_takes_no_lease_of_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    trunk, branches = team(engine)

    async def run() -> None:
        with engine.scope() as scope:
            merge = asyncio.create_task(engine.branches.amerge(branches, [9], header=[10], sampling=SHORT))
            await asyncio.sleep(0)
            engine._core.close_scope(scope)
            with suppress(ReleasedHandleError):
                await merge

    asyncio.run(run())
    assert [engine.tokens(handle) for handle in trunk], "their own leases are still there"


async def test_a_scope_that_ends_meanwhile_takes_no_copy_of_others(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper)
    source = engine.prefill(words(3, 20))
    view = await engine.branches.aview([source], [5, 6])
    with engine.scope():
        mapping = asyncio.create_task(engine.branches.amap([source]))
        await asyncio.sleep(0)
    with suppress(ReleasedHandleError):
        await mapping
    assert engine.decode([9], view.handles, view.offsets, view.end, sampling=SHORT)
    mapped = engine.stats().tokens_mapped
    assert engine.branches.map(iter([source])) == view.handles[:1]  # type: ignore[arg-type]
    assert engine.stats().tokens_mapped == mapped


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_scope_that_ends_meanwhile_leaves_no_lease_behind(
    make_engine: MakeEngine, mapper: Path, strategy: str
) -> None:
    engine = make_engine(adapter=mapper)
    _, branches = team(engine)
    kept = await engine.branches.aview(branches, [9, 9], strategy=strategy)  # what is known already is answered at once
    before = engine.stats()
    for waits in range(1, 5):
        with engine.scope():
            merge = asyncio.create_task(
                engine.branches.amerge(branches, [9, 9], strategy=strategy, header=[10], sampling=SHORT)
            )
            for _ in range(waits):
                await asyncio.sleep(0)
        with suppress(HandleError):
            await merge
        while engine.stats().unfinished:
            await asyncio.sleep(0.001)
        after = engine.stats()
        assert after.leases == before.leases and after.messages == before.messages, waits
    assert engine.decode([10], kept.handles, kept.offsets, kept.end, sampling=SHORT)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_that_a_merge_does_is_hurried_and_timed_alike(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    engine = make_engine()
    _, branches = team(engine)
    seen: list[tuple[int, float | None]] = []
    read = RequestBuilder.read

    def reading(self: RequestBuilder, calls: Any) -> Any:
        seen.extend((call.priority, call.timeout_s) for call in calls)
        return read(self, calls)

    monkeypatch.setattr(RequestBuilder, "read", reading)
    options: dict[str, Any] = {"strategy": strategy, "priority": 3, "timeout_s": 60.0}
    engine.branches.merge(branches, [9, 9], sampling=SHORT, **options)
    asyncio.run(engine.branches.aview(branches, [9, 9], **options))
    left = [timeout for _, timeout in seen]
    assert {priority for priority, _ in seen} == {3} and all(each is not None and 0 < each < 60 for each in left)
    encoded = engine.stats().tokens_encoded
    with pytest.raises(RequestTimeoutError):
        engine.branches.merge(branches, "What else?", strategy=strategy, timeout_s=0.0)
    with pytest.raises(InvalidRequestError, match="timeout_s must be"):
        engine.branches.merge(branches, "What else?", strategy=strategy, timeout_s=-1.0)
    assert engine.stats().tokens_encoded - encoded <= 16, "one step at most, of the first call"


def test_a_summary_begins_as_its_branch_does(engine: Engine) -> None:
    header = engine.model.encode("<|assistant|> Ann, who knows:")
    decoded = engine.decode(header, [engine.prefill(words(3, 9))], sampling=SHORT, author="team|worker")
    written = engine.prefill(words(5, 9), author="bob")
    one, other = asyncio.run(engine.branches.asummaries([decoded, written]))
    assert engine.tokens(one)[: len(header)] == header
    assert engine.text(other).startswith(engine.chat.header("bob").text)


def test_copies_are_merged_behind_the_trunk_of_their_sources(make_engine: MakeEngine, mapper: Path) -> None:
    engine = make_engine(adapter=mapper)
    _, branches = team(engine)
    copies = engine.branches.map(branches)
    view = asyncio.run(engine.branches.aview(copies, adapter="base"))
    assert view == asyncio.run(engine.branches.aview(branches))
    summaries = [
        engine.inspect.records(asyncio.run(engine.branches.asummaries(given[:1])))[-1] for given in (copies, branches)
    ]
    assert summaries[0].parents[:-2] == summaries[1].parents[:-2] and summaries[0].offsets == summaries[1].offsets


@pytest.mark.parametrize("wrong", [{"content": [5]}, {"offsets": [7]}, {"position": 7}])
def test_a_mapping_that_says_something_else_is_refused(
    make_engine: MakeEngine, mapper: Path, wrong: dict[str, Any]
) -> None:
    engine = make_engine(adapter=mapper)
    source = engine.prefill(words(3, 9))
    with pytest.raises(InvalidRequestError, match="has the tokens and the place of its parent"):
        engine.prefill([Prefill(**({"content": words(3, 9), "parents": [source], "maps": True} | wrong))])
    assert engine.prefill([Prefill(words(3, 9), [source], maps=True)]) == engine.branches.map([source])


BAD_MERGES: dict[str, tuple[Callable[[Engine, list[MessageHandle]], object], type[Exception], str]] = {
    "no branch": (lambda e, b: e.branches.merge([]), InvalidRequestError, "no branch to merge"),
    "one that is no list": (
        lambda e, b: e.branches.merge(b[0]),
        InvalidRequestError,
        "branches must be a list of handles",
    ),  # type: ignore[arg-type]
    "a text": (lambda e, b: e.branches.merge("ab"), InvalidRequestError, "branches must be a list of handles"),  # type: ignore[arg-type]
    "a dict": (lambda e, b: e.branches.merge([b[0].plain()]), InvalidRequestError, "expected a MessageHandle"),  # type: ignore[list-item]
    "a trunk that is no list": (
        lambda e, b: e.branches.merge(b, trunk=b[0]),
        InvalidRequestError,
        "trunk must be a list",
    ),
    "a trunk of texts": (
        lambda e, b: e.branches.merge(b, trunk=["a"]),
        InvalidRequestError,
        "expected a MessageHandle",
    ),
    "no such strategy": (
        lambda e, b: e.branches.merge(b, strategy="magic"),
        InvalidRequestError,
        "one of parallel, sequential",
    ),
    "no strategy": (lambda e, b: e.branches.merge(b, strategy=None), InvalidRequestError, "not None"),
    "a strategy that is a list": (
        lambda e, b: e.branches.merge(b, strategy=["text"]),
        InvalidRequestError,
        r"not \['text'\]",
    ),
    "an empty header": (lambda e, b: e.branches.merge(b, header=[]), InvalidRequestError, "header is empty"),
}


@pytest.mark.parametrize("method", ["choreo", "baseline"])
@pytest.mark.parametrize("name", BAD_MERGES)
def test_a_bad_merge_is_refused(make_engine: MakeEngine, mapper: Path, method: str, name: str) -> None:
    engine = make_engine(method=method, adapter=mapper)
    _, branches = team(engine)
    before = engine.stats()
    call, error, reason = BAD_MERGES[name]
    with pytest.raises(error, match=reason):
        call(engine, branches)
    after = engine.stats()
    copies = after.leases - before.leases
    assert copies == after.messages - before.messages and copies in (0, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_branches_that_cannot_be_merged_are_refused(
    make_engine: MakeEngine, embedded: LoadedModel, mapper: Path, strategy: str
) -> None:
    engine, other = make_engine(adapter=mapper), make_engine(embedded)
    trunk, branches = team(engine)
    _, [released, *_] = team(engine, (30, 31))
    engine.release(released)
    wrong: dict[type[HandleError], MessageHandle] = {
        ForeignHandleError: team(other)[1][0],
        UnknownHandleError: team(engine.tenant("another"))[1][0],
        ReleasedHandleError: released,
    }
    before = engine.stats()
    for error, handle in wrong.items():
        for call in (engine.branches.merge, engine.branches.map, lambda h: asyncio.run(engine.branches.asummaries(h))):
            with pytest.raises(error):
                call([branches[0], handle])
        with pytest.raises(error):
            engine.branches.merge(branches, trunk=[*trunk, handle], strategy=strategy, adapter="base", sampling=SHORT)
        with pytest.raises(error):
            engine.branches.merge([branches[0], handle], strategy=strategy)
    after = engine.stats()
    assert (after.messages, after.leases) == (before.messages, before.leases)


def test_iterators_of_branches_are_read_once(engine: Engine) -> None:
    _, branches = team(engine)
    before = engine.stats().leases
    assert asyncio.run(engine.branches.asummaries(iter(branches)))  # type: ignore[arg-type]
    assert engine.stats().leases == before + len(branches)
    merged = engine.branches.merge(iter(branches), header=[10], sampling=SHORT)  # type: ignore[arg-type]
    assert merged == engine.branches.merge(branches, header=[10], sampling=SHORT)
    assert set(branches) <= set(engine.inspect.ancestors(merged))
