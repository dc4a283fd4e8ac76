"""`/inspect`: a tenant's recordings as pages, and nobody else's."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from choreo_server import Keys, looking, recording, server_app
from support.chat_scripts import ANSWER, THOUGHTS, family_script
from support.served import serving
from support.serving import client_of
from support.traced import call_line, message_line, run_line, written

from choreo_agents import Engine
from choreo_agents.engine.recording.format import RecordedMemory, RecordedMessage, read_recording
from choreo_agents.engine.recording.recorder import key_path
from choreo_agents.errors import InvalidRequestError


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("embedded") as made:
        yield made


KEYS = Keys(["k-ann ann", "k-bob bob", "k-up ../ann", "k-root operator"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recordings")
    for tenant in ("ann", "bob"):
        (root / tenant).mkdir()
        lines = (run_line(), message_line(tenant), call_line(tenant, 1, 0.0, 1.0, text=f"{tenant} has kites"))
        written(root / tenant / f"of-{tenant}.jsonl", *lines, ended=tenant == "ann")
    (root / "ann" / "notes.txt").write_text("ann's own")
    (root / "ann" / "broken.jsonl").write_text("{}\n")
    (root / "ann" / "linked.jsonl").symlink_to(root / "bob" / "of-bob.jsonl")
    written(root / "everybody.jsonl", run_line(), call_line("eve", 1, 0.0, 1.0, text="no key"))
    return root


async def test_a_tenant_looks_at_its_own_runs_alone(folder: Path, engine: Engine) -> None:
    app = server_app(engine, keys=KEYS, recordings=folder)
    async with client_of(app, "k-ann") as ann, client_of(app, "k-bob") as bob:
        listed = await ann.get("/inspect")
        assert listed.status_code == 200 and "of-ann" in listed.text and "broken" in listed.text
        assert "of-bob" not in listed.text and "linked" not in listed.text and "notes" not in listed.text
        page = await ann.get("/inspect/of-ann.jsonl")
        assert page.status_code == 200 and "ann has kites" in page.text and "script-src 'sha256-" in page.text
        for sent in (listed, page):
            assert sent.headers["cache-control"] == "no-store"
            assert "frame-ancestors 'none'" in sent.headers["content-security-policy"]
        live = await bob.get("/inspect/of-bob.jsonl")
        assert live.status_code == 200 and "bob has kites" in live.text and "incomplete" not in listed.text
        for wrong in ("of-bob.jsonl", "linked.jsonl", "notes.txt", "..%2Fbob%2Fof-bob.jsonl", "..", "everybody.jsonl"):
            assert (await ann.get(f"/inspect/{wrong}")).status_code == 404, wrong
        assert (await ann.get("/inspect/broken.jsonl")).status_code == 400
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(looking, "LARGEST", 100)
            assert (await ann.get("/inspect/of-ann.jsonl")).status_code == 413


async def test_a_browser_is_asked_for_a_key_as_a_password(folder: Path, engine: Engine) -> None:
    app = server_app(engine, keys=KEYS, recordings=folder)
    for given, status in (("k-ann", 200), ("k-eve", 401), ("", 401)):
        told = base64.b64encode(f"anybody:{given}".encode()).decode()
        async with client_of(app) as client:
            asked = await client.get("/inspect", headers={"Authorization": f"Basic {told}"})
            assert asked.status_code == status
            assert status == 200 or asked.headers["www-authenticate"].startswith("Basic")
            assert (await client.get("/v1/models", headers={"Authorization": f"Basic {told}"})).status_code == 401
    async with client_of(app) as client:
        for header in ("Basic", "Basic !!", "Basic " + base64.b64encode(b"\xff:\xff").decode(), "Bearer k-eve"):
            assert (await client.get("/inspect", headers={"Authorization": header})).status_code == 401


async def test_without_keys_there_is_one_folder_and_without_a_folder_nothing(folder: Path, engine: Engine) -> None:
    async with client_of(server_app(engine, recordings=folder)) as client:
        listed = await client.get("/inspect")
        assert "everybody" in listed.text and "of-ann" not in listed.text
        assert "no key" in (await client.get("/inspect/everybody.jsonl")).text
        elsewhere = {"Origin": "http://evil.example"}
        assert (await client.get("/inspect", headers=elsewhere)).status_code == 403
    async with client_of(server_app(engine)) as client:
        assert (await client.get("/inspect")).status_code == 404
    async with client_of(server_app(engine, keys=KEYS, recordings=folder), "k-up") as client:
        assert (await client.get("/inspect")).status_code == 404
    async with client_of(server_app(engine, keys=KEYS, recordings=folder), "k-root") as client:
        assert "Nothing was recorded yet" in (await client.get("/inspect")).text


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def file_text(path: Path) -> str:
    return path.read_text()


def fail(*_: object) -> None:
    raise OSError("the disk is full")


def chat(words: str, **own: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "choreo": own}


async def test_what_tenants_ask_is_recorded_for_each_alone(tmp_path: Path, engine: Engine) -> None:
    (folder := tmp_path / "recordings").mkdir()
    app = server_app(engine, keys=KEYS, recordings=folder, records=True)
    lives, another = app.router.lifespan_context(app), engine.tenant("another")
    another.prefill("x " * 500)
    anns, bobs, ups = (client_of(app, f"k-{who}") for who in ("ann", "bob", "up"))
    async with lives, anns as ann, bobs as bob, ups as up:
        told = await ann.post("/v1/chat/completions", json=chat("Ann has 3 kites.", thread="t", agent="scout"))
        first = told.json()
        again = chat("How many?", thread="t", agent="captain", parents=[first["choreo"]["handle"]])
        second = (await ann.post("/v1/chat/completions", json=again)).json()
        await ann.post("/v1/chat/completions", json=chat("Bye.") | {"n": 2, "stream": True})
        await bob.post("/v1/chat/completions", json=chat("Bob has 5 boats.", agent="bruno"))
        assert (await up.post("/v1/chat/completions", json=chat("Up."))).status_code == 200
        [file], [other] = files(folder / "ann"), files(folder / "bob")
        page = await ann.get(f"/inspect/{file.name}")
        assert page.status_code == 200 and "captain" in page.text and "bruno" not in page.text
        assert "bruno" in (await bob.get(f"/inspect/{other.name}")).text
    assert [path.name for path in files(folder)] == ["ann", "bob"] and files(tmp_path) == [folder], "nor beside it"
    assert file.stat().st_mode & 0o77 == 0 and (folder / "ann").stat().st_mode & 0o77 == 0
    read = read_recording(file)
    assert read.cut is None and [run.thread for run in read.runs] == ["t", None]
    scout, captain, *others = read.calls()
    assert (scout.author, captain.author, len(others)) == ("scout", "captain", 2)
    for call, told in ((scout, first), (captain, second)):
        usage = told["usage"]
        assert call.text == told["choices"][0]["message"]["content"] and call.sampled == usage["completion_tokens"]
        assert call.tokens_reused == usage["prompt_tokens_details"]["cached_tokens"]
        assert 0 <= call.submitted_s <= (call.first_token_s or 0.0) <= call.finished_s
    assert scout.answer in captain.view, "what it was given as its parent is in its view"
    known = {line.name: line for line in read.lines if isinstance(line, RecordedMessage)}
    assert known[captain.answer].parents == captain.view and known[captain.answer].position == captain.position
    assert known[captain.answer].offsets == tuple(offset - captain.position for offset in captain.offsets)
    memory = [line for line in read.lines if isinstance(line, RecordedMemory)]
    with another:
        assert memory and all(0 < line.device_bytes < another.stats().kv_bytes for line in memory)


async def test_thoughts_are_counted_and_not_told(tmp_path: Path) -> None:
    script = family_script("Qwen 3")
    before = script.engine.stats().tokens_encoded
    app = server_app(script.engine, recordings=tmp_path, records=True)
    asked = {"messages": [{"role": "user", "content": "What is it?"}], "choreo": {"thinking": 50}}
    async with app.router.lifespan_context(app), client_of(app) as client:
        told = (await client.post("/v1/chat/completions", json=asked)).json()
        stats = script.engine.stats()
    [file] = [path for path in files(tmp_path) if path.suffix == ".jsonl"]
    read = read_recording(file)
    [call] = read.calls()
    assert call.text is not None and call.text.strip() == ANSWER and call.thought is not None
    assert call.sampled == told["usage"]["completion_tokens"] and call.tokens is None
    assert told["choices"][0]["message"]["reasoning_content"].strip() == THOUGHTS not in file_text(file)
    assert call.tokens_encoded == stats.tokens_encoded - before, "what it cost is what its thoughts and its answer cost"
    origins = {line.name: line.origin for line in read.lines if isinstance(line, RecordedMessage)}
    assert (origins[call.thought], origins[call.answer]) == ("thought", "decoded")


async def test_recordings_are_bounded_and_their_faults_are_not_the_clients(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "FILE_BYTES", 1)
    monkeypatch.setattr(recording, "FILES", 3)
    app = server_app(engine, recordings=tmp_path, records=True)
    (tmp_path / "mine.jsonl").write_text("kept")
    async with app.router.lifespan_context(app), client_of(app) as client:
        for number in range(6):
            told = await client.post("/v1/chat/completions", json=chat(f"Question {number}."))
            assert told.status_code == 200
        assert engine.record.under_way is not None
        kept = [path for path in files(tmp_path) if path.suffix == ".jsonl" and path.name != "mine.jsonl"]
        assert len(kept) == 3 and [path for path in files(tmp_path) if path.suffix == ".key"] == [*map(key_path, kept)]
        kept[-1].unlink()  # by somebody else: the next is begun
        monkeypatch.setattr(recording, "FILE_BYTES", 8 << 20)
        assert (await client.post("/v1/chat/completions", json=chat("Again."))).status_code == 200
        kept = [path for path in files(tmp_path) if path.suffix == ".jsonl" and path.name != "mine.jsonl"]
        assert len(kept) == 3
        with monkeypatch.context() as broken:
            broken.setattr(recording.RecordedChats, "note", fail)
            assert (await client.post("/v1/chat/completions", json=chat("More."))).status_code == 200
    assert "could not be recorded" in caplog.text and (tmp_path / "mine.jsonl").read_text() == "kept"
    assert engine.record.under_way is None
    assert all(read_recording(path).cut is None for path in kept)
    with pytest.raises(InvalidRequestError, match="--recordings"):
        server_app(engine, records=True)


def test_a_server_that_is_stopped_ends_its_recordings(tmp_path: Path) -> None:
    with serving("embedded", "--recordings", str(tmp_path), "--record") as served:
        body = json.dumps(chat("Ann has 3 kites.")).encode()
        asked = urllib.request.Request(f"{served.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        told = json.load(urllib.request.urlopen(asked, timeout=60))
    [call] = read_recording(next(tmp_path.glob("*.jsonl"))).calls()
    assert call.text == told["choices"][0]["message"]["content"]
    assert read_recording(next(tmp_path.glob("*.jsonl"))).cut is None
