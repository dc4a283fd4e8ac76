"""Texts from files: ours, and a user's over them."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph import ChoreoGraph
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.cases import CASES, Case, problem
from choreo_agents.workflows.phrasing import Dialect, Prompts, load_prompts

DIALECTS = get_args(Dialect)
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
EVERY_DIALECT = pytest.mark.parametrize("dialect", DIALECTS)


def graph_of(case: Case, dialect: Dialect, **changes: Any) -> ChoreoGraph:
    options = case.options.model_validate(changes)
    return case.play(problem(case.name, 0), options, load_prompts(case.name, dialect), Sampling()).graph


@EVERY_CASE
def test_a_file_has_the_same_texts_for_both_kinds_of_model(case: Case) -> None:
    found = tomllib.loads((files("choreo_agents.workflows") / "prompts" / f"{case.name}.toml").read_text())
    assert set(found) == set(DIALECTS)
    kinds = {dialect: {name: type(text) for name, text in table.items()} for dialect, table in found.items()}
    assert kinds["embedded"] == kinds["chat"] and set(kinds["chat"].values()) <= {str, list}


def test_every_file_is_of_a_workflow() -> None:
    shipped = {Path(each.name).stem for each in (files("choreo_agents.workflows") / "prompts").iterdir()}
    assert shipped == set(CASES)


@EVERY_CASE
@EVERY_DIALECT
def test_every_workflow_can_be_played_with_our_texts(case: Case, dialect: Dialect) -> None:
    assert graph_of(case, dialect).nodes


@EVERY_DIALECT
def test_the_game_names_its_stakes(dialect: Dialect) -> None:
    case = CASES["prisoners_dilemma"]
    item = case.item.model_validate({"both": 19, "none": 12})
    graph = case.play(item, case.options(), load_prompts(case.name, dialect), Sampling()).graph
    assert (
        graph.system is not None
        and re.findall(r"\d+|None", graph.system)
        == {
            "embedded": ["19", "12"],
            "chat": ["19", "12", "31"],
        }[dialect]
    )


@EVERY_DIALECT
@pytest.mark.parametrize("strategy", ["free", "cooperate", "defect", "follow", "opposite"])
def test_every_strategy_has_a_text(dialect: Dialect, strategy: str) -> None:
    assert graph_of(CASES["prisoners_dilemma"], dialect, alice=strategy, bob=strategy).nodes


@EVERY_CASE
@EVERY_DIALECT
def test_the_largest_workflow_has_a_name_for_everybody(case: Case, dialect: Dialect) -> None:
    most = {
        "debate": {"agents": 8},
        "branch_solve_merge": {"branches": 6},
        "tree_of_thoughts": {"branches": 40, "voters": 20, "depth": 3, "keep": 3},
    }
    assert graph_of(case, dialect, **most.get(case.name, {})).nodes


@EVERY_CASE
@EVERY_DIALECT
def test_no_text_is_left_over(case: Case, dialect: Dialect) -> None:
    """A text that no workflow asks for is a promise that a user's file cannot keep."""
    asked: set[str] = set()

    class Asked(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

    texts = Asked(load_prompts(case.name, dialect).texts)
    changes: dict[str, list[dict[str, Any]]] = {
        "prisoners_dilemma": [{"alice": each} for each in ("free", "cooperate", "defect", "follow", "opposite")],
    }
    items = [problem(case.name, 0), *([problem("debate", 0)] if case.name == "direct" else [])]
    for each in changes.get(case.name, [{}]):
        for item in items:
            case.play(item, case.options.model_validate(each), Prompts(texts), Sampling())
    # Where a reply states its answer is asked when it is judged, or when votes are counted.
    assert set(texts) - asked <= {"answer", "answer_with_notes"}


def test_values_are_filled_in() -> None:
    prompts = Prompts({"part": "Write part {{ number }} of {{ parts }}.", "none": ""}, "mine.toml")
    assert prompts("part", number=1, parts=2) == "Write part 1 of 2."
    assert prompts("none") == "" and prompts.names("nothing") == ()
    with pytest.raises(InvalidRequestError, match=r"'part' of mine\.toml cannot be formatted: 'parts' is undefined"):
        prompts("part", number=1)
    with pytest.raises(InvalidRequestError, match=r"mine\.toml have no text 'nothing': they have none, part"):
        prompts("nothing")
    for broken in ("{{ number", "{{ 1 / 0 }}", "{{ none + 1 }}", "{{ number.x.y }}"):
        with pytest.raises(InvalidRequestError, match="'broken' of the package cannot be formatted"):
            Prompts({"broken": broken})("broken", number=1)


def test_marks_of_other_languages_are_left_alone() -> None:
    assert Prompts({"text": "<b> & {x} % 'y'"})("text") == "<b> & {x} % 'y'"


@pytest.mark.parametrize("wrong", [3, ["a"], {"a": 1}, True])
def test_what_is_no_text_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="'system' in the prompts of the package must be a string"):
        Prompts({"system": wrong})("system")


