"""`choreo bench guides`, on a few schemas; times are for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.lab.experiments.bench_guides.measure import is_valid
from choreo_agents.lab.experiments.bench_guides.schemas import longest, random_schemas
from choreo_agents.models.guides import require_grammar
from choreo_agents.sampling import Grammar


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_answers_of_random_schemas_validate(tmp_path: Path, record_property: Any) -> None:
    table = tmp_path / "guides.md"
    words = ["bench", "guides", "--schemas", "8", "--rows", "8", "--max-tokens", "100", "--words", "600"]
    result = CliRunner().invoke(app, [*words, "--report", str(table), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    counts = found["counts"]
    assert counts["valid"] + counts["cut"] == 8 and counts["valid"] >= 6
    assert counts["invalid"] == counts["bounded_cut"] == 0
    assert [masks["vocabulary"] for masks in found["masks"]] == [752, 600]
    command = "choreo bench guides --schemas 8 --seed 0 --rows 8 --max-tokens 100 --words 600 --threads 1"
    assert f"`{command}`" in table.read_text()
    record_property("counts", f"{counts['valid']} of 8 validate, {counts['cut']} cut")


def test_all_random_schemas_can_be_followed_and_some_have_no_bound() -> None:
    drawn = random_schemas(200)
    assert drawn == random_schemas(200) and drawn != random_schemas(200, seed=1)
    for schema in drawn:
        require_grammar(Grammar.model_validate({"json_schema": schema}))
    bounds = [longest(schema) for schema in drawn]
    assert 10 < bounds.count(None) < 190


@given(st.lists(st.sampled_from('a"é\n🙂'), max_size=5), st.integers(-12, 345))
def test_no_output_is_longer_than_its_schema_allows(letters: list[str], number: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string", "maxLength": 5},
            "n": {"type": "integer", "minimum": -12, "maximum": 345},
            "l": {"type": "array", "items": {"enum": [None, "é"]}, "maxItems": 2},
        },
        "required": ["s", "n", "l"],
        "additionalProperties": False,
    }
    said = {"s": "".join(letters), "n": number, "l": ["é", None]}
    for plain in (True, False):
        text = json.dumps(said, ensure_ascii=plain)
        bound = longest(schema)
        assert is_valid(text, schema) and bound is not None and len(f" {text}".encode()) <= bound
    assert not is_valid(json.dumps({**said, "n": 346}), schema) and not is_valid("{", schema)
