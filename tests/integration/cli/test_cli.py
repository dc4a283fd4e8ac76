"""The `choreo` command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.models.random_llama import LlamaShape, save_random_llama

runner = CliRunner()


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command."""
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_the_debate_is_shown_with_its_costs() -> None:
    out, _ = run("run", "debate", "--repeats", "1")
    for expected in (
        "debate on embedded, method choreo",
        "Alice",
        "final answer (choreo)",
        "Decoding freely from the cache and from text, ",
        "9 reports, 885 tokens, read by all",
        "read,",
        "Against text with a prefix cache, choreo encoded 2.",
    ):
        assert expected in out
    for row in ("tokens encoded", "tokens reused", "first token", "end to end"):
        assert row in out


def test_json_is_one_object_and_choreo_encodes_fewer_tokens() -> None:
    out, err = run("run", "debate", "--repeats", "1", "--json", "--seed", "3", "--rounds", "2", "--agents", "4")
    result = json.loads(out)
    assert set(result) == {"item", "result", "messages", "cost", "methods", "ratios"}
    assert result["result"]["score"] in (0.0, 1.0)
    assert [m["node"] for m in result["messages"]] == 2 * ["Alice", "Bruno", "Clara", "David"]
    told = [sum(m[figure] for m in result["messages"]) for figure in ("tokens_encoded", "tokens_reused")]
    assert told == [result["cost"]["tokens_encoded"], result["cost"]["tokens_reused"]]
    assert len(result["messages"]) == 8
    methods = result["methods"]
    assert list(methods) == ["choreo", "baseline", "naive"]
    for figures in methods.values():
        assert set(figures) == {"tokens_encoded", "tokens_reused", "first_token_s", "end_to_end_s", "steps"}
    assert (
        methods["choreo"]["tokens_encoded"] < methods["baseline"]["tokens_encoded"] < methods["naive"]["tokens_encoded"]
    )
    assert methods["naive"]["tokens_reused"] == 0
    prompts = [figures["tokens_encoded"] + figures["tokens_reused"] for figures in methods.values()]
    assert max(prompts) <= 1.02 * min(prompts), "the same words are read under all methods"
    assert list(result["ratios"]) == ["baseline", "naive"]
    for twin, ratios in result["ratios"].items():
        for figure in ("tokens_encoded", "first_token_s", "end_to_end_s"):
            assert ratios[figure] == pytest.approx(methods[twin][figure] / methods["choreo"][figure])
    assert "final answer" in err


@pytest.mark.parametrize("width", ["80", "120"])
def test_a_debate_fits_the_screen(width: str) -> None:
    result = runner.invoke(app, ["run", "debate", "--repeats", "1", "--rounds", "2"], env={"COLUMNS": width})
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= int(width)
    assert not any(line.rstrip().endswith("...") for line in lines), "nothing is cut short but the record"


def test_a_record_can_be_short() -> None:
    result = json.loads(run("run", "debate", "--repeats", "1", "--json", "--rounds", "2", "--reports", "1")[0])
    assert len(result["item"]["record"]) == 1 and result["methods"]["choreo"]["tokens_encoded"] < 885
    assert "--reports" in run("run", "debate", "--reports", "10", code=2)[1]
    assert "at least 3 agents" in run("run", "debate", "--agents", "2", code=1)[0]


def test_questions_from_a_file_are_debated_as_before(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"question": "What does Ann have?"}\n')
    command = ["run", "debate", "--inputs", str(tmp_path / "items.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    run(*command, "--max-tokens", "2")
    settings = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert "'rounds': 2" in str(settings) and "'seed': 6" in str(settings)
    for option in (("--reports", "2"), ("--repeats", "1"), ("--no-compare",), ("--html", "x.html")):
        assert "not to --inputs" in " ".join("".join(run(*command, *option, code=1)).split())


def test_a_run_is_written_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "debate.html"
    out, _ = run("run", "debate", "--no-compare", "--rounds", "1", "--html", str(page))
    assert page.name in "".join(out.split()) and [each.name for each in tmp_path.iterdir()] == [page.name]
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.S)[0])
    assert sorted(call["author"] for call in data["runs"][0]["calls"]) == ["Alice", "Bruno", "Clara"]


