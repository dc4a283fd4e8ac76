"""What the README and the examples show runs, and says what it should."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import save_small_files
from support.nested import run
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama
from typer.testing import CliRunner

from choreo_agents.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


OF_RAYS = {"16_two_engines.py"}
"""Run where a cluster is, by `integrations/ray/tests`."""


@pytest.mark.parametrize("path", [each for each in EXAMPLES if each.name not in OF_RAYS], ids=lambda path: path.name)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_readme_shows_the_first_example() -> None:
    assert [EXAMPLES[0].read_text()] == BLOCKS
    assert EXAMPLES[0].read_text().count("\n") <= 25


def test_the_captain_learns_from_the_scout(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES[0]), run_name="__main__")
    out = capsys.readouterr().out
    assert "scout: Bob has 5 blue boats." in out
    assert "captain: Bob has 5 blue boats." in out


def run_example(number: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that an example prints."""
    [path] = [path for path in EXAMPLES if path.name.startswith(number)]
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def numbers(line: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", line)]


def test_every_example_is_short_and_listed() -> None:
    listed = re.findall(r"\]\((.*?\.py)\)", (ROOT / "examples" / "README.md").read_text())
    assert listed == [path.name for path in EXAMPLES]
    for path in EXAMPLES:
        assert path.read_text().count("\n") <= 60 and path.read_text().startswith('"""'), path.name


def test_most_debaters_end_with_the_truth_and_reuse_more_each_round(capsys: pytest.CaptureFixture[str]) -> None:
    *said, last = run_example("04", capsys)
    assert last == "most end with: Bob has 5 blue boats."
    reused = [numbers(line)[-1] for line in sorted(said)]
    assert len(said) == 9 and max(reused[3:6]) < min(reused[6:])
    assert min(reused[:3]) == 0, "whoever of them comes first finds nothing"
    assert max(reused[:3]) < min(reused[3:6])


def test_the_tree_elects_the_right_result_among_wrong_ones(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("05", capsys)
    found = [line.split()[-1] for line in lines if line.strip().startswith("thinker")]
    assert len(found) == 6 and {"15."} < set(found), "some of them slip"
    votes = [line.split()[-1] for line in lines if line.strip().startswith("voter")]
    assert votes == ["15."] * 3
    [checked] = [line for line in lines if line.strip().startswith("checker")]
    assert "6 plus 9 is 15, right." in checked and checked.endswith("The result is right.")


def test_one_changed_line_merges_caches(capsys: pytest.CaptureFixture[str]) -> None:
    text, caches, ratio = run_example("06", capsys)
    assert numbers(text)[0] >= 3 * numbers(caches)[0] and ratio.endswith("x sooner")
    source = (ROOT / "examples" / "06_swap_the_synthesizer.py").read_text()
    [(swapped, stock)] = re.findall(r"    if swap:\n(.*)\n    else:\n(.*)\n", source)
    assert "Synthesizer(" in swapped and "Synthesizer(" not in stock


def test_one_answer_comes_from_what_three_workers_found(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("07", capsys)
    assert {line for line in lines if line.startswith("reader")} == {
        "reader: Find kites: 12. Find drums: 7.",
        "reader: Find bells: 31. Find masks: 5.",
        "reader: Find cups: 9. Find maps: 22. Find keys: 14.",
    }
    assert "David: The bells: 31." in lines


def test_words_are_streamed_under_their_speakers(capsys: pytest.CaptureFixture[str]) -> None:
    solver, _, checker, cost = run_example("08", capsys)
    assert solver.split(maxsplit=1) == ["solver:", "5 plus 3 is 8. 8 minus 2 is 6. 6 plus 9 is 15. The result is 15."]
    assert checker.startswith("checker: ") and checker.endswith("The result is right.")
    assert numbers(cost)[-1] > 0


def test_a_run_goes_on_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("09", capsys)
    assert "next: ('Bruno',)" in lines[1] and "next: ()" in lines[3]
    assert lines[-3].startswith("Bruno: ") and lines[-3].endswith("The result is right.")
    assert lines[-2].startswith("the question has the same handle") and lines[-1].startswith("Alice's has the same")


def test_the_tools_answer_decides_what_the_supervisor_says(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("10", capsys)
    said = [line.partition(": ")[2] for line in lines if line.strip().startswith("supervisor")]
    assert said[1::2] == ["The kites: 12.", "The bells: 31.", "The hats: none."]
    assert sum(line.strip().startswith("find: Find ") for line in lines) == 3


def test_a_model_of_ones_own_is_checked_and_served(capsys: pytest.CaptureFixture[str]) -> None:
    out = "\n".join(run_example("11", capsys))
    error, rounding = map(float, re.findall(r"changes logits by (\S+); (\S+) is rounding", out)[0])
    assert error <= rounding and "editor: " in out


def test_the_engine_snippet_of_the_overview_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/explanation/overview.md").read_text(), re.DOTALL)
    exec(compile(block, "overview.md", "exec"), {})
    assert "Ann has 3 red kites." in capsys.readouterr().out


def test_the_page_on_serving_many_callers_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "serve-many-callers.md").read_text()
    folder = "/var/tmp/choreo-kv"
    assert folder in page
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace(folder, str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(code, "serve-many-callers.md", "exec"), names)
    names["engine"].check()
    names["engine"].close()
    assert capsys.readouterr().out


def test_the_page_on_sampling_runs() -> None:
    page = (ROOT / "docs" / "how-to" / "sampling.md").read_text()
    names: dict[str, Any] = {}
    exec(compile("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), "sampling.md", "exec"), names)
    names["engine"].close()
    assert len(names["four"]) == 4 and names["voted"] in names["vote"].choices


def test_the_page_on_hosting_a_model_runs_and_shows_what_a_check_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "how-to" / "host-a-model.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    name, tokenizer = '"./Qwen3-0.6B"', tokenizer_for("Qwen 3")
    assert f"Engine.load({name}, device" in code
    thinker = save_tiny_llama(tmp_path / "thinker", tokenizer=tokenizer, eos_token_id=tokenizer.eos_token_id)
    exec(compile(code.replace(f"load({name}", f"load({str(thinker)!r}"), "host-a-model.md", "exec"), {})
    known, header, *_, kinds, reached = capsys.readouterr().out.splitlines()
    assert (known, header) == ("None", "<|assistant|> Ann:")
    assert kinds == "['reasoning', 'text']" and kinds in page
    assert reached == "[('Ann.thoughts', 'Bob', 'words')]" and reached in page
    [shown] = re.findall(r"```\n(can be served.*?)```", page, re.DOTALL)
    folder = save_small_files(tmp_path, "Qwen 3")
    result = CliRunner().invoke(app, ["models", "check", str(folder), "--device", "cpu"], env={"COLUMNS": "300"})

    def plain(text: str) -> str:
        """Without numbers, since the tokenizer is trained on these pages, and without columns."""
        return " ".join(re.sub(r"\d+", "#", text.removesuffix("…")).split())

    for line in shown.splitlines():
        if not line.startswith("dtype"):  # not every CPU has kernels for it
            assert plain(line) in plain(result.output), line


def test_the_page_on_workflows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "run-workflows.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "run-workflows.md", "exec"), {})
    assert "Ann has red kites. Bob has blue boats. Cleo has green drums. Dan has gold rings." in capsys.readouterr().out


def test_the_page_on_training_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "train-adapters.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, "train-adapters.md", "exec"), {})
    out = capsys.readouterr().out
    assert "The result is right." in out and "tokens were sampled" in out


def test_the_page_on_merging_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "merge-branches.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "merge-branches.md", "exec"), names)
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("tokens reused")]
    assert [line.split()[0] for line in said] == ["sequential", "parallel", "text"]
    reused = [numbers(line)[-1] for line in said]
    assert reused[0] == reused[1] > 0


def test_the_page_on_structured_output_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "structured-output.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "structured-output.md", "exec", dont_inherit=True), names)
    both, voted, word = capsys.readouterr().out.splitlines()
    assert both == "True True" and re.search(r"(yes|no), [0-9]{1,2}$", voted) and re.search(r" \S+$", word)


def test_the_page_on_who_sees_what_runs() -> None:
    page = (ROOT / "docs" / "explanation" / "visibility.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "visibility.md", "exec"), names)
    assert names["policy"].confidential == {"alice.plan": {"alice"}}
    entries = [{"message_id": each, "handle": {"id": each}, "author": each, "superstep": 1} for each in "abc"]
    [sent] = names["route"]({"handles": entries})
    selected = [(each["message_id"], each["select"]) for each in sent.arg["handles"]]
    assert selected == [("b", "shared"), ("c", "reencoded")]


def test_the_page_on_encoding_parts_of_prompts_once_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "prompt-cache.md").read_text()
    folder = "/var/tmp/choreo-modules"
    assert folder in page
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)).replace(folder, str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(code, "prompt-cache.md", "exec"), names)
    first, second, *modules = capsys.readouterr().out.splitlines()
    assert first.strip().startswith("Ann likes soup.") and numbers(second) == [42, 7]
    assert {line.split()[-1] for line in modules} == {"device"}
    assert {each.place for each in names["library"].modules("travel") if "oslo" in each.key} == {"disk"}
    names["library"].close()
    names["engine"].check()
    names["engine"].close()


def test_the_page_on_policies_and_backends_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "your-own-policy-and-backend.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "your-own-policy-and-backend.md", "exec"), names)
    first, second = capsys.readouterr().out.splitlines()
    assert second == f"{first} True"
    for engine in (names["engine"], names["slow"]):
        engine.check()
        engine.close()


def test_the_walk_through_the_house_comes_to_no_file_twice() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    walk = page.split("```")[1]
    files = re.findall(r"[a-z_]+(?:/[a-z_]+)+\.py", walk)
    assert 10 < len(files) <= 18 and len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / "choreo_agents" / file).is_file()] == []