@pytest.mark.parametrize("wrong", ["Alice", [1, 2], 3])
def test_what_is_no_list_of_names_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be a list of strings"):
        Prompts({"agents": wrong}).names("agents")


def test_a_users_file_lies_over_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[embedded]\nspeaker = "Zoë"\n[chat]\nsystem = "Be brief."\n', encoding="utf-8")
    ours, own = load_prompts("direct", "embedded"), load_prompts("direct", "embedded", path)
    assert own("speaker") == "Zoë" and own("system") == ours("system") and set(own.texts) == set(ours.texts)
    assert load_prompts("direct", "chat", path)("system") == "Be brief."
    assert ours("speaker") == "Alice", "ours is as it was"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[embedded]\nsistem = 'x'", "has 'sistem', which direct does not use: .*'system'"),
        ("[chat]\nsystem = 'x'", r"has no table \[embedded\]"),
        ("embedded = 3", r"has no table \[embedded\]"),
        ("", r"has no table \[embedded\]"),
        ("[embedded\n", "is not valid TOML"),
        ("system = 'x", "is not valid TOML"),
    ],
)
def test_a_file_that_says_nothing_of_use_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=rf"mine\.toml' {message}"):
        load_prompts("direct", "embedded", path)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes('[embedded]\nspeaker = "Zoë"'.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=r"mine\.toml' is not valid TOML"):
        load_prompts("direct", "embedded", path)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_in_an_item_is_filled_in(dialect: Dialect) -> None:
    """Only texts of the prompts file are templates."""
    hostile = "{{ 7 * 6 }} {% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %} {{ broken"
    given = {
        "question": hostile,
        "notes": [hostile],
        "concepts": [hostile],
        "questions": [hostile, hostile],
        "both": 3,
        "none": 1,
    }
    for case in CASES.values():
        fields = {name: value for name, value in given.items() if name in case.item.model_fields}
        if case.name == "multi_qa":
            fields["notes"] = hostile
        item = case.item.model_validate(fields)
        made = case.play(item, case.options(), load_prompts(case.name, dialect), Sampling())
        assert all(words == hostile for _, words in made.messages)
        private = [getattr(node.runnable, "system", None) for node in made.graph.nodes.values()]
        assert hostile in private or "notes" not in fields, case.name
        assert not any("42" in str(text) for text in private)


def test_a_users_template_reaches_no_internals(tmp_path: Path) -> None:
    """Prompt files are passed around; one must not run code."""
    path = tmp_path / "theirs.toml"
    path.write_text("[embedded]\nsystem = \"{{ ''.__class__.__mro__[1].__subclasses__() | length }}\"")
    with pytest.raises(InvalidRequestError, match="cannot be formatted"):
        load_prompts("direct", "embedded", path)("system")
