"""`choreo serve`: what its options say, typed or in a file, and what is refused before a model is loaded."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer
from choreo_server.command import serve
from choreo_server.tenancy import read_keys
from click.testing import Result
from typer.testing import CliRunner

from choreo_agents import Engine, Memory
from choreo_agents.errors import InvalidRequestError

Invoke = Callable[..., Result]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for `Engine.load` is given; no engine comes of it."""
    found: dict[str, Any] = {}

    def load(model: str, **options: Any) -> None:
        found.update(options, model=model)
        raise ValueError("seen enough")

    monkeypatch.setattr(Engine, "load", load)
    return found


@pytest.fixture
def invoke(loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setattr("choreo_server.process.log_to_stderr", lambda level: loaded.update(level=level))
    monkeypatch.setattr(socket, "create_server", MagicMock())
    command = typer.Typer()
    command.command()(serve)

    def run(*arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(command, [*arguments], env=environment)

    return run


def test_a_taken_port_is_told_before_a_model_is_loaded(
    invoke: Invoke, loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(address: tuple[str, int], **_: Any) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket, "create_server", taken)
    for host in ("127.0.0.1", "::1"):
        said = invoke("embedded", "--host", host, "--port", "8123")
        assert said.exit_code == 1 and "model" not in loaded
        assert f"--host {host} --port 8123 (Address already in use)" in said.output


def test_options_reach_the_engine(invoke: Invoke, loaded: dict[str, Any], tmp_path: Path) -> None:
    tiers = "--host-budget", "0.5", "--disk", str(tmp_path), "--disk-budget", "2"
    said = invoke("embedded", *tiers, "--chat", "enable_thinking=false", "--chat", "date=May", "--log-level", "debug")
    assert "seen enough" in said.output
    assert loaded["memory"] == Memory(host_bytes=1 << 29, disk=tmp_path, disk_bytes=1 << 31)
    assert loaded["chat"] == {"enable_thinking": False, "date": "May"} and loaded["level"] == "debug"


def test_a_file_says_what_is_not_typed(invoke: Invoke, loaded: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "embedded"\nhost-budget = 1\nlog_level = "error"\nchat = ["a=1", "b=2"]\n')
    assert "seen enough" in invoke("--config", str(file), "--log-level", "warning").output
    assert loaded["model"] == "embedded" and loaded["memory"].host_bytes == 1 << 30
    assert loaded["chat"] == {"a": 1, "b": 2} and loaded["level"] == "warning"
    file.write_text('model = "embedded"\nchat = "a=1"\n')
    assert "seen enough" in invoke("--config", str(file)).output and loaded["chat"] == {"a": 1}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("kv-bugdet = 4", "has an unknown option 'kv_bugdet'"),
        ("[server]\nport = 1", "has an unknown option 'server'"),
        ("rows = 0", "--rows"),
        ("rows =", "Invalid value"),
    ],
)
def test_a_file_that_is_wrong_is_refused(told: str, says: str, invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(told)
    said = invoke("embedded", "--config", str(tmp_path / "serve.toml"), COLUMNS="1000")
    assert said.exit_code == 2 and says in said.output


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (("--adapter", "polite"), "--adapter 'polite' must be a name and a value"),
        (("--adapter", "polite=/no/where"), "--adapter polite=/no/where: there is no such folder"),
        (("--chat", "=1"), "--chat '=1' must be a name and a value"),
        (("--api-key", "two words"), "must be one word"),
        (("--api-key", ""), "must be one word"),
    ],
)
def test_what_is_no_value_is_refused_before(
    typed: tuple[str, ...], says: str, invoke: Invoke, loaded: dict[str, Any]
) -> None:
    said = invoke("embedded", *typed)
    assert said.exit_code == 1 and says in said.output and "model" not in loaded


def test_one_key_is_the_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_keys(None, "k").tenant("Bearer k") == "operator"
    monkeypatch.setenv("CHOREO_API_KEY", "k2")
    assert read_keys(None).tenant("Bearer k2") == "operator"
    with pytest.raises(InvalidRequestError, match="leave one of them out"):
        read_keys(tmp_path / "keys.txt")
    monkeypatch.setenv("CHOREO_API_KEY", "")
    with pytest.raises(InvalidRequestError, match="must be one word"):
        read_keys(None)
