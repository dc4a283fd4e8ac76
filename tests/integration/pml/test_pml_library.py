"""A library of encoded modules: independent of each other, encoded once, shared, brought back, never trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HoldSteps, MakeEngine
from support.stepping import until
from support.tiny import save_tiny_llama

from choreo_agents import Engine, MessageHandle, Sampling, Schema, SchemaLibrary, StreamedToken
from choreo_agents.errors import EngineClosedError, InvalidRequestError, PMLError
from choreo_agents.kv.tiers import HostKV
from choreo_agents.models import load_model
from choreo_agents.pml import library as library_module

TOKEN = 2 * 3 * 2 * 16 * 4
"""Bytes of keys and values of one token of the tiny model."""
SCHEMA = """
<schema name="trip">
  You plan.
  <module name="plan">
    Plan <parameter name="days" length="4"/> days.
    <union>
      <module name="miami">Go to {miami}.</module>
      <module name="paris">Go to {paris}.</module>
    </union>
  </module>
  <module name="hotel">Sleep {hotel}.</module>
  <module name="secret" confidential="true">Spend all.</module>
</schema>
"""
TRIP = "<plan days='3'><miami/></plan> Hm. <hotel/><user>Where?</user>"

MakeLibrary = Callable[..., tuple[Engine, SchemaLibrary]]


def schema(miami: str = "Miami", paris: str = "Paris", hotel: str = "well") -> Schema:
    return Schema.from_text(SCHEMA.format(miami=miami, paris=paris, hotel=hotel))


@pytest.fixture
def make_library(make_engine: MakeEngine) -> Iterator[MakeLibrary]:
    with ExitStack() as stack:

        def make(
            folder: Path | None = None, *, known: Schema | None = None, **options: Any
        ) -> tuple[Engine, SchemaLibrary]:
            engine = make_engine(**({"salt": "s", "persist_dir": folder} | options))
            library = SchemaLibrary(engine)
            stack.callback(library.close)
            library.register(known or schema())
            return engine, library

        yield make


def same(one: HostKV, other: HostKV) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def view_of(library: SchemaLibrary, text: str) -> tuple[list[int | None], list[MessageHandle]]:
    with library.assemble(library.prompt("trip", text)) as view:
        return view.offsets, view.handles


def answer(library: SchemaLibrary, text: str, seed: int) -> MessageHandle:
    return library.generate(library.prompt("trip", text), Sampling(forced_token_ids=(5, 6, 7, 8), seed=seed))


def files(folder: Path, suffix: str = ".safetensors") -> list[Path]:
    return sorted(folder.rglob(f"*{suffix}"))


# --- what prompts read ---


def test_a_prompt_encodes_only_what_is_new(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    with library.assemble(library.prompt("trip", TRIP)) as view:
        assert engine.stats().tokens_encoded == 0, "not before it is read"
        engine.release(engine.prefill([9], view.handles, view.offsets, view.end))
        assert engine.stats().tokens_encoded == view.fresh_tokens + view.cached_tokens + 4 + 1, "the placeholders, too"
        before = engine.stats().tokens_encoded
        with library.assemble(library.prompt("trip", TRIP.replace("3", "2"))) as other:
            engine.release(engine.prefill([9], other.handles, other.offsets, other.end))
            assert engine.stats().tokens_encoded - before - 1 == other.fresh_tokens < other.cached_tokens
    leases = engine.stats().leases
    others = {("plan", "paris"), ("secret",)}
    assert leases == len([m for m in library.modules("trip") if m.module not in others]), "the library's alone"


def test_no_text_of_a_prompt_is_dropped(make_library: MakeLibrary) -> None:
    """Prompt Cache's release loses text between imports."""
    engine, library = make_library()
    for text in (TRIP, "Oh! <hotel/> And? <plan days='3'/> Then: <secret/> Yes."):
        with library.assemble(library.prompt("trip", text)) as view:
            words = "".join(engine.text(handle) for handle in view.handles)
            for piece in ("You plan.", "Plan", " 3", " days."):
                assert piece in words
            wanted = ("Hm.", "Where?") if text == TRIP else ("Oh!", "And?", "Then:", "Yes.", "Spend all.")
            assert all(piece in words for piece in wanted), words


