"""`choreo bench loading`: what its processes find, and how it is told; times are for elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import save_tiny_llama
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.errors import ChoreoError
from choreo_agents.lab.experiments.bench_loading.measure import CONVERTED, PLAIN, WAYS, LoadingReport, measure_loading


def run(seconds: float, loading: int, decoding: int = 0) -> dict[str, float]:
    return {
        "seconds": seconds,
        "weights": 1 << 20,
        "loading": loading,
        "decoding": decoding,
        "first_decode": 0.25,
    }


def test_ways_are_told_as_multiples_of_the_plain_load_and_of_the_weights() -> None:
    ours = [run(3.0, 1 << 18, 1 << 19), run(9.0, 1 << 18, 1 << 19), run(2.0, 1 << 18, 1 << 19)]
    report = LoadingReport("a model", 1, {PLAIN: [run(2.0, 1 << 17)], "choreo": ours})
    assert report.rows() == [
        (PLAIN, "2.00", "1.00x", "", "1", "0.12x", ""),
        ("choreo", "3.00", "1.50x", "0.25", "1", "0.25x", "0.75x"),
    ]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_an_error_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ChoreoError, match=r"^from_pretrained, three forwards: \w*Error: .*JSON"):
        measure_loading(tmp_path, "broken", repeats=1, threads=1)


@pytest.mark.slow
def test_every_way_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "model", hidden_size=256, intermediate_size=512)
    words = ["bench", "loading", str(folder), "--repeats", "1", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout[result.stdout.index("{") :])["runs"]
    assert set(runs) == set(WAYS) and all(len(found) == 1 for found in runs.values())
    assert all(found["seconds"] > 0 and found["weights"] == runs[CONVERTED][0]["weights"] for [found] in runs.values())
