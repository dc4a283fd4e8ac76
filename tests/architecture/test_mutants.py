"""The list of mutants is not stale, and what draws and tries them can fail."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from queue import Queue
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "mutation"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants, drawing = loaded("mutants"), loaded("drawing")
LISTED = mutants.read_mutants()


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.name)
def test_a_listed_mutant_can_be_planted_and_its_tests_are_there(mutant: mutants.Mutant) -> None:
    assert mutants.staleness(mutant) == ""
    assert mutant.found != mutant.becomes


def test_every_room_has_mutants_that_were_drawn() -> None:
    drawn = [mutant for mutant in LISTED if mutant.name.partition(":")[0] in drawing.ROOMS]
    counts = Counter(mutant.name.partition(":")[0] for mutant in drawn)
    assert all(counts[room] >= 3 for room in drawing.ROOMS), counts
    for mutant in drawn:
        assert drawing.ROOT / mutant.file in drawing.files_of(mutant.name.partition(":")[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"found": "no such text"}, "stands 0 times"),
        ({"found": "Path"}, "times in tests/mutation/mutants.py, not once"),
        ({"file": "tests/mutation/gone.py"}, "No such file"),
        ({"becomes": "LIST = ("}, "invalid syntax"),
        ({"tests": ()}, "no test is named"),
        ({"tests": ("tests/architecture/test_gone.py::test_x",)}, "No such file"),
        ({"tests": ("tests/architecture/test_mutants.py::test_gone[x]",)}, r"there is no test .*test_gone\[x\]"),
    ],
    ids=["gone", "not only once", "no file", "no Python", "no test", "no test file", "no such test"],
)
def test_a_stale_mutant_is_named(change: dict[str, object], says: str) -> None:
    fields: dict[str, object] = {
        "name": "m", "file": "tests/mutation/mutants.py", "found": "LIST = ROOT", "becomes": "LIST = FOLDER",
        "tests": ("tests/architecture/test_mutants.py::test_a_stale_mutant_is_named[gone]",),
    }  # fmt: skip
    assert mutants.staleness(mutants.Mutant(**fields)) == ""
    assert re.match(f"m: .*{says}", mutants.staleness(mutants.Mutant(**fields | change)))


def test_a_draw_is_the_same_again_and_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        drawing, "ROOMS", {"audit": ("engine/inspect.py",), "PML": ("pml/markup/whitespace.py", "pml/library.py")}
    )
    drawn = drawing.drawn(7, 5)
    assert drawn == drawing.drawn(7, 5) != drawing.drawn(8, 5)
    longer = drawing.drawn(7, 5, 1)
    assert len({*longer}) == 7 and longer[:5] == drawn
    assert {*drawing.drawn(7, 7)} == {*longer}, "what is spare would have been drawn next"


def test_a_file_is_in_one_room() -> None:
    files = [file for room in drawing.ROOMS for file in drawing.files_of(room)]
    assert len(files) == len({*files}) and drawing.PACKAGE / "kv" / "store" / "store.py" in drawing.files_of("seals")


def test_a_room_whose_place_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "ROOMS", drawing.ROOMS | {"PML": ("pml", "pml/gone.py")})
    with pytest.raises(FileNotFoundError, match=r"'PML' has no 'pml/gone.py' any more"):
        drawing.drawn(7, 10)


def test_what_cannot_matter_is_not_drawn(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    lines = [
        "def f(x: Literal[1]) -> Literal[2]:",
        '    """x == 1."""',
        "    if x == 3:",
        '        raise E(f"{x == 4}")',
    ]
    source.write_text("\n".join(lines))
    raw = source.read_bytes()
    found = {(raw[each.start : each.end].decode(), each.becomes) for each in drawing.changes(source)}
    assert found == {("==", "!="), ("3", "4"), ('raise E(f"{x == 4}")', "pass")}


@pytest.mark.slow
def test_a_mutant_is_killed_by_tests_that_fail_and_by_nothing_else(tmp_path: Path) -> None:
    source = "def add(a, b):\n    return a + b\n"
    (tmp_path / "product.py").write_text(source)
    (tmp_path / "test_product.py").write_text("from product import add\n\ndef test_add():\n    assert add(2, 0) == 2\n")
    free: Queue[Path] = Queue()
    free.put(tmp_path)

    def tried(becomes: str) -> mutants.Outcome:
        return mutants.tried(mutants.Mutant("m", "product.py", "a + b", becomes, ("test_product.py::test_add",)), free)

    assert tried("a * b").is_killed
    survived = tried("a - b")
    assert (survived.code, survived.is_killed) == (0, False)
    assert not tried("a +").is_killed, "tests that cannot be run notice nothing"
    assert (tmp_path / "product.py").read_text() == source and free.get_nowait() == tmp_path
