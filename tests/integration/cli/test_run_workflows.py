"""`choreo run` for every workflow: one problem, live, and a file of items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chatty import save_chatty
from support.workflow_commands import refused, results, run, written
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.errors import EngineFailedError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.workflows import playing
from choreo_agents.workflows.cases import CASES, problem

SMALL: dict[str, list[str]] = {
    "direct": [],
    "debate": ["--agents", "2", "--rounds", "2"],
    "iterative-debate": ["--rounds", "2"],
    "tree-of-thoughts": ["--branches", "3", "--voters", "2"],
    "branch-solve-merge": ["--branches", "2"],
    "multi-qa": [],
    "prisoners-dilemma": ["--talks", "1"],
}
ITEMS: dict[str, list[dict[str, Any]]] = {
    "direct": [{"question": "Start at 1. Add 2.", "answer": "3"}, {"id": "own", "question": "Who?", "notes": ["N."]}],
    "debate": [{"question": "What has Ann?", "answer": "x", "notes": ["Ann has 3 red kites."]}, {"question": "Who?"}],
    "iterative-debate": [{"question": "Start at 1. Add 2.", "answer": "3"}, {"question": "Start at 2. Add 2."}],
    "tree-of-thoughts": [{"question": "Start at 1. Add 2.", "answer": "3"}, {"question": "Start at 2. Add 2."}],
    "branch-solve-merge": [{"question": "Write about Ann.", "concepts": ["Ann", "red kites"]}] * 2,
    "multi-qa": [
        {"questions": ["Who?", "What?", "Where?"]},
        {"questions": ["What has Ann?"], "answers": ["3"], "notes": "Ann has 3."},
    ],
    "prisoners-dilemma": [{"both": 9, "none": 3}, {"both": 5, "none": 1, "bob_first": True}],
}
EVERY = pytest.mark.parametrize("workflow", SMALL)
TREE = ("thinker", "voter")


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


@EVERY
def test_a_workflow_is_shown_with_its_result_and_cost(workflow: str) -> None:
    more = ["--agents", "3"] if workflow == "debate" else []
    out, _ = run("run", workflow, *SMALL[workflow], *more, "--max-tokens", "40", "--no-compare")
    assert workflow.replace("-", " ") in out and "on embedded, " in out
    assert "final answer (choreo):" in out and "tokens encoded" in out and "baseline" not in out
    assert f"Try next: choreo run {workflow} --seed " in out


@EVERY
def test_every_workflow_is_compared_with_its_twins(workflow: str) -> None:
    more = ["--agents", "3"] if workflow == "debate" else []
    out, _ = run("run", workflow, *SMALL[workflow], *more, "--max-tokens", "40", "--repeats", "1")
    assert (
        "the baseline's answers under three methods" in out and "Decoding freely from the cache and from text, " in out
    )
    assert f"the whole {workflow.partition('-')[0]} ended" in " ".join(out.split())


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_first_trees_show_thoughts_that_differ_and_votes_that_split(seed: int) -> None:
    """Whatever kernels a machine has: these draws were chosen for it (`choreo_bench.shipped`)."""
    found = json.loads(run("run", "tree-of-thoughts", "--seed", str(seed), "--json", "--no-compare")[0])
    said = {node: [each["words"].strip() for each in found["messages"] if each["node"] == node] for node in TREE}
    votes = [words.rpartition("vote for")[2] for words in said["voter"]]
    assert len({*said["thinker"]}) >= 3 and len({*votes}) >= 2 and len(votes) == 4
    assert found["result"]["score"] == 1.0


@pytest.mark.parametrize("seed", range(1, 6))
def test_in_the_first_debates_somebody_changes_to_the_right_answer(seed: int) -> None:
    found = json.loads(run("run", "debate", "--seed", str(seed), "--json", "--no-compare")[0])
    first, second = found["messages"][:3], found["messages"][3:6]
    assert len({each["words"].partition(".")[0] for each in first}) >= 2
    assert [each["node"] for each in first] == [each["node"] for each in second]
    assert any(before["score"] < after["score"] for before, after in zip(first, second, strict=True))
    assert found["result"]["score"] == 1.0


def test_the_demo_is_as_it_was() -> None:
    """Its record, question and notes, and so its counts: they stand in the README."""
    found = json.loads(run("run", "debate", "--seed", "6", "--repeats", "1", "--json")[0])
    assert {name: cost["tokens_encoded"] for name, cost in found["methods"].items()} == {
        "choreo": 1057,
        "baseline": 2878,
        "naive": 5746,
    }


@pytest.mark.parametrize("workflow", [name for name in SMALL if name != "debate"])
def test_a_run_as_json_is_one_object_and_repeats(workflow: str) -> None:
    command = ["run", workflow, *SMALL[workflow], "--json", "--seed", "5", "--max-tokens", "40", "--no-compare"]
    first, again = (json.loads(run(*command)[0]) for _ in range(2))
    assert set(first) == {"item", "result", "messages", "cost"}
    assert first["item"] == problem(workflow.replace("-", "_"), 5).model_dump(mode="json")
    *given, last = first["messages"]  # functions hand on words that nobody has computed
    assert set(last) == {"node", "words", "score", "tokens_encoded", "tokens_reused"}
    assert all({"node", "words", "score"} <= set(each) for each in given)
    for found in (first, again):
        del found["cost"]
        for each in found["messages"]:  # who encodes what several read is a matter of who comes first
            each.pop("tokens_encoded", None), each.pop("tokens_reused", None)
    assert first == again


@EVERY
def test_own_items_are_played_and_written_down(workflow: str, tmp_path: Path) -> None:
    items = written(tmp_path / "items.jsonl", ["", *ITEMS[workflow]])
    path = tmp_path / "[red]new" / "results.jsonl"
    out, _ = run("run", workflow, *SMALL[workflow], "--inputs", items, "--out", str(path))
    assert f"results are in {path}" in out
    first, second = results(path)
    ids = {first["item"], second["item"]}
    assert ids == ({"line 2", "own"} if workflow == "direct" else {"line 2", "line 3"})
    assert first["variant"] == second["variant"] == "choreo"
    assert all(isinstance(record["answer"], str) and record["messages"] for record in (first, second))
    known = [record["score"] for record in (first, second) if record["score"] is not None]
    expected = {"branch-solve-merge": 2, "prisoners-dilemma": 2}.get(workflow, 1)
    assert len(known) == expected


def test_items_may_hold_any_mark(tmp_path: Path) -> None:
    path, out = tmp_path / "items.jsonl", tmp_path / "results.jsonl"
    questions = ["one\u2028two", "one\x85two", "Zoë 🙂", "[red]no[/blue] markup"]
    lines = "\r\n".join(json.dumps({"question": each}, ensure_ascii=False) for each in questions)
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    run("run", "direct", "--inputs", str(path), "--out", str(out), "--max-tokens", "3")
    assert {record["item"] for record in results(out)} == {f"line {number}" for number in (1, 2, 3, 4)}
    assert not any("error" in record for record in results(out))


def test_what_variants_decide_is_no_option() -> None:
    assert "No such option" in refused("run", "prisoners-dilemma", "--leak", "choreo", code=2)
    run("run", "multi-qa", "--layout", "serial", "--max-tokens", "3", "--no-compare")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 of {path} is not an item of direct: "),
        ("[]", "line 3 of {path} is not an item of direct: "),
        ('{"answer": "5"}', "line 3 of {path} is not an item of direct: question: Field required"),
        ('{"question": ""}', "line 3 of {path} is not an item of direct: question: String should have at least 1"),
        (
            '{"question": [5]}',
            "line 3 of {path} is not an item of direct: question: Input should be a valid string",
        ),
        ('{"question": "?", "id": "line 1"}', "line 3 of {path} has the id 'line 1', which another line has"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "items.jsonl"
    written(path, [{"question": "Who?"}, "", line, {"question": "What?"}])
    out = tmp_path / "results.jsonl"
    said = refused("run", "direct", "--inputs", str(path), "--out", str(out))
    assert message.format(path=repr(str(path))) in said
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_an_empty_file_of_items_is_refused(tmp_path: Path) -> None:
    assert "has no items" in refused("run", "direct", "--inputs", written(tmp_path / "items.jsonl", ["", " "]))


def test_a_prompts_file_changes_what_is_said(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[embedded]\ndecisions = ["We sing.", "We dance."]\n')
    command = ["run", "prisoners-dilemma", "--talks", "1", "--json", "--no-compare"]
    ours, theirs = (json.loads(run(*command, *more)[0]) for more in ([], ["--prompts", str(own)]))
    said = [{each["words"] for each in found["messages"]} for found in (ours, theirs)]
    assert said[0] & {"I cooperate.", "I defect."} and not said[0] & {"We sing.", "We dance."}
    assert said[1] & {"We sing.", "We dance."} and theirs["result"]["answer"] in {"We sing.", "We dance."}
    own.write_text('[chat]\nsystem = "x"\n')
    assert "has no table [embedded]" in refused(*command, "--prompts", str(own))


def test_names_may_be_spelled_with_underscores() -> None:
    small = [*SMALL["tree-of-thoughts"], "--json", "--no-compare"]
    found = [json.loads(run("run", name, *small)[0])["result"] for name in ("tree_of_thoughts", "tree-of-thoughts")]
    assert found[0] == found[1]
    out, _ = run("run", "--help")
    assert "tree-of-thoughts" in out and "tree_of_thoughts" not in out
    assert "No such command" in refused("run", "tree of thoughts", code=2)


@pytest.mark.parametrize("workflow", [name for name in SMALL if name != "debate"])
def test_help_names_the_options_and_the_methods(workflow: str) -> None:
    case = CASES[workflow.replace("-", "_")]
    out, _ = run("run", workflow, "--help")
    assert case.summary in out and ", ".join(case.variants) in out and f"choreo run {workflow}" in out


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--method", "serial"), "direct has no method 'serial': use one of choreo, baseline, naive", 1),
        (("--method", "choreo,baseline"), "--method must be one of choreo, baseline, naive", 1),
        (("--branches", "2"), "No such option", 2),
        (("--prompts", "/nowhere.toml"), "No such file", 1),
        (("--inputs", "/nowhere.jsonl"), "No such file", 1),
        (("--out", "results.jsonl"), "pass a file of them with --inputs", 1),
        (("--temperature", "-1"), "Invalid value for '--temperature'", 2),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(arguments: tuple[str, ...], message: str, code: int) -> None:
    assert message in refused("run", "direct", *arguments, code=code)


def test_results_that_go_to_no_file_are_lines_on_stdout_in_the_order_of_the_items(tmp_path: Path) -> None:
    items = written(tmp_path / "items.jsonl", [{"question": "Who?"}, {"id": "b", "question": "What?", "answer": "x"}])
    command = ["run", "direct", "--inputs", items, "--max-tokens", "3"]
    result = CliRunner().invoke(app, command)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["item"] for record in records] == ["line 1", "b"]
    assert records[0]["score"] is None and records[1]["score"] == 0.0
    assert "2 items, right: 0.0% of 1" in " ".join(result.stderr.split())
    out = tmp_path / "results.jsonl"
    run(*command, "--out", str(out))
    assert sorted(results(out), key=lambda each: str(each["item"])) == sorted(
        ({"key": f"choreo | {record['item']}", **record} for record in records), key=lambda each: str(each["item"])
    )
    lines = CliRunner().invoke(app, [*command, "--out", str(out), "--json"]).stdout.splitlines()
    assert [json.loads(line) for line in lines] == records, "--json shows what the file holds"


def test_items_that_cannot_be_played_are_named_and_the_others_finish(tmp_path: Path) -> None:
    long = {"id": "long", "question": "Add 1. " * 1500, "answer": "5"}
    command = ["run", "direct", "--out", str(tmp_path / "results.jsonl"), "--max-tokens", "3", "--inputs"]
    both = written(tmp_path / "both.jsonl", [long, {"question": "Who?"}])
    out, _ = run(*command, both)
    assert "1 failed; the first: long: ContextLengthError" in out
    known = {record["item"]: record for record in results(tmp_path / "results.jsonl")}
    assert known["long"]["score"] == 0.0 and "error" not in known["line 2"]
    run(*command, written(tmp_path / "long.jsonl", [long]), code=1)


def test_what_is_no_fault_of_an_item_ends_the_run_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, items = tmp_path / "results.jsonl", [{"id": name, "question": "Who?"} for name in "abc"]
    command = ["run", "direct", "--inputs", written(tmp_path / "items.jsonl", items), "--out", str(path)]
    with monkeypatch.context() as patched:
        real = playing.play

        async def breaking(engine: Any, setup: Any, item: Any, **options: Any) -> Any:
            if item.id == "b":
                raise EngineFailedError("the disk is full")
            return await real(engine, setup, item, **options)

        patched.setattr(playing, "play", breaking)
        assert "the disk is full" in refused(*command, "--max-tokens", "3")
    run(*command, "--max-tokens", "3")
    assert {record["item"] for record in results(path)} == {"a", "b", "c"}
    assert not any("error" in record for record in results(path))
    written(tmp_path / "items.jsonl", [{"id": "a", "question": "What?"}])
    assert "has the result of another item with the id 'a'" in refused(*command, "--max-tokens", "3")


@pytest.mark.parametrize("workflow", [name for name in SMALL if name != "debate"])
def test_a_chat_model_is_told_things_at_length(workflow: str, chatty_path: Path) -> None:
    command = [
        workflow,
        *SMALL[workflow],
        "--model",
        str(chatty_path),
        "--temperature",
        "1",
        "--max-tokens",
        "12",
        "--no-compare",
    ]
    single = json.loads(run("run", *command, "--json")[0])
    assert single["messages"] and single["result"]["score"] in {0.0, 1.0} | {each / 6 for each in range(7)}
