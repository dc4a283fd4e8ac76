"""Results on disk: what was written whole is kept, once, and results of two runs never mix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from choreo_agents.errors import InvalidRequestError
from choreo_agents.training.journal import Journal, read_journal

SETTINGS = {"workflow": "direct", "options": {"steps": 2}, "pair": (1, 2), "seed": 0}
RECORDS = {"a": {"answer": "Zoë 🙂", "score": 1.0}, "b": {"answer": "", "score": None}, "c": {"parts": {"x": 0.5}}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "runs.jsonl"


def write(path: Path) -> bytes:
    with Journal(path, SETTINGS) as journal:
        for key, record in RECORDS.items():
            journal.add(key, record)
    return path.read_bytes()


def read(path: Path) -> dict[str, dict[str, object]]:
    with Journal(path, SETTINGS) as journal:
        return journal.records


def test_records_are_there_again_in_their_order(path: Path) -> None:
    write(path)
    with Journal(path, SETTINGS) as journal:
        assert list(journal.records.items()) == list(RECORDS.items())
        assert "a" in journal and "d" not in journal
        journal.add("d", {"score": 0.0})
    assert list(read(path)) == ["a", "b", "c", "d"]


def test_each_record_is_on_disk_as_soon_as_it_is_added(path: Path) -> None:
    with Journal(path, SETTINGS) as journal:
        for count, (key, record) in enumerate(RECORDS.items(), start=2):
            journal.add(key, record)
            lines = path.read_bytes().split(b"\n")
            assert len(lines) == count + 1 and json.loads(lines[-2])["key"] == key


def test_wherever_the_file_is_cut_what_was_whole_is_kept_and_more_can_be_added(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # a few hundred files would wait for the disk
    whole = write(path)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = list(RECORDS)[: max(0, whole[:length].count(b"\n") - 1)]
        with Journal(path, SETTINGS) as journal:
            assert list(journal.records.items()) == [(key, RECORDS[key]) for key in kept], f"cut at byte {length}"
            for key, record in RECORDS.items():
                if key not in journal:
                    journal.add(key, record)
        assert path.read_bytes() == whole, f"cut at byte {length}: each line once, as if it had never been cut"
        assert list(read(path)) == list(RECORDS)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\r", "\n", "\x00", "\ufeff"])
def test_no_mark_in_an_answer_ends_a_line(path: Path, mark: str) -> None:
    with Journal(path, SETTINGS | {"said": mark}) as journal:
        journal.add(f"key{mark}", {"answer": f"one{mark}two"})
    with Journal(path, SETTINGS | {"said": mark}) as journal:
        assert journal.records == {f"key{mark}": {"answer": f"one{mark}two"}}


def test_what_is_added_is_what_will_be_read(path: Path) -> None:
    with Journal(path, SETTINGS) as journal:
        journal.add("a", {"pair": (1, 2)})
        added = dict(journal.records)
    assert added == read(path) == {"a": {"pair": [1, 2]}}


def test_one_key_is_added_once(path: Path) -> None:
    with Journal(path, SETTINGS) as journal:
        journal.add("a", {})
        with pytest.raises(AssertionError, match="a is there already"):
            journal.add("a", {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SETTINGS | {"seed": 1}, "with seed 0, not 1: pass another file"),
        (SETTINGS | {"options": {"steps": 3}}, r"with options \{'steps': 2\}, not \{'steps': 3\}"),
        (SETTINGS | {"prompts": "new"}, "with prompts None, not 'new'"),
        ({"workflow": "direct", "options": {"steps": 2}, "pair": [1, 2]}, "with seed 0, not None"),
        (SETTINGS | {"workflow": "debate", "seed": 7}, "with seed 0, not 7, workflow 'direct', not 'debate'"),
    ],
)
def test_another_runs_results_are_refused_with_what_differs(path: Path, settings: dict, message: str) -> None:
    whole = write(path)
    with pytest.raises(InvalidRequestError, match=message):
        Journal(path, settings)
    assert path.read_bytes() == whole
    assert list(read(path)) == list(RECORDS), "and nobody holds the file"


FOREIGN = [
    b"notes of mine",
    b"notes of mine\n",
    b"notes of mine\nand more",
    b"\n",
    b"\n\nnotes\n",
    b'{"question": "Who?"}',
    b'{"question": "Who?"}\n',
    b'{"settings": 3}\n',
    b'{"settings": {"theme": "dark"}}',
    b"[1, 2]\n",
    b"\xff\xfe\x00\x01\n",
    b"\x89PNG\r\n\x1a\n\x00",
    b"\xff",
]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"runs\.jsonl"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"no json", b"[1]", b'{"answer": 1}', b"", b"\xff"])
def test_a_strange_line_is_named_and_the_file_left_as_it_is(path: Path, line: bytes) -> None:
    whole = write(path) + line + b"\n" + b'{"key": "torn'
    path.write_bytes(whole)
    with pytest.raises(InvalidRequestError, match=r"line 5 of .*runs\.jsonl"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == whole


def test_an_empty_file_is_a_new_journal(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert read(path) == {} and json.loads(path.read_text()) == {"settings": SETTINGS | {"pair": [1, 2]}}


def test_while_it_is_open_nobody_else_writes_to_it(path: Path) -> None:
    with Journal(path, SETTINGS) as first:
        for settings in (SETTINGS, {}):
            with pytest.raises(InvalidRequestError, match="another run is writing to"):
                Journal(path, settings)
        first.add("a", {})
    assert list(read(path)) == ["a"]
    assert [each.name for each in path.parent.iterdir()] == [path.name], "no lock is left behind"


def test_it_is_free_again_after_an_error(path: Path) -> None:
    with pytest.raises(KeyError), Journal(path, SETTINGS):
        raise KeyError
    assert read(path) == {}


def test_without_a_path_records_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Journal(None, SETTINGS) as journal, Journal(None, {}) as other:
        journal.add("a", {"pair": (1, 2)})
        assert journal.records == {"a": {"pair": [1, 2]}} and "a" in journal and "a" not in other
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_was_written_twice_is_named_by_its_line(path: Path) -> None:
    whole = write(path)
    path.write_bytes(whole + whole.splitlines(keepends=True)[1])
    with pytest.raises(InvalidRequestError, match=r"line 5 of .* is a second record of 'a': remove one"):
        Journal(path, SETTINGS)


def test_a_journal_is_read_while_it_is_written_to(path: Path) -> None:
    with Journal(path, SETTINGS) as journal:
        journal.add("a", {"score": 1})
        assert read_journal(path) == {"a": {"score": 1}}
    path.write_bytes(path.read_bytes() + b'{"key": "b"')
    assert list(read_journal(path)) == ["a"]