def test_nothing_that_is_not_imported_changes_a_bit_of_an_answer(
    make_library: MakeLibrary, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    """In Prompt Cache's release, modules that are not imported influence later ones."""
    for seed, known in ((1, schema()), (2, schema(paris="PARIS")), (3, schema(paris="London"))):
        _, library = make_library(known=known)
        library.register(known, encode="eager")
        answer(library, TRIP, seed)
    for seed in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[1], logits_by_seed[seed], strict=True))


def test_modules_are_bitwise_independent_of_their_siblings(make_library: MakeLibrary) -> None:
    one_engine, one = make_library()
    one.register(schema(), encode="eager")
    other_engine, other = make_library()
    other.register(schema(paris="Prague", hotel="less"), encode="eager")
    texts = ("<plan days='3'><miami/></plan>", "<plan days='3'><paris/></plan>", "<hotel/>")
    differing: list[str] = []
    for text in texts:
        pairs = zip(view_of(one, text)[1], view_of(other, text)[1], strict=True)
        for mine, theirs in ((m, t) for m, t in pairs if one_engine.kv.tiers([m])[0] and other_engine.kv.tiers([t])[0]):
            if mine == theirs:
                assert same(one_engine.kv.read(mine), other_engine.kv.read(theirs))
            else:
                differing.append(one_engine.text(mine))
    assert differing == [" Go to Paris.", " Sleep well."], "what was changed, and nothing else"


