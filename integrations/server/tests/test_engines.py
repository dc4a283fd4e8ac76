"""`choreo serve --engines`: which engine it loads."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from choreo_server.command import serve
from typer.testing import CliRunner


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    for name in ("log_to_stderr", "require_free"):
        monkeypatch.setattr(f"choreo_server.process.{name}", lambda *_: None)
    made = typer.Typer()
    made.command()(serve)
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for `RayEngine.load` is given; no engine comes of it."""
    found: dict[str, Any] = {}

    def load(model: str, **options: Any) -> None:
        found.update(options, model=model)
        raise ValueError("seen enough")

    monkeypatch.setitem(sys.modules, "choreo_ray", SimpleNamespace(RayEngine=SimpleNamespace(load=load)))
    return found


def test_several_engines_are_actors_that_are_asked_for_alike(command: typer.Typer, asked: dict[str, Any]) -> None:
    arguments = ["embedded", "--engines", "3", "--rows", "7", "--kv-budget", "0.5", "--threads", "2"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1 and "seen enough" in result.output
    assert (asked["model"], asked["engines"], asked["threads"], asked["num_cpus"]) == ("embedded", 3, 2, 2)
    assert asked["scheduling"].max_num_seqs == 7 and asked["memory"].kv_budget_bytes == 1 << 29


@pytest.mark.parametrize("there", [True, False], ids=["with-a-gpu", "without"])
@pytest.mark.parametrize(
    ("device", "gpus"), [("auto", None), ("cpu", 0), ("cuda", 1), ("cuda:0", 1)], ids=lambda each: f"{each}"
)
def test_each_has_a_gpu_for_itself_where_it_computes_on_one(
    command: typer.Typer,
    asked: dict[str, Any],
    device: str,
    gpus: int | None,
    there: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    CliRunner().invoke(command, ["embedded", "--engines", "3", "--device", device])
    assert asked["num_gpus"] == (int(there) if gpus is None else gpus)
    assert (asked["num_cpus"], asked["threads"], asked["device"]) == (1, 1, device)


def test_no_engine_has_the_gpu_of_another(command: typer.Typer, asked: dict[str, Any]) -> None:
    result = CliRunner().invoke(command, ["embedded", "--engines", "2", "--device", "cuda:1"])
    assert result.exit_code == 1 and "use --device cuda, not 'cuda:1'" in result.output and not asked


def test_without_the_distribution_it_says_which(command: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "choreo_ray", None)
    result = CliRunner().invoke(command, ["embedded", "--engines", "2"])
    assert result.exit_code == 1 and "pip install choreo-ray" in result.output
