"""Tests of what a schema's encoded pieces cost: steps, calls, leases, pins and looks at the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from support.encoded import KEYS, ROOT, TOKEN, MakeEncoded, files, kv, make_with, same, text, tokens

from choreo_agents import Engine, Schema
from choreo_agents.errors import CapacityError, InvalidRequestError
from choreo_agents.pml.library import SchemaLibrary


@pytest.fixture
def make_encoded(make_engine: MakeEngine) -> MakeEncoded:
    return make_with(make_engine)


@pytest.mark.parametrize("way", ["encode", "prefetch", "pin"])
def test_texts_of_one_depth_are_encoded_in_one_step(make_encoded: MakeEncoded, way: str) -> None:
    """And nobody with what it attends to, which would be encoded twice."""
    many = [ROOT, *(text(f"text {number}", tokens(10 + number), 32, "root") for number in range(8))]
    engine, encoded = make_encoded(None, many)
    steps = engine.stats().steps
    encoded.pin() if way == "pin" else getattr(encoded, way)(encoded.keys[::-1])
    assert engine.stats().steps - steps == 2 and engine.stats().tokens_encoded == 9 * 32
    encoded.encode(KEYS[:1])
    assert engine.stats().steps - steps == 2


def test_batches_are_a_quarter_of_the_pool(make_encoded: MakeEncoded) -> None:
    many = [text(f"text {number}", tokens(10 + number), 0) for number in range(8)]
    engine, encoded = make_encoded(None, many, kv_budget_bytes=256 * TOKEN)
    steps = engine.stats().steps
    encoded.encode(encoded.keys)
    assert engine.stats().steps - steps == 4 and engine.stats().tokens_encoded == 8 * 32


def test_who_looks_waits_for_nobody_and_makes_no_call(
    make_encoded: MakeEncoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(["root"])
    encoded.evict(["root"])
    monkeypatch.setattr(Engine, "prefill", None)
    looked: list[dict[str, str]] = []
    looking = threading.Thread(target=lambda: looked.append(dict(encoded.places())))
    with encoded._lock:
        looking.start()
        looking.join(20)
    assert looked == [{"root": "disk", "left": "nowhere", "right": "nowhere", "inner": "nowhere"}]
    assert engine.stats().messages == 0


def test_a_call_that_cannot_lease_all_leases_nothing(
    make_encoded: MakeEncoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encoded = make_encoded()
    prefill, made = engine.prefill, [0]

    def failing(*call: Any) -> Any:
        made[0] += 1
        if made[0] == 3:
            raise CapacityError("injected")
        return prefill(*call)

    monkeypatch.setattr(engine, "prefill", failing)
    with pytest.raises(CapacityError, match="injected"):
        encoded.lease(KEYS)
    assert engine.stats().leases == 0
    encoded.close()
    assert engine.stats().leases == engine.stats().messages == 0


def test_nobody_waits_for_what_only_another_needs(make_encoded: MakeEncoded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the tenant's rate limit holds a call up."""
    engine, encoded = make_encoded()
    [root] = encoded.handles(["root"])
    inside, go_on, prefill = threading.Event(), threading.Event(), engine.prefill

    def held_up(*call: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return prefill(*call)

    monkeypatch.setattr(engine, "prefill", held_up)
    thread = threading.Thread(target=encoded.handles, args=(["left"],))
    thread.start()
    assert inside.wait(60)
    got: list[Any] = []
    others = threading.Thread(target=lambda: got.extend((*encoded.handles(["root"]), encoded.unpin(), encoded.close())))
    others.start()
    others.join(20)
    done = [*got]
    go_on.set()
    thread.join(60)
    assert done == [root, None, None] and engine.stats().leases == 0


def test_a_replacement_that_fails_keeps_no_leases(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    library = SchemaLibrary(engine)
    modules = "".join(f"<module name='m{number}'>Text {number}.</module>" for number in range(3))
    library.register(Schema.from_text(f"<schema name='s'>{modules}</schema>"), encode="eager")
    prefill, made = engine.prefill, [0]

    def failing(*call: Any) -> Any:
        made[0] += 1
        if made[0] == 3:
            raise KeyboardInterrupt
        return prefill(*call)

    monkeypatch.setattr(engine, "prefill", failing)
    with pytest.raises(KeyboardInterrupt):
        library.register(Schema.from_text(f"<schema name='s'>{modules} More.</schema>"))
    library.close()
    assert engine.stats().leases == engine.stats().messages == 0


def test_parents_that_are_evicted_meanwhile_stay_for_who_encodes(
    make_encoded: MakeEncoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encoded = make_encoded()
    prefill = engine.prefill

    def evicting(*call: Any) -> Any:
        encoded.evict(["root"])
        return prefill(*call)

    monkeypatch.setattr(engine, "prefill", evicting)
    encoded.prefetch(["inner"])
    assert encoded.places()["inner"] == "device"
    engine.check()


def test_what_is_evicted_meanwhile_is_pinned_all_the_same(
    make_encoded: MakeEncoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encoded = make_encoded()
    lease = encoded.lease

    def evicted(keys: Any) -> Any:
        leases = lease(keys)
        encoded.evict(KEYS)
        return leases

    monkeypatch.setattr(encoded, "lease", evicted)
    encoded.pin()
    assert encoded.pinned == {*KEYS} and {*encoded.places().values()} == {"device"}
    engine.check()


def test_two_who_replace_a_schema_keep_what_all_have(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    library = SchemaLibrary(engine)
    schema = Schema.from_text("<schema name='s'>Text.<module name='m'>More.</module></schema>")
    library.register(schema, encode="eager")
    prefill, inside, go_on = engine.prefill, threading.Event(), threading.Event()

    def held_up(*call: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return prefill(*call)

    monkeypatch.setattr(engine, "prefill", held_up)
    errors: list[BaseException] = []

    def register() -> None:
        try:
            library.register(schema)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=register) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert not errors and {module.place for module in library.modules("s")} == {"device"}
    library.close()
    assert engine.stats().leases == engine.stats().messages == 0


def test_who_pins_again_in_vain_stays_pinned(make_encoded: MakeEncoded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, encoded = make_encoded()
    encoded.pin()

    def failing(*_: Any) -> None:
        raise CapacityError("injected")

    monkeypatch.setattr(engine.kv, "prefetch", failing)
    with pytest.raises(CapacityError, match="injected"):
        encoded.pin()
    engine.kv.offload()
    assert len(encoded.pinned) == 4 and {*encoded.places().values()} == {"device"}


def test_what_has_no_room_is_not_pinned(make_encoded: MakeEncoded) -> None:
    engine, encoded = make_encoded(None, kv_budget_bytes=96 * TOKEN)
    with pytest.raises(CapacityError):
        encoded.pin()
    assert not encoded.pinned
    engine.kv.offload()
    assert "device" not in encoded.places().values()


@pytest.mark.parametrize("way", ["places", "encode", "prefetch"])
def test_files_that_others_write_later_are_found(make_encoded: MakeEncoded, tmp_path: Path, way: str) -> None:
    """As of two processes that share the folder: each has looked into it when it started."""
    (engine, encoded), (late, other) = make_encoded(tmp_path), make_encoded(tmp_path)
    other.handles(KEYS)
    encoded.encode(KEYS)
    if way == "places":
        assert {*other.places().values()} == {"disk"}
    else:
        getattr(other, way)(KEYS)
    assert all(same(kv(late, other, key), kv(engine, encoded, key)) for key in KEYS)
    assert late.stats().tokens_encoded == 0 and late.stats().restored_from_disk == 4


def test_files_are_removed_while_others_use_the_schema(
    make_encoded: MakeEncoded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encoded = make_encoded(tmp_path)
    encoded.encode(KEYS)
    unpersist = engine.kv.unpersist

    def removing(handles: Any) -> None:
        other = threading.Thread(target=encoded.handles, args=(["root"],))
        other.start()
        other.join(20)
        assert not other.is_alive()
        unpersist(handles)

    monkeypatch.setattr(engine.kv, "unpersist", removing)
    encoded.evict(KEYS, files=True)
    assert files(tmp_path) == []


def test_files_without_a_salt_are_refused_before_anything_is_computed(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(persist_dir=tmp_path)
    with pytest.raises(InvalidRequestError, match="salt="):
        SchemaLibrary(engine)
    SchemaLibrary(engine.tenant("a secret")).close()
    assert engine.admin.stats().tokens_encoded == 0
