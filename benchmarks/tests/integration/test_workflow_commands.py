"""`choreo eval` and `choreo bench workflows` for every workflow."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from bench_support.commands import choreo
from choreo_bench.cases import CASES
from support.adapters import save_adapter
from support.chatty import save_chatty
from support.workflow_commands import refused, results, written

from choreo_agents.errors import EngineFailedError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.workflows import playing

SMALL: dict[str, list[str]] = {
    "direct": ["--steps", "2"],
    "debate": ["--agents", "2", "--rounds", "2"],
    "iterative-debate": ["--steps", "2", "--rounds", "2"],
    "tree-of-thoughts": ["--steps", "2", "--branches", "3", "--voters", "2"],
    "branch-solve-merge": ["--branches", "2", "--size", "1"],
    "multi-qa": ["--facts", "3"],
    "prisoners-dilemma": ["--talks", "1"],
}
EVERY = pytest.mark.parametrize("workflow", SMALL)


@pytest.fixture(autouse=True)
def loaded_once(embedded: LoadedModel, chatty_path: Path, chatty: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that name these two models find them in memory."""
    known = {"embedded": embedded, str(chatty_path): chatty}
    monkeypatch.setattr("choreo_agents.models.load_model", lambda name, **options: known[str(name)])


@pytest.fixture(scope="module")
def chatty_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="module")
def chatty(chatty_path: Path) -> LoadedModel:
    return load_model(chatty_path)


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command, as one line each."""
    result = choreo(*arguments, code=code)
    return " ".join(result.stdout.split()), " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--method", "serial"), "direct has no method 'serial': use one of choreo, baseline, naive", 1),
        (("--steps", "9"), "Invalid value for '--steps'", 2),
        (("--steps", "0"), "Invalid value for '--steps'", 2),
        (("--task", "songs"), "Invalid value for '--task'", 2),
        (("--branches", "2"), "No such option", 2),
        (("--prompts", "/nowhere.toml"), "No such file", 1),
        (("--inputs", "/nowhere.jsonl"), "No such file", 1),
        (("--out", "/proc/nowhere/results.jsonl"), "No such file", 1),
        (("--temperature", "-1"), "Invalid value for '--temperature'", 2),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(arguments: tuple[str, ...], message: str, code: int) -> None:
    assert message in refused("eval", "direct", *arguments, code=code)


@pytest.mark.slow
@EVERY
def test_all_methods_are_scored_on_the_same_items(workflow: str, tmp_path: Path) -> None:
    case = CASES[workflow.replace("-", "_")]
    path, page = tmp_path / "results.jsonl", tmp_path / "new" / "page.md"
    command = ["eval", workflow, "--n", "3", *SMALL[workflow], "--method", ",".join(case.variants)]
    command += ["--out", str(path), "--report", str(page), "--max-tokens", "40", "--seed", "2"]
    out, _ = run(*command)
    assert case.scored in out
    found = {(record["variant"], record["item"]) for record in results(path)}
    assert found == {(variant, f"test {number}") for variant in case.variants for number in (2, 3, 4)}
    assert len(results(path)) == len(found) and not any("error" in record for record in results(path))
    text = page.read_text()
    assert all(f"| {variant} | 3 |" in text for variant in case.variants)
    named = text.splitlines()[0].strip("`")
    assert named.startswith(f"choreo eval {workflow} ")
    whole = path.read_bytes()
    again, _ = run(*shlex.split(named)[1:])
    assert again == out and path.read_bytes() == whole, "the command on the page is the same evaluation"
    assert page.read_text() == text


def test_each_method_is_played_with_an_adapter_too(chatty_path: Path, tmp_path: Path) -> None:
    adapter, path = save_adapter(tmp_path / "adapter", chatty_path), tmp_path / "results.jsonl"
    command = ["eval", "direct", "--n", "1", "--model", str(chatty_path), "--method", "choreo", "--max-tokens", "6"]
    out, _ = run(*command, "--adapter", str(adapter), "--out", str(path))
    plain, tuned = results(path)
    assert (plain["variant"], tuned["variant"]) == ("choreo", "choreo + tuned") and "choreo + tuned" in out
    assert plain["messages"] != tuned["messages"], "random weights speak otherwise"


def test_an_evaluation_as_json_is_one_object(tmp_path: Path) -> None:
    command = ["eval", "direct", "--n", "2", "--steps", "2", "--method", "baseline,choreo", "--json"]
    found = json.loads(run(*command)[0])
    assert [each["name"] for each in found["outcomes"]] == ["baseline", "choreo"] and len(found["results"]) == 4
    path = tmp_path / "results.jsonl"
    again = json.loads(run(*command, "--out", str(path))[0])
    assert again["outcomes"] == found["outcomes"] and len(again["results"]) == 4
    by_item = [{(r["variant"], r["item"]): r["answer"] for r in each} for each in (results(path), found["results"])]
    assert by_item[0] == by_item[1] and len(by_item[0]) == 4


def test_an_item_that_cannot_be_played_is_wrong_and_the_others_finish(tmp_path: Path) -> None:
    long = {"id": "long", "question": "Add 1. " * 1500, "answer": "5"}
    unknown = {"id": "unknown", "question": "Add 2. " * 1500}
    short = [{"id": f"short {number}", "question": "Start at 1. Add 2.", "answer": "3"} for number in range(3)]
    items, path = written(tmp_path / "items.jsonl", [long, *short, unknown]), tmp_path / "results.jsonl"
    command = ["eval", "direct", "--inputs", items, "--out", str(path), "--method", "choreo,baseline"]
    out, _ = run(*command, "--temperature", "0", "--json")
    records = {(record["variant"], record["item"]): record for record in results(path)}
    assert len(records) == 10
    for variant in ("choreo", "baseline"):
        assert records[variant, "long"]["error"].startswith("ContextLengthError: ")
        assert records[variant, "long"]["score"] == 0 and "answer" not in records[variant, "long"]
        assert records[variant, "unknown"]["score"] is None
        right = sum(records[variant, f"short {number}"]["score"] for number in range(3))
        [outcome] = [each for each in json.loads(out)["outcomes"] if each["name"] == variant]
        assert (outcome["items"], outcome["failed"]) == (5, 2)
        assert outcome["share"] == pytest.approx(right / 4) and outcome["unscored"] == 1
    said, _ = run(*command, "--temperature", "0")
    assert "4 failed, and count as wrong where the right answer is known; the first: long: ContextLengthError" in said
    said, _ = run(*command[:-1], "baseline", "--temperature", "0")
    assert "2 failed" in said, "of those that were asked for"


def test_what_is_no_fault_of_an_item_is_not_held_against_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    command = ["eval", "direct", "--n", "4", "--method", "choreo", "--max-tokens", "3", "--out", str(path)]
    with monkeypatch.context() as patched:
        real = playing.play

        async def breaking(engine: Any, setup: Any, item: Any, **options: Any) -> Any:
            if item.id == "test 2":
                raise EngineFailedError("the disk is full")
            return await real(engine, setup, item, **options)

        patched.setattr(playing, "play", breaking)
        assert "the disk is full" in refused(*command)
    run(*command)
    assert {record["item"] for record in results(path)} == {f"test {number}" for number in range(4)}
    assert not any("error" in record for record in results(path))


def test_other_settings_do_not_go_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = ["eval", "direct", "--n", "1", "--method", "choreo", "--max-tokens", "3", "--out", str(path)]
    run(*command)
    whole = path.read_bytes()
    for other, message in ((["--steps", "2"], "'steps': 4"), (["--seed", "1"], "seed 0, not 1")):
        assert message in refused(*command, *other)
    assert path.read_bytes() == whole
    run(*command, "--split", "dev")
    run(*command[:3], "2", *command[4:])
    assert [record["item"] for record in results(path)] == ["test 0", "dev 0", "test 1"]


def test_other_items_under_the_same_ids_do_not_go_to_the_same_file(tmp_path: Path) -> None:
    path, items = tmp_path / "results.jsonl", tmp_path / "items.jsonl"
    command = ["eval", "direct", "--method", "choreo", "--max-tokens", "3", "--out", str(path), "--inputs", str(items)]
    written(items, [{"question": "Who?"}])
    run(*command)
    whole = path.read_bytes()
    written(items, [{"question": "What?"}])
    assert "has the result of another item with the id 'line 1'" in refused(*command)
    assert path.read_bytes() == whole
    written(items, [{"question": "Who?"}, {"question": "What?"}])
    run(*command)
    assert [record["item"] for record in results(path)] == ["line 1", "line 2"]


def test_a_report_that_cannot_be_written_is_noticed_before_anything_is_played(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    said = refused("eval", "direct", "--n", "1", "--out", str(path), "--report", "/proc/nowhere/page.md")
    assert "No such file" in said and not path.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 of {path} is not an item of direct: "),
        ('{"answer": "5"}', "line 3 of {path} is not an item of direct: question: Field required"),
        ('{"question": "?", "id": "line 1"}', "line 3 of {path} has the id 'line 1', which another line has"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, line: str, message: str) -> None:
    path, out = tmp_path / "items.jsonl", tmp_path / "results.jsonl"
    written(path, [{"question": "Who?"}, "", line, {"question": "What?"}])
    said = refused("eval", "direct", "--inputs", str(path), "--out", str(out))
    assert message.format(path=repr(str(path))) in said
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@EVERY
def test_help_names_the_options_and_the_methods(workflow: str) -> None:
    case = CASES[workflow.replace("-", "_")]
    out, _ = run("eval", workflow, "--help")
    assert case.summary in out and ", ".join(case.variants) in out and f"choreo eval {workflow}" in out


@EVERY
def test_a_chat_models_votes_and_stops_can_always_be_read(workflow: str, chatty_path: Path, tmp_path: Path) -> None:
    """It talks nonsense; what it chooses is among what it may choose."""
    path = tmp_path / "results.jsonl"
    command = [workflow, *SMALL[workflow], "--model", str(chatty_path)]
    command += ["--temperature", "1", "--max-tokens", "12"]
    run("eval", *command, "--n", "3", "--out", str(path), "--method", "choreo,baseline")
    records = results(path)
    assert len(records) == 6 and not any("error" in record for record in records)
    for record in records:
        said = {node: [m["words"] for m in record["messages"] if m["node"] == node] for node in nodes_of(record)}
        if workflow == "tree-of-thoughts":
            names = {f"Candidate {number}." for number in (1, 2, 3)}
            votes = [words.rpartition("I vote for") for words in said["voter"]]
            assert len(votes) == 2 and all(lead and vote.strip() in names for _, lead, vote in votes)
        if workflow == "iterative-debate":
            sides = {"The affirmative side is right.", "The negative side is right."}
            *before, last = said["moderator"]
            assert last in sides and before in ([], ["Go on."]) and len(said["affirmative"]) == len(before) + 1
        if workflow == "prisoners-dilemma":
            for player in ("alice", "bob"):
                assert len(said[player]) == 2 and said[player][-1] in {"I cooperate.", "I defect."}


def nodes_of(record: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(message["node"] for message in record["messages"]))


def test_a_vote_that_max_tokens_leaves_no_room_for_is_an_error_of_its_item(chatty_path: Path) -> None:
    command = ["eval", "tree-of-thoughts", *SMALL["tree-of-thoughts"], "--n", "1", "--model", str(chatty_path)]
    said, _ = run(*command, "--max-tokens", "2", "--method", "choreo", code=1)
    assert "1 failed" in said and "answer_prefix and the longest choice take up to" in said


BENCH = ["bench", "workflows", "--model", "embedded", "--dtype", "fp32", "--n", "1"]
BENCH += ["--utterance", "4", "--system", "4", "--problem", "4"]


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_bench.timing.REST_S", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_rest")
def test_workflows_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    command = [*BENCH, "--out", str(path), "--report", str(page)]
    out, _ = run(*command)
    for expected in ("MADpar, 4/4/4", "MADiter, 4/4/4", "ToT 8x4, 4/4/4", "choreo", "baseline", "naive"):
        assert expected in out
    assert len(results(path)) == 9 and page.read_text().count("| MADpar, 4/4/4 |") == 3
    words = page.read_text().splitlines()[0]
    assert words.startswith("`choreo bench workflows --model embedded --dtype fp32 --n 1 --utterance 4 ")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr("choreo_bench.experiments.bench_workflows.measure.WorkflowBench.run", never)
    whole = path.read_bytes()
    assert run(*command)[0] == out and path.read_bytes() == whole
    found = json.loads(run(*command, "--json")[0])
    assert len(found["runs"]) == 9 and {row["method"] for row in found["ratios"]} == {"baseline", "naive"}
    assert "with threads 1, not 2" in refused(*command, "--threads", "2")
    assert len(whole.splitlines()) == 10


@pytest.mark.slow
@pytest.mark.usefixtures("no_rest")
def test_lengths_and_methods_are_chosen(tmp_path: Path) -> None:
    path, plot, page = tmp_path / "runs.jsonl", tmp_path / "plot.png", tmp_path / "page.md"
    command = [*BENCH[:-6], "--n", "2", "--only", "madpar", "--only", "iter", "--naive", "1", "--system", "4"]
    command += ["--problem", "4", "--utterance", "2,4", "--out", str(path), "--plot", str(plot), "--report", str(page)]
    run(*command)
    runs = {(r["scenario"], r["lengths"]["utterance"], r["problem"], r["method"]) for r in results(path)}
    expected = {("choreo", 0), ("choreo", 1), ("baseline", 0), ("baseline", 1), ("naive", 0)}
    assert runs == {(s, u, p, m) for s in ("MADpar", "MADiter") for u in (2, 4) for m, p in expected}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert page.read_text().count("| MADpar, 4/4/2 | naive | 1 |") == 1


@pytest.mark.usefixtures("no_rest")
@pytest.mark.parametrize("critics", [False, True])
def test_the_sweep_grows_the_tree(tmp_path: Path, critics: bool) -> None:
    plot, path = tmp_path / "plot.png", tmp_path / "runs.jsonl"
    small = ["--only", "ToT 2x4", "--only", "ToT 4x4", "--methods", "choreo,baseline"]
    command = [*BENCH, "--sweep", *(["--critics"] if critics else []), *small, "--plot", str(plot), "--out", str(path)]
    out, _ = run(*command)
    behind = " critics" if critics else ""
    assert f"ToT 2x4{behind}, 4/4/4" in out and f"ToT 4x4{behind}, 4/4/4" in out and "naive" not in out
    assert plot.read_bytes().startswith(b"\x89PNG") and len(results(path)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--critics",), "--critics requires --sweep"),
        (("--only", "nonsense"), "no such workflow; available: ToT 8x4, MADiter, MADpar"),
        (("--methods", "choreo,vllm"), "unknown method 'vllm': use some of choreo, baseline, naive"),
        (("--utterance", "4,0"), "not '4,0'"),
        (("--utterance", "many"), "not 'many'"),
        (("--report", "/proc/nowhere/page.md"), "No such file"),
        (("--plot", "/proc/nowhere/plot.png"), "No such file"),
        (("--plot", "x.png", "--methods", "choreo"), "--plot draws the baseline's times over choreo's"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "choreo_bench.experiments.bench_workflows.measure.WorkflowBench.run", None
    )  # before anything is measured
    assert message in refused(*BENCH, *arguments)


@pytest.mark.slow
def test_the_untuned_tables(tmp_path: Path) -> None:
    folder, page = tmp_path / "untuned", tmp_path / "page.md"
    command = ["eval", "untuned", "--n", "2", "--out", str(folder), "--report", str(page)]
    out, _ = run(*command)
    for expected in ("Table 1: MultiQA", "Table 2: branch, solve, merge", "Table 4: right answers", "to a single call"):
        assert expected in out and expected in page.read_text()
    assert page.read_text().startswith("`choreo eval untuned --n 2 ")
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: len(lines.splitlines()) - 1 for name, lines in whole.items()} == {
        "multi_qa.jsonl": 6,
        "branch_solve_merge.jsonl": 6,
        "direct.jsonl": 2,
        "direct-notes.jsonl": 2,
        "iterative_debate.jsonl": 4,
        "tree_of_thoughts.jsonl": 4,
        "debate.jsonl": 4,
    }
    tables = json.loads(run(*command, "--json")[0])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert {
        number: [(line["trial"]["name"], line["outcome"]["name"]) for line in tables[number]] for number in "124"
    } == {
        "1": [("MultiQA", name) for name in ("baseline", "serial", "parallel")],
        "2": [("BSM", name) for name in ("baseline", "serial", "parallel")],
        "4": [
            ("Direct (sums)", "baseline"),
            *(("MADiter", name) for name in ("baseline", "choreo")),
            *(("ToT", name) for name in ("baseline", "choreo")),
            ("Direct (notes)", "baseline"),
            *(("MADpar", name) for name in ("baseline", "choreo")),
        ],
    }
    single = {
        line["trial"]["name"]: line["outcome"]["share"] for line in tables["4"] if not line["trial"]["competitor"]
    }
    for line in tables["4"]:
        if line["trial"]["competitor"]:
            assert line["gain"][0] == pytest.approx(line["outcome"]["share"] - single[line["trial"]["competitor"]])


def test_the_untuned_tables_are_of_the_embedded_language(chatty_path: Path) -> None:
    assert "was not trained on the embedded language" in refused(
        "eval", "untuned", "--n", "1", "--model", str(chatty_path)
    )