@pytest.mark.parametrize("method", ["choreo", "baseline", "naive"])
def test_no_compare_reports_the_method_that_ran(method: str) -> None:
    out, err = run("run", "debate", "--method", method, "--no-compare", "--json", "--rounds", "1")
    result = json.loads(out)
    assert "methods" not in result and (result["cost"]["tokens_reused"] == 0) == (method == "naive")
    assert f"final answer ({method})" in err


def test_a_model_saved_to_disk(tiny_path: Path) -> None:
    # It spells what chat models are told letter by letter: a whole record has no room beside that in its context.
    out, _ = run(
        "run", "debate", "--model", str(tiny_path), "--no-compare", "--json", "--rounds", "1", "--reports", "2"
    )
    assert len(json.loads(out)["messages"]) == 3


def test_an_unsupported_model_is_one_red_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    out, err = run("run", "debate", "--model", str(tmp_path), code=1)
    assert "error: model type 'mamba' is not supported" in out + err
    assert "Traceback" not in out + err


def test_a_random_model_is_written_once_and_runs(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    save_random_llama(LlamaShape(2, 64, 96, 4, 2, 800), folder)
    out, _ = run("run", "debate", "--model", str(folder), "--no-compare", "--json", "--rounds", "1")
    assert len(json.loads(out)["messages"]) == 3
    with pytest.raises(FileExistsError, match="is not empty"):
        save_random_llama(LlamaShape(2, 64, 96, 4, 2, 800), folder)


def test_a_device_that_is_not_there_is_one_red_line() -> None:
    out, err = run("run", "debate", "--device", "nonsense", code=1)
    assert "cannot be used" in out + err and "Traceback" not in out + err


def test_help_teaches() -> None:
    out, _ = run("run", "debate", "--help")
    for expected in ("--model", "--method", "--agents", "--rounds", "--seed", "--no-compare", "--json", "Examples"):
        assert expected in out
    assert "choreo run debate" in run("--help")[0]


def test_memory_is_shown_by_tier_and_by_author(tmp_path: Path) -> None:
    small = ("--pool-tokens", "256", "--host-tokens", "64", "--disk", str(tmp_path))
    out, _ = run("inspect", "memory", *small)
    for expected in ("KV memory by tier", "pool", "host", "disk", "Alice.system", "evicted from the pool"):
        assert expected in out
    found = json.loads(run("inspect", "memory", *small, "--json")[0])
    assert found["evicted"] > 0 and found["tiers"]["host"] > 0
    kept = [author["tokens"] for author in found["authors"].values()]
    token = found["bytes_per_token"]
    assert sum(author["host"] for author in kept) * token == found["tiers"]["host"] <= found["budgets"]["host"]
    assert sum(author["device"] for author in kept) * token <= found["tiers"]["device"] <= found["budgets"]["device"]
    assert 0.5 < found["hit_rate"] < 1.0
    lineage = {name: author["tokens"]["lineage"] for name, author in found["authors"].items()}
    # Each debater reads the question behind its own notes: as it stands behind the root nobody has it encoded.
    assert lineage.pop("__start__") == 7 and set(lineage.values()) == {0}


def test_without_tiers_below_the_pool_what_leaves_it_is_lineage() -> None:
    found = json.loads(run("inspect", "memory", "--pool-tokens", "256", "--json")[0])
    assert sum(author["tokens"]["lineage"] for author in found["authors"].values()) > 0
    assert found["lost"] >= found["recomputed"] > 0
    assert "KV memory" in run("inspect", "memory", "--pool-tokens", "64", code=1)[0]


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    for command in ("run debate", "inspect memory"):
        assert "Invalid value for '--seed'" in run(*command.split(), "--seed", "99999999999999999999", code=2)[1]
