"""`choreo pml run`, and the examples that it is shown with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents import Engine, Sampling, Schema, SchemaLibrary
from choreo_agents.cli import app
from choreo_agents.models import LoadedModel
from choreo_agents.pml import compile_prompt, compile_schema

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "pml"
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
def test_examples_are_right_and_answered(embedded: LoadedModel, name: str) -> None:
    run("check", *files(name), "--model", "embedded")
    out = run("run", *files(name))
    assert SAID[name] in out.splitlines() and "tokens encoded: " in out
    schema, prompt = files(name)
    with Engine.load(embedded, method="naive") as engine, SchemaLibrary(engine) as library:
        library.register(read := Schema.from_file(schema))
        said = library.generate(read.prompt_file(prompt), Sampling(max_tokens=16, temperature=0.0))
        assert SAID[name] in engine.text(said), "the text gets the same answer"


def test_large_examples_are_right_and_long(embedded: LoadedModel) -> None:
    for name in SAID:
        assert "no problems" in run("check", *files(f"large/{name}"))
    schemas = {name: Schema.from_file(files(f"large/{name}")[0]) for name in SAID}
    for schema in schemas.values():
        assert len(embedded.encode(str(schema.tree))) > 300
    assert 'def can_hit(self, other: "Unit") -> bool:' in str(schemas["code_generation"].tree)


def test_tokens_are_counted(embedded: LoadedModel) -> None:
    found = json.loads(run("run", *files("travel"), "--json"))
    schema = Schema.from_file(files("travel")[0])
    compiled = compile_schema(schema, embedded)
    assembly = compile_prompt(compiled, schema.prompt_file(files("travel")[1]), embedded)
    answer = len(embedded.encode(embedded.chat.turn("assistant", SAID["travel"])))
    assert found == {
        "schema": "travel",
        "answer": SAID["travel"],
        "tokens_encoded": {
            "schema": sum(len(piece.tokens) for piece in compiled.cached_pieces()),
            "answer": assembly.fresh_tokens + answer,
        },
        "tokens_reused": assembly.cached_tokens,
    }


@pytest.mark.parametrize(
    ("page", "name"), [("how-to/prompt-cache.md", "travel"), ("benchmarks/pml.md", "large/personalization")]
)
def test_pages_show_what_is_printed(page: str, name: str) -> None:
    assert "\n".join(run("run", *files(name)).splitlines()[-2:]) in (ROOT / "docs" / page).read_text()


def test_what_is_in_the_text_of_code_is_there_to_the_letter(embedded: LoadedModel) -> None:
    schema = Schema.from_file(files("code_generation")[0])
    assert "std::map<int, Unit> units; bool ready = units.size() > 0 && at < 9;" in str(schema.tree)
    assert '<p class="note">if (a < b && b > c) &amp; so on</p>' in str(schema.tree)


def test_a_second_run_finds_what_the_first_has_encoded(tmp_path: Path) -> None:
    schema, prompt = files("travel")
    kept_in = ("--folder", str(tmp_path), "--salt", "a secret")
    arguments = ("run", schema, prompt, "--json", *kept_in, "--speaker", "Alice")
    first = json.loads(run(*arguments))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    second = json.loads(run(*arguments, "--max-tokens", "3"))
    assert first["answer"] == "Ann likes soup." and second["answer"] == "Ann likes soup"
    assert first["tokens_encoded"]["schema"] > first["tokens_reused"] == second["tokens_reused"]
    assert second["tokens_encoded"]["schema"] == 0
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