def test_agents_that_import_modules_encode_them_once(capsys: pytest.CaptureFixture[str]) -> None:
    audit, first, scout, _, second, other, _ = run_example("13", capsys)
    assert audit.startswith("team/plan can reach guide by encoding") and numbers(second)[0] < numbers(first)[0]
    assert (scout.strip(), other.strip()) == ("scout: Ann has 7 green bags.", "scout: Dan has 4 red maps.")


def test_subagents_read_their_own_prompts_and_tasks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("14", capsys)
    cached, forked, in_graph = (sorted(lines[at + 1 : at + 4]) for at in (0, 4, 8))
    assert len(lines) == 12 and in_graph == forked
    said = ["Ann has 3 red kites.", "Ida has 7 green bags.", "Finn has 5 black hats."]
    for words, text, shared in zip(said, cached, forked, strict=True):
        assert words in text and words in shared
        (read, found), (own, inherited) = numbers(text)[-2:], numbers(shared)[-2:]
        # Of text, nothing: prompts begin with instructions of their own.
        assert (found, inherited) == (0, numbers(forked[0])[-1]) and read + found == own + inherited
        assert 3 * own < read


def test_a_run_that_lasts_asks_nobody_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_example("15", capsys)
    assert lines[1] == "  failed: no power" and numbers(lines[2])[1] == 0
    said = dict(line.strip().split(": ", 1) for line in lines[4:8])
    cleo = "Cleo has 4 green drums."
    assert said == {"Alice": "Ann has 3 red kites.", "Bruno": "Bob has 5 blue boats.", "Clara": cleo, "David": cleo}
    encoded, again = numbers(lines[8])
    assert encoded < numbers(lines[2])[0] and again > 0


def test_the_page_on_prompts_in_graphs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "prompts-in-graphs.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "prompts-in-graphs.md", "exec"), names)
    costs, *findings = capsys.readouterr().out.splitlines()
    assert numbers(costs)[0] > numbers(costs)[1] and costs.endswith("Ann has 7 green bags.")
    assert "team/plan can reach guide by words" in findings and not any("encoding" in line for line in findings)
    assert names["other"].stats().tokens_encoded == names["costs"][0], "what the library has is not encoded again"
    for engine in (names["engine"], names["other"]):
        engine.close()


def test_the_page_on_testing_runs(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "how-to" / "test-your-graphs.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [conftest] = [code for code in blocks if code.startswith("# conftest.py")]
    pytester.makeconftest(conftest)
    pytester.makepyfile("\n".join(code for code in blocks if code != conftest))
    assert run(pytester, "-k", "not every_kind").parseoutcomes() == {"passed": 50, "deselected": 64}


MADE_WITH_THE_SITE = re.compile(r"a-run\.html|(\.\./)?reference/.*")
"""Pages that `docs/_site/pages.py` makes: `make docs` checks links to them."""


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists() or MADE_WITH_THE_SITE.fullmatch(target), f"{path.name} links to {target}"
