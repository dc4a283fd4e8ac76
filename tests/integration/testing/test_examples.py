"""Every example runs on a script, without a model, and says what the script says."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from choreo_agents import Engine
from choreo_agents.testing import Script, ScriptedCall

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.py"))
NEED_A_MODEL = {
    "11_your_own_model.py": "checks a checkpoint, and serves it",
    "16_two_engines.py": "its engines are processes",
}


@dataclass(frozen=True)
class Play:
    """What an example's agents say, and what it prints then."""

    script: Script
    prints: tuple[str, ...]
    """Lines, in order, among others."""


def last(call: ScriptedCall) -> str:
    """What was said last, again."""
    return call.messages[-1].text.partition(": ")[2]


def clara(call: ScriptedCall) -> str:
    """What she has said."""
    return next(message.text.partition(": ")[2] for message in call.messages if message.author == "Clara")


def found(call: ScriptedCall) -> str:
    """Of a document, what is anywhere."""
    return " ".join(sentence for sentence in re.findall(r"Find \w+: \w+\.", call.text) if "none" not in sentence)


def where(call: ScriptedCall) -> str:
    """In which box a thing is: asked first, told when a tool has said it."""
    thing = re.findall(r"Where are the (\w+)", call.text)[-1]
    told = re.findall(rf"Find {thing}: (\w+)\.", call.text)
    return f"The {thing}: {told[-1] if told else 1}."


def written(call: ScriptedCall) -> str:
    """Of a plan, the part that is asked for, or all of them."""
    parts = dict(re.findall(r"Part (\d): ([^.]*)\.", call.text))
    asked = re.findall(r"Write part (\d)", call.text)
    return f"{parts[asked[-1]]}." if asked and "David" not in call.header else f"{', '.join(parts.values())}."


SOLVED = "5 plus 3 is 8. 8 minus 2 is 6. 6 plus 9 is 15. The result is 15."
RIGHT = "The result is right."
FACT = " Ann has 3 red kites."

PLAYS: dict[str, Callable[[], Play]] = {
    "01": lambda: Play(
        Script({"scout": ["Bob has 5 blue boats, it is said: Grüße."], "captain": [last]}),
        ("scout: Bob has 5 blue boats, it is said: Grüße.", "captain: Bob has 5 blue boats, it is said: Grüße."),
    ),
    "03": lambda: Play(
        Script(
            {"ann.plan": "I want 3 boats.", "ann": ["I give a kite."], "bob": lambda call: f"You said: {last(call)}"}
        ),
        ("before: ann.plan", "refused: ", "after: ann.plan reached bob by words"),
    ),
    "04": lambda: Play(
        Script(
            {
                "Alice": "Bob has 5 blue boats.",
                "Bruno": "Bob has 5 blue boats.",
                "Clara": ["Bob has 9 blue boats."] * 2 + ["Bob has 5 blue boats."],
            }
        ),
        ("round 1 of 3  Alice", "round 3 of 3  ", "most end with: Bob has 5 blue boats."),
    ),
    "05": lambda: Play(
        Script({"thinker": [SOLVED] * 4 + ["I say 13."] * 2, "voter": "I vote for 15.", "checker": [RIGHT]}),
        ("thinker: ", "voter: I vote for 15.", f"checker: {RIGHT}"),
    ),
    "06": lambda: Play(
        Script({"agent.assistant": [*[70 * FACT] * 3, FACT, *[70 * FACT] * 3], "David": FACT}),
        ("merged from   text: ", "merged from caches: ", "x fewer tokens, "),
    ),
    "07": lambda: Play(
        Script({"reader": found, "David": lambda call: re.findall(r"bells: (\d+)", call.text)[-1]}),
        ("reader: Find kites: 12. Find drums: 7.", "David: 31"),
    ),
    "08": lambda: Play(Script({"solver": [SOLVED], "checker": [RIGHT]}), (f"solver: {SOLVED}", f"checker: {RIGHT}")),
    "09": lambda: Play(
        Script({"Alice": [SOLVED], "Bruno": [lambda call: f"You said: {call.messages[-2].text}"]}),
        (
            f"Alice: {SOLVED}",
            f"Bruno: You said: Alice: {SOLVED}",
            "the question has the same handle",
            "Alice's has the same",
        ),
    ),
    "10": lambda: Play(Script({"supervisor": where}), ("supervisor: The kites: 12.", "supervisor: The hats: none.")),
    "13": lambda: Play(
        Script({"scout": ["Ann has 7 green bags.", "Dan has 4 red maps."], "guide": last}),
        ("guide: Ann has 7 green bags.", "guide: Dan has 4 red maps."),
    ),
    "14": lambda: Play(
        Script(
            {
                "parent.assistant": "Dan: 4 rings.",
                "Alice.assistant": "Ann: 3 kites.",
                "Bruno.assistant": "Ida: 7 bags.",
                "Clara.assistant": "Finn: 5 hats.",
            }
        ),
        ("with a prefix cache, once the parent has said: Dan: 4 rings.", "Alice: Ann: 3 kites.", "forked in a graph:"),
    ),
    "15": lambda: Play(
        Script({"Alice": ["Ann: 3."], "Bruno": ["Bob: 5."], "Clara": ["Cleo: 4."], "David": clara}),
        ("failed: no power", "0 computed again", "Alice: Ann: 3.", "David: Cleo: 4."),
    ),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checked_engines: list[Engine],
) -> None:
    if path.name in NEED_A_MODEL:
        pytest.skip(NEED_A_MODEL[path.name])
    play = PLAYS[path.name[:2]]()
    monkeypatch.setattr(Engine, "load", play.script.load)
    runpy.run_path(str(path), run_name="__main__")
    rest = capsys.readouterr().out
    for line in play.prints:
        before, there, rest = rest.partition(line)
        assert there, f"{line!r} is not printed in {before!r}"
    assert checked_engines and play.script.calls and not play.script.unsaid


def test_no_example_is_left_out_without_a_reason() -> None:
    assert {path.name[:2] for path in EXAMPLES} == {*PLAYS, *(name[:2] for name in NEED_A_MODEL)}
