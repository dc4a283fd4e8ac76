"""The tutorials run as they are written, and are found."""

from __future__ import annotations

import gc
import re
import shlex
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from support.chatty import save_chatty
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.models.embedded import WEIGHTS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/tutorials"
PAGES = sorted(FOLDER.glob("*.md"))


def blocks(name: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (FOLDER / name).read_text(), re.DOTALL | re.MULTILINE)


def run(name: str, codes: list[str], model: str | Path = WEIGHTS) -> dict[str, Any]:
    """The names that a page's programs leave, their model in the place of the one that it speaks of."""
    names: dict[str, Any] = {}
    for code in codes:
        loads = re.sub(r'"(path/to/model|\./my-model)"', repr(str(model)), code)
        exec(compile(loads, name, "exec", dont_inherit=True), names)
    return names


def changed(before: str, after: str) -> list[str]:
    lines = unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in lines if re.match(r"[+-](?![+-])", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_tutorial_is_found(page: Path) -> None:
    for start in (ROOT / "README.md", ROOT / "docs/README.md"):
        assert f"{page.relative_to(start.parent)})" in start.read_text(), start


def test_a_program_with_chathuggingface_changes_a_line_and_an_import(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, after, cost = blocks("from-chathuggingface.md")
    assert after.count("\n") <= 10
    taken, put = changed(before, after)[:2], changed(before, after)[2:]
    assert [line[0] for line in (*taken, *put)] == ["-", "+", "-", "+"]
    assert "import" in taken[0] and "import" in taken[1]
    run("from-chathuggingface.md", [after, cost])
    gc.collect()
    *said, told = capsys.readouterr().out.splitlines()
    assert said == ["Ann has 3 red kites.", "Bob has 5 blue boats."]
    found, of = map(int, re.findall(r"\d+", told))
    assert of / 2 < found < of


@pytest.mark.slow
def test_the_program_with_chathuggingface_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_huggingface")
    before, after, _ = blocks("from-chathuggingface.md")
    greedy = 'task="text-generation", pipeline_kwargs={"do_sample": False, "return_full_text": False})'
    run("from-chathuggingface.md", [before.replace('task="text-generation")', greedy)])
    stock = [line.strip() for line in capsys.readouterr().out.splitlines()]
    run("from-chathuggingface.md", [after])
    assert capsys.readouterr().out.splitlines() == stock


def test_a_program_with_chatopenai_changes_a_line_and_an_import(capsys: pytest.CaptureFixture[str]) -> None:
    before, after, served = blocks("from-chatopenai-and-vllm.md")
    assert after.count("\n") <= 10
    assert [line[0] for line in changed(before, after)] == ["-", "+", "-", "+"]
    run("from-chatopenai-and-vllm.md", [after])
    assert capsys.readouterr().out.splitlines() == ["Ann has 3 red kites.", "Bob has 5 blue boats."]
    # What takes a server is marked, and is the program of before but for the address.
    comment, *lines = served.splitlines()
    assert comment.startswith("# needs choreo-server")
    assert "\n".join(lines).replace("127.0.0.1", "localhost").strip() in before


def test_the_first_graph_learns_what_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("your-first-graph.md", blocks("your-first-graph.md"))
    assert "5 blue boats" in names["answers"]["shared"] and "5 blue boats" not in names["answers"]["private"]
    out = capsys.readouterr().out
    assert out.startswith("Bob has 5 blue boats.")
    assert "shared: scout.system can reach captain by encoding" in out
    assert "reencoded: scout.system can reach captain by encoding" not in out
    assert "reencoded: scout.system can reach captain by words" in out
    assert len(re.findall(r"\d+ tokens encoded, \d+ reused", out)) == 2
    assert names["state"]["messages"][-1].text and out.rstrip().endswith("6 messages")


def test_a_merge_from_caches_encodes_less_than_one_from_text(capsys: pytest.CaptureFixture[str]) -> None:
    run("swap-the-synthesizer.md", blocks("swap-the-synthesizer.md"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Ann has 3 red kites. (76 tokens encoded)", "Ann has 3 red kites. (67 tokens encoded)"], (
        "as it says"
    )


def test_the_supervisor_sends_control_and_the_tool_answers(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("supervisors-and-tools.md", blocks("supervisors-and-tools.md"))
    said = [(each.name or each.type, each.text) for each in names["state"]["messages"]]
    assert [name for name, _ in said] == [
        "human", "supervisor", "finder", "find", "finder", "supervisor", "counter", "supervisor", "writer",
    ]  # fmt: skip
    assert said[3][1] == said[4][1] == "The kites are in box 12."
    encoded, reused = map(int, re.findall(r"\d+", capsys.readouterr().out.splitlines()[-1]))
    assert reused > encoded > 0


def test_a_debate_runs_on_a_checkpoint_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_chatty(tmp_path / "my-model")
    [code] = blocks("a-debate-on-your-own-model.md")
    names = run("a-debate-on-your-own-model.md", [code.replace("max_tokens=64", "max_tokens=4")], model)
    speakers = [message.name for message in names["state"]["messages"]]
    assert speakers[0] is None and sorted(speakers[1:]) == sorted(list(names["NOTES"]) * 2)
    *_, end, cost = capsys.readouterr().out.splitlines()
    assert end.startswith("most end with:") and re.fullmatch(r"\d+ tokens encoded, \d+ reused from the cache", cost)


@pytest.mark.slow
def test_its_commands_run(tmp_path: Path) -> None:
    model = save_chatty(tmp_path / "my-model")
    lines = [line for block in blocks("a-debate-on-your-own-model.md", "sh") for line in block.splitlines()]
    commands = [shlex.split(line.replace("./my-model", str(model)), comments=True) for line in lines]
    assert len(commands) == 4
    for choreo, *words in commands:
        few = {"eval": ["--n", "1"], "run": ["--reports", "2", "--max-tokens", "8"]}.get(words[0], [])
        result = CliRunner().invoke(app, [*words, *few], env={"COLUMNS": "200"})
        assert choreo == "choreo" and result.exit_code == 0, result.output