def test_what_a_prompt_reads_is_in_the_order_of_positions(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    offsets, handles = view_of(library, TRIP)
    assert offsets == sorted(offsets) and len(set(offsets)) == len(handles)
    handle = answer(library, TRIP, 9)
    assert set(engine.inspect.ancestors(handle)) > set(handles[-1:])
    assert engine.text(handle).startswith(engine.chat.header(None).text)


def test_a_text_sees_all_that_stands_before_it_and_nothing_after(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    text = "<plan days='3'><paris/></plan> Go. <hotel/><user>Where?</user>"
    with library.assemble(library.prompt("trip", text)) as view:
        records = {record.handle: record for record in engine.inspect.records(view.handles)}
        fresh = [place for place, each in enumerate(view.handles) if engine.text(each).strip(" ") in ("3", "Go.")]
        assert fresh == sorted(fresh) and len(fresh) == 2 and max(fresh) < len(view.handles) - 2
        for place in (*fresh, len(view.handles) - 1):
            assert list(records[view.handles[place]].parents) == view.handles[:place]


def test_bad_prompts_cost_nothing(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    with pytest.raises(PMLError, match="at most 4"):
        library.assemble(library.prompt("trip", "<plan days='many, many more days'/>"))
    with pytest.raises(InvalidRequestError, match="not registered"):
        library.assemble(Schema.from_text("<schema name='new'>Hi.</schema>").prompt("Ho."))
    with pytest.raises(InvalidRequestError, match="another version of schema"):
        library.assemble(schema(hotel="badly").prompt("<hotel/>"))
    with pytest.raises(InvalidRequestError, match="no module 'plan/rome'"):
        library.load("trip", ["plan/rome"])
    long = Schema.from_text(f"<schema name='long'>{'Much. ' * 400}</schema>")
    with pytest.raises(PMLError, match="1024"):
        library.register(long)
    assert library.schemas == ("trip",)
    assert engine.stats().tokens_encoded == engine.stats().leases == 0


def test_confidential_modules_are_marked_for_audits(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    said = answer(library, "<secret/><user>How much?</user>", 1)
    other = answer(library, "<hotel/><user>How much?</user>", 2)
    marked = [engine.inspect.audit([handle]).messages[0].confidential_sources for handle in (said, other)]
    assert [each.authors for each in marked[0]] == [{"trip/secret"}] and marked[1] == ()


# --- leases and memory ---


def test_scopes_end_without_the_librarys_leases(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    with engine.scope():
        library.assemble(library.prompt("trip", TRIP))
        answer(library, TRIP, 1)
    places = [module.place for module in library.modules("trip")]
    assert places.count("device") == engine.stats().messages == engine.stats().leases > 3
    with engine.scope():
        view = library.assemble(library.prompt("trip", TRIP))
    leases = engine.stats().leases
    view.release()
    assert engine.stats().leases == leases, "the scope has given its leases back already"


def test_a_view_outlives_eviction(make_library: MakeLibrary, logits_by_seed: dict[int, list[torch.Tensor]]) -> None:
    engine, library = make_library()
    with library.assemble(library.prompt("trip", TRIP)) as view:
        library.evict("trip")
        assert {module.place for module in library.modules("trip")} == {"nowhere"}
        for seed in (1, 2):
            engine.decode(
                [9], view.handles, view.offsets, view.end, sampling=Sampling(forced_token_ids=(5, 6), seed=seed)
            )
            library.load("trip")
    assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))


@pytest.mark.parametrize("meanwhile", ["replaced", "forgotten"])
def test_a_prompt_whose_schema_is_another_meanwhile_is_refused(
    make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """It would have the new pieces in the places of the old ones."""
    _, library = make_library()
    prompt, lay_out = library.prompt("trip", TRIP), library_module.compile_prompt

    def racing(*told: Any) -> Any:
        assembly = lay_out(*told)
        if meanwhile == "replaced":
            library.register(Schema.from_text(SCHEMA.replace(">", "> Some more of it. ", 1)))
        else:
            library.forget("trip")
        return assembly

    monkeypatch.setattr(library_module, "compile_prompt", racing)
    with pytest.raises(InvalidRequestError, match=r"replaced|not registered"):
        library.assemble(prompt)


def test_batched_prompts_share_modules_physically(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    prompts = [
        library.prompt("trip", f"<plan days='{n}'><miami/></plan><hotel/><user>Day {n}?</user>") for n in range(2, 9)
    ]
    views = [library.assemble(prompt) for prompt in prompts]
    engine.kv.prefetch([handle for view in views for handle in view.handles])
    shared = set(views[0].handles).intersection(*(view.handles for view in views[1:]))
    assert sum(handle.length for handle in shared) == views[0].cached_tokens
    held = {handle for view in views for handle in view.handles}
    slots = [module for module in library.modules("trip") if module.tokens == 4 and module.place == "device"]
    rounded = sum(engine._core.pool.rounded(handle.length) for handle in held) + 16 * len(slots)
    assert len(slots) == 1 and engine.stats().kv_bytes == rounded * TOKEN
    assert len(held) == len(shared) + 2 * len(views)
    said = engine.decode([view.call(Sampling(max_tokens=3, stop_tokens=())) for view in views])
    assert len(said) == 7 and engine.stats().rows_per_decode_step > 6


def test_pinned_schemas_stay_on_the_device(make_library: MakeLibrary, tmp_path: Path) -> None:
    engine, library = make_library(tmp_path, kv_budget_bytes=400 * TOKEN)
    library.pin("trip")
    assert {module.place for module in library.modules("trip")} == {"device"}
    assert all(module.pinned for module in library.modules("trip"))
    for seed in range(4):
        with engine.scope():
            engine.prefill([3 + seed] * 150)
    library.evict("trip")
    answer(library, TRIP, 1)
    assert {module.place for module in library.modules("trip")} == {"device"}
    engine.kv.flush()
    library.unpin("trip")
    library.evict("trip")
    assert {module.place for module in library.modules("trip")} == {"disk"}


def test_a_restarted_engine_finds_modules_in_their_files(make_library: MakeLibrary, tmp_path: Path) -> None:
    engine, library = make_library(tmp_path)
    library.register(schema(), encode="eager")
    encoded = engine.stats().tokens_encoded
    engine.admin.restart()
    library.load("trip")
    assert engine.stats().tokens_encoded == encoded and engine.stats().recomputed == 0


# --- files ---


def test_eager_encoding_encodes_only_what_is_missing(make_library: MakeLibrary, tmp_path: Path) -> None:
    engine, library = make_library(tmp_path)
    whole = sum(module.tokens for module in library.modules("trip"))
    library.register(schema(), encode="eager")
    assert engine.stats().tokens_encoded == whole
    assert len(files(tmp_path)) == len(library.modules("trip"))
    again, other = make_library(tmp_path)
    other.register(schema(), encode="eager")
    assert again.stats().tokens_encoded == again.stats().kv_bytes == 0, "files do"
    changed = schema(miami="Maimi")
    other.register(changed, encode="eager")
    [miami] = [module for module in other.modules("trip") if module.module == ("plan", "miami")]
    assert again.stats().tokens_encoded == miami.tokens


def test_files_answer_as_what_was_encoded(
    make_library: MakeLibrary, tmp_path: Path, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    for seed in (1, 2):
        engine, library = make_library(tmp_path)
        answer(library, TRIP, seed)
        engine.kv.flush()
    encoded = engine.stats().tokens_encoded
    with library.assemble(library.prompt("trip", TRIP)) as view:
        assert encoded == view.fresh_tokens + 6, "a header, four forced tokens and the end of the turn"
    assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))


@pytest.mark.parametrize("by", ["truncation", "another model", "another tenant"])
def test_no_file_is_trusted(
    make_library: MakeLibrary,
    make_engine: MakeEngine,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    logits_by_seed: dict[int, list[torch.Tensor]],
    by: str,
) -> None:
    engine, library = make_library(tmp_path)
    answer(library, TRIP, 1)
    engine.kv.flush()
    names = files(tmp_path)
    if by == "truncation":
        for path in names:
            path.write_bytes(path.read_bytes()[:-9])
    else:
        other = (
            make_engine(
                load_model(save_tiny_llama(tmp_path_factory.mktemp("twin"), seed=9)), salt="s", persist_dir=tmp_path
            )
            if by == "another model"
            else engine.tenant("somebody else")
        )
        with SchemaLibrary(other) as theirs:
            theirs.register(schema(), encode="eager")
        foreign = [path for path in files(tmp_path) if path not in names]
        assert {path.name for path in foreign}.isdisjoint(path.name for path in names)
        for path, strange in zip(names, foreign, strict=False):
            path.write_bytes(strange.read_bytes())
    again, other_library = make_library(tmp_path)
    answer(other_library, TRIP, 2)
    again.kv.flush()
    assert again.stats().restored_from_disk == 0
    mine = [path for path in files(tmp_path) if path.parent == names[0].parent]
    assert len(files(tmp_path, ".broken")) == len(names) and mine == names
    assert all(torch.equal(a, b) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))


def test_a_twin_that_reencodes_text_writes_nothing(make_library: MakeLibrary, tmp_path: Path) -> None:
    engine, library = make_library(tmp_path, method="baseline")
    answer(library, TRIP, 1)
    engine.kv.flush()
    assert files(tmp_path) == []


def test_tenants_share_a_folder_but_no_file(make_library: MakeLibrary, tmp_path: Path) -> None:
    engine, library = make_library(tmp_path)
    library.register(schema(), encode="eager")
    mine = files(tmp_path)
    encoded = engine.stats().tokens_encoded
    with SchemaLibrary(engine.tenant("other")) as other:
        other.register(schema(), encode="eager")
        assert engine.admin.stats().tokens_encoded == 2 * encoded
        answer(other, TRIP, 1)
    assert engine.admin.stats().restored_from_disk == 0 and len(files(tmp_path)) == 2 * len(mine)
    assert len({path.parent for path in files(tmp_path)}) == 2


def test_an_answer_whose_modules_cannot_be_written_is_given(
    make_library: MakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, library = make_library(tmp_path)

    def refused(handles: Any) -> None:
        raise EngineClosedError("injected")

    monkeypatch.setattr(engine.kv, "persist", refused)
    assert engine.tokens(answer(library, TRIP, 1))[-5:-1] == [5, 6, 7, 8]
    assert isinstance([*library.stream(library.prompt("trip", TRIP), Sampling(max_tokens=2))][-1], MessageHandle)


def test_a_replaced_schema_leaves_nothing_behind(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    library.register(schema(), encode="eager")
    messages = engine.stats().messages
    library.register(schema(miami="Boston"), encode="eager")
    assert engine.stats().messages == messages
    library.register(Schema.from_text("<schema name='trip'>Nothing.</schema>"), encode="eager")
    assert engine.stats().messages == 1
    library.forget("trip")
    assert engine.stats().messages == engine.stats().kv_bytes == 0 and library.schemas == ()


def test_what_is_registered_while_its_name_is_forgotten_is_not_leaked(
    make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, library = make_library()
    find = SchemaLibrary._find

    def racing(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        library.register(schema(paris="Prague"), encode="eager")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(SchemaLibrary, "_find", racing)
        library.forget("trip")
    library.close()
    assert engine.stats().leases == engine.stats().messages == 0


# --- async and streaming ---


async def test_cancelling_one_of_two_who_share_an_unencoded_module(
    make_library: MakeLibrary, hold_steps: HoldSteps
) -> None:
    engine, library = make_library()
    prompts = [library.prompt("trip", TRIP), library.prompt("trip", TRIP.replace("3", "2"))]
    views = [library.assemble(prompt) for prompt in prompts]
    steps = hold_steps(engine)
    sampling = Sampling(forced_token_ids=(5, 6) * 50)
    calls = [asyncio.create_task(engine.adecode([view.call(sampling)])) for view in views]
    await asyncio.sleep(0)
    await steps.amake(0)
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    steps.go_on()
    [said] = await calls[1]
    assert calls[0].cancelled() and engine.tokens(said)[-101:-1] == [5, 6] * 50
    for view in views:
        view.release()
    engine.release(said)
    await until(lambda: engine.stats().leases == engine.stats().messages == 6)
    library.close()
    assert engine.stats().leases == engine.stats().messages == 0


async def test_views_are_answered_as_prompts_are(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    prompt = library.prompt("trip", TRIP)
    sampling = Sampling(max_tokens=5, stop_tokens=(), seed=3)
    said = library.generate(prompt, sampling)
    with await asyncio.to_thread(library.assemble, prompt) as view:
        async_said = await engine.adecode([view.call(sampling)] * 4)
        streamed = [each async for each in engine.astream(**vars(view.call(sampling)))]
    assert {tuple(engine.tokens(handle)) for handle in async_said} == {tuple(engine.tokens(said))}
    assert streamed[-1] == said
    assert [each.token for each in streamed if isinstance(each, StreamedToken)] == [
        each.token for each in library.stream(prompt, sampling) if isinstance(each, StreamedToken)
    ]


async def test_a_stream_that_is_left_gives_its_leases_back(make_library: MakeLibrary) -> None:
    engine, library = make_library()
    prompt = library.prompt("trip", TRIP)
    library.assemble(prompt).release()
    leases = engine.stats().leases
    stream = library.stream(prompt, Sampling(max_tokens=400, stop_tokens=()))
    assert isinstance(next(stream), StreamedToken)
    stream.close()  # type: ignore[attr-defined]
    await until(lambda: not engine.stats().unfinished)
    assert engine.stats().leases == leases
