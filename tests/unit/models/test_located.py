"""A model that is nowhere is said to be nowhere, after one question to the hub at most."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.errors import ModelNotFoundError
from choreo_agents.models import hub_path as room
from choreo_agents.models import load_model
from choreo_agents.models.hub_path import hub_path

NAME = "nobody/nothing"


class Hub(ThreadingHTTPServer):
    """Answers whatever it is asked with one status; 0: not at all."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.asked, self.done = 503, 0, threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub: Any = self.server
        hub.asked += NAME in self.path  # the library may ask for other things
        if hub.status:
            self.send_error(hub.status)
        else:
            hub.done.wait()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """In the place of the real one; there is nothing in the cache."""
    server = Hub()
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.done.set()
    server.shutdown()
    serving.join()
    server.server_close()


def cached(cache: Path, model: Path) -> Path:
    """Where a model lies in a cache into which it was downloaded."""
    folder = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return snapshot


def test_a_hub_that_is_out_of_order_is_asked_once(hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no folder 'nobody/nothing'.*is unreachable.*503.*hf download"):
        load_model(NAME)
    assert hub.asked == 1


def test_what_the_hub_does_not_have_is_on_no_hub(hub: Hub) -> None:
    hub.status = 404
    with pytest.raises(ModelNotFoundError, match=r"and no public one on http://127\.0\.0\.1.*check the name"):
        load_model(NAME)
    assert hub.asked == 1


def test_a_hub_that_wants_to_say_more_is_let_to(hub: Hub) -> None:
    hub.status = 403
    assert hub_path(NAME) == NAME


def test_a_hub_that_does_not_answer_is_not_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ANSWER_S", 0.2)
    hub.status = 0
    with pytest.raises(ModelNotFoundError, match="is unreachable"):
        hub_path(NAME)


def test_a_name_server_that_does_not_answer_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit on the request counts its time."""
    silent = threading.Event()
    monkeypatch.setattr(room.HfApi, "model_info", lambda *_, **__: silent.wait())
    monkeypatch.setattr(room, "ANSWER_S", 0.2)
    with pytest.raises(ModelNotFoundError, match=r"is unreachable \(no response within 0.2 s\)"):
        hub_path(NAME)
    silent.set()


def test_nobody_is_asked_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"is unreachable.*offline mode"):
        load_model(NAME)
    assert hub.asked == 0


def test_an_endpoint_that_refuses_is_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match=r"http://127\.0\.0\.1:9 is unreachable"):
        load_model(NAME)


def test_what_was_downloaded_before_loads_without_the_hub(hub: Hub, cache: Path, tiny_path: Path) -> None:
    snapshot = cached(cache, tiny_path)
    assert hub_path(NAME) == snapshot
    loaded = load_model(NAME)
    assert loaded.name == NAME and hub.asked == 2
    assert loaded.adapter.fingerprint == load_model(tiny_path).adapter.fingerprint


def test_what_was_downloaded_in_part_is_said_to_be(hub: Hub, cache: Path, tiny_path: Path) -> None:
    for weights in cached(cache, tiny_path).glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ModelNotFoundError, match=r"only a part of 'nobody/nothing'.*503.*hf download"):
        load_model(NAME)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs/my/model", "no folder 'runs/my/model', and it is not a valid hub name"),
        ("./model", "no folder './model'"),
        (Path("model"), "no folder 'model'"),
    ],
)
def test_what_can_be_no_hub_name_is_asked_of_nobody(hub: Hub, name: str | Path, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        load_model(name)
    assert hub.asked == 0


def test_a_folder_is_taken_as_it_is(hub: Hub, tmp_path: Path) -> None:
    assert hub_path(tmp_path) == tmp_path and hub_path(str(tmp_path)) == str(tmp_path)
    assert hub.asked == 0


def test_a_command_says_it_in_one_red_line(hub: Hub) -> None:
    result = CliRunner().invoke(app, ["models", "check", NAME], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "error: there is no folder 'nobody/nothing'" in result.output
    assert "Traceback" not in result.output
