"""`choreo store`: what is said of a store, and what leaves it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from support.stored import SALT, TENANT, named, thread_named, writes
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.graph.durable.beside import opened
from choreo_agents.graph.durable.forgetting import holders_of, rows_of

ANN = thread_named("ann")


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command."""
    result = CliRunner().invoke(app, ["store", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A checkpointer's file; beside it are two threads of three messages, of which they share one."""
    with sqlite3.connect(tmp_path / "states.sqlite") as connection:
        connection.execute("CREATE TABLE checkpoints (a)")
    opened(tmp_path / "states.sqlite.lineage").batch([*writes("ann", [1, 2, 3]), *writes("bob", [3, 4, 5])])
    return tmp_path / "states.sqlite"


def test_a_whole_store_ends_with_0(states: Path) -> None:
    out, _ = run("check", states)
    assert "5 rows, 6 notes and 6 holders of 2 threads and 1 tenants; seals were not looked at" in out
    assert "nothing wrong" in out
    salt = states.with_name("salt")
    salt.write_text(f"{SALT}\n")
    assert "11 seals hold" in run("check", states, "--salt-file", salt)[0]


def test_what_is_wrong_is_counted_and_named_and_ends_with_1(states: Path) -> None:
    store = opened(states.with_name("states.sqlite.lineage"))
    row = store.get(rows_of(TENANT), named(1))
    assert row is not None
    store.put(rows_of(TENANT), named(1), {**row.value, "tokens": [9]})
    store.delete(holders_of(TENANT, named(4)), thread_named("bob"))
    out, _ = run("check", states, code=1)
    assert f"row without holder {named(4)} (tenant {TENANT})" in out and "compact deletes it" in out
    assert "and 1 more: --most" in run("check", states, "--most", 1, code=1)[0]
    salt = states.with_name("salt")
    salt.write_text(SALT)
    out, err = run("check", states, "--salt-file", salt, "--json", code=1)
    told = json.loads(out)
    assert told["counts"] == {"damaged row": 1, "note without holder": 1, "row without holder": 1}
    assert told["sealed"] == 10 and err == ""
    assert (told["findings"][0]["id"], told["findings"][0]["tenant"]) == (named(1), TENANT)
    assert "does not bear the tenant's seal" in told["findings"][0]["why"]


def test_compact_says_what_it_would_do_and_does_it(states: Path) -> None:
    file = states.with_name("states.sqlite.lineage")
    store = opened(file)
    store.conn.execute("UPDATE store SET updated_at = '2020-01-01 00:00:00' WHERE prefix LIKE ?", (f"%.{ANN}.%",))  # type: ignore[attr-defined]
    out, _ = run("compact", states, "--older-than", "52w", "--dry-run")
    assert "would be deleted: 1 threads with 3 notes, 2 rows, 3 holders" in out and f"thread {ANN} of" in out
    assert "freed" not in out
    told = json.loads(run("compact", states, "--older-than", "52w", "--json")[0])
    assert told["threads"] == [[TENANT, ANN]] and (told["rows"], told["notes"], told["holders"]) == (2, 3, 3)
    assert told["bytes_after"] <= told["bytes_before"] and not told["is_rehearsal"]
    out, _ = run("compact", file)
    assert "deleted: 0 threads with 0 notes, 0 rows, 0 holders" in out and "freed: " in out
    assert "3 rows, 3 notes and 3 holders of 1 threads" in run("check", file)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "nowhere"), "'nowhere' is no file"),
        (("check", "{states}", "--salt-file", "{states}.empty"), "there is no salt in"),
        (("check", "mysql://x"), "a store is a file, or stands at postgresql://..., not at 'mysql'"),
        (("compact", "{states}", "--older-than", "30"), "--older-than is a number with s, m, h, d or w behind it"),
        (("compact", "{states}", "--older-than", "0d"), "not '0d'"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_ends_with_2(
    states: Path, arguments: tuple[str, ...], message: str
) -> None:
    states.with_name("states.sqlite.empty").write_text("\n")
    out, err = run(*(each.format(states=states) for each in arguments), code=2)
    assert message in " ".join((out + err).split()) and "Traceback" not in out + err


def test_no_salt_is_taken_from_the_command_line() -> None:
    for command, words in (
        ("check", ("--salt-file", "--most", "--json", "Examples", "postgresql://", ".lineage")),
        ("compact", ("--older-than", "--dry-run", "--json", "Examples", "checkpoints stay")),
    ):
        out = " ".join(run(command, "--help")[0].split())
        assert all(word in out for word in words) and "--salt " not in out
