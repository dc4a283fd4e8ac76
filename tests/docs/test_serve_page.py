"""The page on serving is typed as it stands: its commands by a shell, its Python by Python."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from choreo_server.asking import ChatBody, StreamOptions
from choreo_server.command import serve
from choreo_server.fields import Fields, Instead, marks
from choreo_server.messages import FunctionIn, MessageIn, ToolCallIn
from choreo_server.metrics import Waits, exposition
from choreo_server.tenancy import API_KEY, KEYS
from support.installed import SERVER, install
from support.served import PATHS, ROOT, free_port
from typer.testing import CliRunner

from choreo_agents import Engine

PAGE = ROOT / "docs/how-to/serve.md"
FIELDS = ROOT / "docs/how-to/request-fields.md"
BOATS = "Bob has 5 blue boats."


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment with `choreo`, and `choreo-server` as pip would install it."""
    install(SERVER, tmp_path / "site")
    (tmp_path / "bin").mkdir()
    for name, said in (("choreo", ' -c "from choreo_agents.cli import main; main()"'), ("python", "")):
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec {sys.executable}{said} "$@"\n')
        shim.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *PATHS, os.environ.get("PYTHONPATH", "")]),
        "COLUMNS": "120",
    }


@pytest.mark.slow
def test_the_page_runs(installed: dict[str, str], tmp_path: Path) -> None:
    page = PAGE.read_text()
    for port in ("8000", "8001"):
        page = page.replace(f":{port}", f":{(free := free_port())}").replace(f"--port {port}", f"--port {free}")
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks].count("python") == 1 and len(blocks) == 7
    lines = [said if kind == "bash" else f"python - <<'END'\n{said}END\n" for kind, said in blocks]
    script = "trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT\n" + "\necho; echo ======\n".join(lines)
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        env=installed,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    started, asked, streamed, python, handed, keys, metrics = done.stdout.split("======")
    assert '"ok"' in started and BOATS in asked
    assert "data: [DONE]" in streamed and '"cached_tokens"' in streamed
    assert "Bob" not in python and python.strip()
    assert BOATS in handed, "it was not told, and has read it"
    assert '"id":"embedded"' in keys and "invalid_api_key" in keys
    assert "# TYPE " in metrics and "invalid_api_key" not in metrics


@pytest.mark.slow
def test_it_is_found_by_its_entry_point(installed: dict[str, str]) -> None:
    done = subprocess.run(["choreo", "serve", "--help"], env=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "choreo serve HuggingFaceTB/SmolLM2-135M-Instruct" in done.stdout, done.stderr


def test_its_help_has_what_the_page_names() -> None:
    command = typer.Typer()
    command.command()(serve)
    told = CliRunner().invoke(command, ["--help"], env={"COLUMNS": "120"}).output
    page = PAGE.read_text()
    named = set(re.findall(r"`(--[a-z-]+)", page))
    unit, image = re.findall(r"^ExecStart=(.*)|^ENTRYPOINT (.*)", page, re.MULTILINE)
    typed = [*unit[0].split(), *json.loads(image[1])]
    named |= {word for word in typed if word.startswith("--")}
    [file] = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    named |= {f"--{name}" for name in tomllib.loads(file) if name != "model"}
    assert len(named) > 15 and all(option in told for option in named), [each for each in named if each not in told]
    assert typed.count("serve") == 2 and {*re.findall(r"CHOREO_\w+", page)} == {API_KEY, KEYS}
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)", page, re.MULTILINE)
    assert int(stop) > inspect.signature(serve).parameters["stop_timeout"].default


def test_the_server_has_each_metric_of_the_page() -> None:
    with Engine.load("embedded") as engine:
        text = exposition(engine.stats(), {200: 1}, 1, Waits())
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", PAGE.read_text(), re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(names) > 15 and [name for name in names if f"# TYPE choreo_{name} " not in text] == []


def fields_table() -> str:
    """The table of what each field does, of the fields themselves: like ones share a row."""
    rows: list[tuple[list[str], str, str]] = []
    kinds: tuple[tuple[str, type[Fields]], ...] = (
        ("", ChatBody), ("stream_options.", StreamOptions), ("messages[].", MessageIn),
        ("messages[].tool_calls[].", ToolCallIn),
        ("messages[].tool_calls[].function.", FunctionIn),
    )  # fmt: skip
    for before, kind in kinds:
        for name, field in kind.model_fields.items():
            mark = next(iter(marks(field)), None)
            does = "honoured" if mark is None else "refused" if isinstance(mark, Instead) else "harmless"
            says = field.description if mark is None else mark.say if isinstance(mark, Instead) else mark.why
            if rows and rows[-1][1] == does and says in ("likewise", rows[-1][2]):
                rows[-1][0].append(before + name)
            else:
                rows.append(([before + name], does, says or ""))
    lines = (f"| {', '.join(f'`{name}`' for name in names)} | {does} | {says.replace('|', chr(92) + '|')} |"
             for names, does, says in rows)  # fmt: skip
    return "\n".join(["| field | | |", "|---|---|---|", *lines])


def test_the_page_has_what_each_field_does() -> None:
    assert fields_table() in FIELDS.read_text(), f"put this in the place of the table:\n{fields_table()}"


def test_the_page_is_found() -> None:
    assert "](docs/how-to/serve.md)" in (ROOT / "README.md").read_text()
