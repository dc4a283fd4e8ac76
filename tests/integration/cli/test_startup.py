"""The first second: lists and help load nothing heavy, and whoever waits is told what for."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed import BENCHMARKS, SERVER, commands_in, install, own_commands

HEAVY = ("torch", "transformers", "langgraph", "langchain_core", "matplotlib", "peft")
RARE = ("transformers", "matplotlib", "peft")
LOADING = "loading torch and LangGraph ..."
MAIN = """
import sys
sys.argv = ["choreo", *{arguments}]
from choreo_agents.cli import main
try:
    main()
finally:
    print("heavy:", *[name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""
HELP = """
import sys
from typer.testing import CliRunner
from choreo_agents.cli import app
for words in {words}:
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words
print(*[name for name in {heavy} if name in sys.modules])
"""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
"""Importing it fails: what is said before is said at once."""
RUN = """
import asyncio, sys
from blockbuster import blockbuster_ctx
from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Sampling

with Engine.load("embedded") as engine:
    graph = ChoreoGraph()
    graph.add_node(Agent("alice", system="You are Alice.", sampling=Sampling(max_tokens=4)))
    graph.add_edge(START, "alice")
    graph.add_edge("alice", END)
    app = graph.compile(engine=engine)

    async def run():
        before = set(sys.modules)
        with blockbuster_ctx("choreo_agents"):
            await app.ainvoke({"messages": [("user", "What does Ann have?")]})
        return set(sys.modules) - before

    print(*asyncio.run(run()))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run by a new interpreter, in which nothing is imported yet."""
    path = os.pathsep.join(["", *sys.path]).strip(os.pathsep)
    everything = os.environ | {"PYTHONPATH": path, "COLUMNS": "120"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=everything, check=False)


def choreo(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A command, and on stderr which heavy modules it has imported."""
    return python(before + MAIN.format(arguments=list(arguments), heavy=HEAVY), **environment)


def test_the_package_loads_nothing_heavy() -> None:
    done = python(f"import sys, choreo_agents; print(*[name for name in {HEAVY} if name in sys.modules])")
    assert (done.returncode, done.stdout.split()) == (0, [])


def test_public_names_load_no_model_library() -> None:
    done = python(f"import sys; from choreo_agents import *; print(*[name for name in {RARE} if name in sys.modules])")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


@pytest.mark.slow
def test_public_names_are_those_of_the_rooms() -> None:
    """Each is found, none is forgotten, and what is no name is none."""
    done = python(
        "import choreo_agents as c; assert set(c.__all__) <= set(dir(c)); [getattr(c, name) for name in c.__all__]\n"
        "import ast, inspect; tree = ast.walk(ast.parse(inspect.getsource(c)))\n"
        "told = [each.names for each in tree if isinstance(each, ast.ImportFrom) and each.module[:6] == 'choreo']\n"
        "assert {name.name for names in told for name in names} == set(c.__all__) - {'__version__'}; c.Nonsense"
    )
    assert "has no attribute 'Nonsense'" in done.stderr, done.stderr


def test_help_loads_nothing_heavy() -> None:
    words = [(), *((name,) for name in ("run", "models", "inspect", "pml")), *own_commands()]
    done = python(HELP.format(words=words, heavy=HEAVY))
    assert (done.returncode, done.stdout.split()) == (0, []), done.stdout + done.stderr


def test_neither_does_a_list_of_what_is_installed_besides(tmp_path: Path) -> None:
    install(BENCHMARKS, tmp_path)
    install(SERVER, tmp_path)
    done = choreo("--help", before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    assert done.returncode == 0 and all(name in done.stdout for name in ("eval", "bench", "train", "serve"))
    assert done.stderr.split() == ["heavy:"]


@pytest.mark.parametrize("folder", [BENCHMARKS, SERVER], ids=lambda folder: folder.name)
def test_what_adds_commands_loads_nothing_heavy(folder: Path) -> None:
    modules = {place.partition(":")[0] for place in commands_in(folder).values()}
    heavy = (*HEAVY, "starlette", "uvicorn")
    done = python(f"import sys, {', '.join(modules)}; print(*[name for name in {heavy} if name in sys.modules])")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_completing_a_name_loads_nothing_heavy() -> None:
    done = choreo(_CHOREO_COMPLETE="complete_bash", COMP_WORDS="choreo run ", COMP_CWORD="2")
    assert {"debate", "tree-of-thoughts", "prisoners-dilemma"} <= set(done.stdout.split())
    assert done.stderr.split() == ["heavy:"]


@pytest.mark.slow
def test_options_are_completed_without_a_word_on_what_that_loads() -> None:
    done = choreo(_CHOREO_COMPLETE="complete_bash", COMP_WORDS="choreo run debate --me", COMP_CWORD="3")
    assert done.stdout.split() == ["--method"]
    assert LOADING not in done.stderr


def test_who_waits_is_told_so_before_torch_is_loaded() -> None:
    done = choreo("run", "debate", "--json", before=WITHOUT_TORCH)
    assert done.stderr.splitlines()[0] == LOADING
    assert done.returncode == 1 and done.stdout == ""


def test_help_says_nothing_but_help() -> None:
    done = choreo("run", "debate", "--help", before=WITHOUT_TORCH)
    assert done.returncode == 0 and done.stderr.split() == ["heavy:", "torch"], "the stand-in"


def test_a_terminal_shows_a_spinner_that_goes_away() -> None:
    """On a terminal of its own; torch cannot be loaded, so that all it shows came before."""
    ours, theirs = pty.openpty()
    code = WITHOUT_TORCH + "import sys; sys.argv = ['choreo', 'run', 'debate']; import choreo_agents.cli as c\n"
    code += "try: c.main()\nexcept BaseException: pass\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, check=False)
        os.close(theirs)
        shown = terminal.read(1 << 16).decode()
    assert done.returncode == 0 and LOADING in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased"


@pytest.mark.slow
def test_a_command_says_what_it_loads_and_its_json_is_alone_on_stdout() -> None:
    done = choreo("run", "debate", "--json", "--no-compare", "--rounds", "1")
    assert done.returncode == 0 and done.stdout.startswith("{")
    assert done.stderr.splitlines()[:2] == [LOADING, "loading embedded ..."]
    assert "torchao" not in done.stderr and "_pytree" not in done.stderr, "what others warn of, nobody can change here"


@pytest.mark.slow
def test_a_run_on_an_event_loop_imports_nothing_of_ours_nor_of_models() -> None:
    """All that is heavy is loaded with the engine and the graph: an import inside a node would block the loop."""
    done = python(RUN)
    assert done.returncode == 0, done.stderr
    assert not [name for name in done.stdout.split() if name.split(".")[0] in ("choreo_agents", "torch", *RARE)]


def test_rooms_can_be_had_without_an_import_of_their_own() -> None:
    done = python("import choreo_agents as c; print(c.models.load_model.__name__, c.errors.ChoreoError.__name__)")
    assert done.stdout.split() == ["load_model", "ChoreoError"], done.stderr
