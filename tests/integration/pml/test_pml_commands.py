"""`choreo pml run` and `choreo pml memory`, and the examples that the former is shown with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import save_tiny_llama
from typer.testing import CliRunner

from choreo_agents import Schema
from choreo_agents.cli import app
from choreo_agents.lab.experiments.bench_pml.cases import example_cases
from choreo_agents.models import LoadedModel

EXAMPLES = Path(__file__).parents[3] / "examples" / "pml"
SAID = {
    "code_generation": "Pia has 2 pink lamps.",
    "personalization": "Mia visits Athens.",
    "travel": "Ann likes soup.",
    "trip_plan": "Ann visits Lisbon.",
}


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["pml", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.stdout if "--json" in arguments else result.output


def files(name: str) -> tuple[str, str]:
    return str(EXAMPLES / f"{name}.pml"), str(EXAMPLES / f"{name}.prompt.pml")


def test_all_examples_are_run() -> None:
    assert {path.name.partition(".")[0] for path in EXAMPLES.glob("*.pml")} == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_examples_are_right_and_answered(name: str) -> None:
    run("check", *files(name), "--model", "embedded")
    out = run("run", *files(name), "--repeats", "1")
    assert SAID[name] in out.splitlines()
    for row in ("all from text", "modules on disk", "modules in host memory", "modules on the device"):
        assert row in out
    assert "read as an ordinary prompt" not in out, "the answer is that which the text gets"


def test_large_examples_are_right_and_long(embedded: LoadedModel) -> None:
    """They are those that are timed."""
    cases = example_cases(EXAMPLES / "large")
    assert {case.name.replace("-", "_") for case in cases} == set(SAID)
    files = sorted(map(str, (EXAMPLES / "large").glob("*.pml")))
    assert "nothing wrong in 8 files" in run("check", *files)
    for case in cases:
        assert len(embedded.encode(str(case.schema.tree))) > 300
    [code] = [case for case in cases if case.name == "code-generation"]
    assert 'def can_hit(self, other: "Unit") -> bool:' in code.schema.to_pml()


def test_what_is_in_the_text_of_code_is_there_to_the_letter(embedded: LoadedModel) -> None:
    schema = Schema.from_file(files("code_generation")[0])
    assert "std::map<int, Unit> units; bool ready = units.size() > 0 && at < 9;" in str(schema.tree)
    assert '<p class="note">if (a < b && b > c) &amp; so on</p>' in str(schema.tree)


def test_a_second_run_finds_what_the_first_has_encoded(tmp_path: Path) -> None:
    schema, prompt = files("travel")
    kept_in = ("--folder", str(tmp_path), "--salt", "a secret")
    arguments = ("run", schema, prompt, "--json", "--repeats", "1", *kept_in, "--speaker", "Alice")
    first = json.loads(run(*arguments))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    second = json.loads(run(*arguments, "--max-tokens", "3"))
    assert first["answer"] == first["answer_from_text"] == "Ann likes soup." and second["answer"] == "Ann likes soup"
    rows = first["first_token"]
    assert rows["text"]["reused"] == 0 and rows["text"]["encoded"] == rows["device"]["encoded"] + rows["disk"]["reused"]
    assert set(kept) == set(tmp_path.rglob("*.safetensors")) and len(kept) == 5


def test_mistakes_are_one_line_with_exit_code_1(tmp_path: Path) -> None:
    schema, prompt = files("travel")
    bad = tmp_path / "bad.pml"
    bad.write_text("<prompt schema='travel'>\n  <osla/>\n</prompt>")
    out = run("run", schema, str(bad), code=1)
    assert "bad.pml:2:" in out and "'oslo'" in out and "Traceback" not in out
    other = files("trip_plan")[1]
    assert "trip-plan" in run("run", schema, other, code=1)
    assert "error:" in run("run", schema, str(tmp_path / "none.pml"), code=1)
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert "error:" in run("run", schema, prompt, "--folder", str(occupied), "--salt", "s", code=1)
    assert "CHOREO_SALT" in run("run", schema, prompt, "--folder", str(tmp_path / "new"), code=1)


def test_memory_is_measured_for_every_model(tmp_path: Path) -> None:
    tiny = save_tiny_llama(tmp_path / "tiny")
    rows = json.loads(run("memory", "--model", str(tiny), "--json"))
    assert rows["embedded"]["device"] == 2048 and rows[str(tiny)]["device"] == 2 * 3 * 2 * 16 * 4
    for row in rows.values():
        assert row["host"] == row["device"] < row["disk"] < 1.02 * row["device"]
    assert "524,288" in run("memory")
