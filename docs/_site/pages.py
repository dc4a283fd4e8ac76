"""Makes pages that are no files of the documentation: reference, decisions, examples, and what stands at the root."""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import mkdocs_gen_files

from choreo_agents import Engine, Sampling
from choreo_agents.inspection import run_page
from choreo_agents.workflows import debate

sys.path.insert(0, str(Path(__file__).parent))

from check import public

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "choreo_agents": "What most programs import",
    "choreo_agents.workflows": "Ready-made graphs",
    "choreo_agents.errors": "Errors",
    "choreo_agents.tracing": "Events",
    "choreo_agents.chat": "Messages in, messages out: what chat models and servers stand on",
    "choreo_agents.inspection": "Pages of runs",
    "choreo_agents.testing": "Testing",
    "choreo_agents.testing.conformance": "A test suite for attention backends",
    "choreo_agents.graph.audit.report": "Audits: reports and findings",
    "choreo_agents.runtime.scheduler": "Scheduling policies: the contract and its data",
    "choreo_agents.attention.step": "Attention backends: the contract",
    "choreo_agents.attention.layout": "Attention backends: the layout of a step",
    "choreo_agents.training.trace": "Training: traces of runs",
    "choreo_agents.training.forward": "Training: the differentiable forward pass",
    "choreo_agents.training.settings": "Training: settings",
    "choreo_agents.training.tuned": "Training: adapters and mappers",
    "choreo_agents.training.tuning": "Training: the loop",
    "langchain_choreo": "A LangChain chat model: the distribution langchain-choreo",
    "choreo_server": "A server of OpenAI's protocol: the distribution choreo-server",
    "choreo_ray": "Engines on Ray: the distribution choreo-ray",
}
"""Modules whose public names have a page, and what each is for."""
COPIED = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "licence.md",
    "examples/README.md": "examples/index.md",
    "integrations/langchain/README.md": "integrations/langchain.md",
    "integrations/ray/README.md": "integrations/ray.md",
    "integrations/server/README.md": "integrations/server.md",
}
"""Files outside of the documentation, and where they stand in it."""


def public_names(package: str) -> Iterator[tuple[str, str]]:
    """Names that a package makes public, each with where it is defined."""
    module = importlib.import_module(package)
    for name in public(module):
        found = getattr(module, name)
        home = getattr(found, "__module__", None)
        is_ours = isinstance(home, str) and home.partition(".")[0] == package.partition(".")[0]
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, f"{home}.{found.__qualname__}" if is_ours else ""
        else:
            yield name, ""


def write_reference() -> None:
    """A page for each package, and one that leads to them."""
    index = [
        "# Reference\n",
        "Every public name, by the package that it is imported from. `choreo --help` tells the commands.\n",
    ]
    for package, what in PACKAGES.items():
        page = [f"# {package}\n", f"{what}.\n"]
        names = list(public_names(package))
        page.append(", ".join(f"[{name}](#{place or f'{package}.{name}'})" for name, place in names) + "\n")
        for name, place in names:
            # Fields of a dataclass are told where they are documented, also if it has them of others.
            inherits = str(is_dataclass(getattr(importlib.import_module(package), name))).lower()
            options = f"      heading_level: 2\n      inherited_members: {inherits}\n"
            page.append(f"::: {place}\n    options:\n{options}" if place else _told(package, name))
        index.append(f"- [`{package}`]({package}.md): {what[0].lower()}{what[1:]} ({len(names)} names)")
        with mkdocs_gen_files.open(f"reference/{package}.md", "w") as file:
            file.write("\n".join(page) + "\n")
    with mkdocs_gen_files.open("reference/index.md", "w") as file:
        file.write("\n".join(index) + "\n")


def _told(package: str, name: str) -> str:
    """What is neither a class nor a function of ours: LangGraph's own, handed on, or a type's other name."""
    found = getattr(importlib.import_module(package), name)
    home = getattr(found, "__module__", "") or ""
    is_langgraphs = home.startswith("langgraph")
    told = (
        f"LangGraph's `{home}.{getattr(found, '__qualname__', name)}`, handed on." if is_langgraphs else f"`{found!r}`"
    )
    return f"## {name} {{ #{package}.{name} }}\n\n{told}\n"


def write_copies() -> None:
    """What stands at the root, examples and decisions."""
    for source, page in COPIED.items():
        text = (ROOT / source).read_text()
        with mkdocs_gen_files.open(page, "w") as file:
            file.write(f"# Licence\n\n```text\n{text}\n```\n" if source == "LICENSE" else text)
    for example in sorted((ROOT / "examples").glob("*.py")):
        with mkdocs_gen_files.open(f"examples/{example.stem}.md", "w") as file:
            file.write(f"# {example.name}\n\n```python\n{example.read_text()}```\n")
    for example in sorted((ROOT / "examples/pml").rglob("*.pml")):
        name = example.relative_to(ROOT).with_suffix(".md").as_posix()
        with mkdocs_gen_files.open(name, "w") as file:
            file.write(f"# {example.name}\n\n```xml\n{example.read_text()}\n```\n")
    rows = ["# Decisions\n", "Why it is built as it is, in the order in which it was decided.\n"]
    for decision in sorted((ROOT / "docs/decisions").glob("[0-9]*.md")):
        title = decision.read_text().split("\n", 1)[0].removeprefix("# ")
        rows.append(f"- [{title}]({decision.name})")
    with mkdocs_gen_files.open("decisions/index.md", "w") as file:
        file.write("\n".join(rows) + "\n")


def write_run() -> None:
    """The page of a debate that is really held, for the documentation to show."""
    notes = {
        "Ann": "Notes: Ann has 3 red kites.",
        "Bob": "Notes: Bob has 5 blue boats.",
        "Cleo": "Notes: Cleo has 9 cups.",
    }
    with tempfile.TemporaryDirectory() as folder, Engine.load("embedded") as engine:
        path = Path(folder) / "debate.jsonl"
        app = debate(notes, rounds=2, sampling=Sampling(max_tokens=12)).compile(engine=engine)
        with engine.record(path):
            app.invoke({"messages": [("user", "What does Bob have?")]})
        with mkdocs_gen_files.open("how-to/a-run.html", "w") as file:
            file.write(run_page(path).html)


sys.path[:0] = [str(ROOT / "integrations" / name) for name in ("langchain", "server", "ray")]
write_reference()
write_copies()
write_run()
