"""Builds what people install, installs it where there is no source tree, and runs it there: `make package-check`.

Nothing is downloaded: heavy dependencies are those of the environment that runs this. `--with-dependencies` takes them
from pip's index instead.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LARGEST_SDIST = 4_500_000
"""Bytes, of which the embedded model takes 3.5 million."""
AUTHORS = "The choreo-agents authors"
GUARD = """
import os, sys
def refuse(event, arguments, folders=tuple({folders!r})):
    if event == "open" and isinstance(arguments[0], str) and os.path.abspath(arguments[0]).startswith(folders):
        raise RuntimeError(f"{{arguments[0]}} is of the source tree")
sys.addaudithook(refuse)
"""
"""Whoever reads a file of these folders fails."""
CHAT = """
from langchain_choreo import ChatChoreo
said = ChatChoreo(model="embedded", max_tokens=16).invoke("What is 2 plus 3?")
assert said.text and said.usage_metadata["input_tokens"] > 0, said
print(said.text)
"""
SERVE = """
import json, socket, subprocess, sys, time, urllib.request
from pathlib import Path
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [str(Path(sys.executable).with_name("choreo")), "serve", "embedded", "--port", str(port)]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            break
        except OSError:
            assert server.poll() is None, server.stderr.read()
            time.sleep(0.1)
    asked = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 16}
    where = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(where, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    said = json.load(urllib.request.urlopen(request, timeout=60))
    assert said["choices"][0]["message"]["content"] and said["usage"]["prompt_tokens"] > 0, said
finally:
    server.terminate()
_, told = server.communicate(timeout=60)
assert "stopped" in told and server.returncode == 0, told
print(said["choices"][0]["message"]["content"])
"""
RAY = """
import os, tempfile, uuid
with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
    os.environ |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    from choreo_agents import Memory, Sampling
    from choreo_ray import RayEngine
    memory = Memory(kv_budget_bytes=1 << 22)
    with RayEngine.load("embedded", engines=1, memory=memory, object_store_bytes=100 << 20) as engine:
        said = engine.text(engine.decode("Bob:", sampling=Sampling(max_tokens=4)))
assert said.startswith("Bob:") and len(said) > 4, said
print(said)
"""


class Wrong(Exception):  # noqa: N818 - no error of the product's
    """What is built is not what it should be."""


@dataclass(frozen=True)
class Distribution:
    """One that people install by name.

    Args:
        folder: Has its `pyproject.toml`.
    """

    folder: Path

    @property
    def project(self) -> dict[str, Any]:
        found: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return found

    @property
    def name(self) -> str:
        return str(self.project["name"])

    @property
    def source(self) -> list[Path]:
        """Its packages."""
        return [each.parent for each in self.folder.glob("*/__init__.py") if each.parent.name != "tests"]


def distributions() -> list[Distribution]:
    """Find the package itself, its benchmarks, and whatever has a `pyproject.toml` in `integrations/`."""
    return [
        Distribution(ROOT),
        Distribution(ROOT / "benchmarks"),
        *map(Distribution, sorted(p.parent for p in ROOT.glob("integrations/*/pyproject.toml"))),
    ]


def wrong_in(metadata: Message) -> Iterator[str]:
    """What an index would show people, and is missing or wrong."""
    expected = {"Version": distributions()[0].project["version"], "License-Expression": "Apache-2.0", "Author": AUTHORS}
    expected |= {"License-File": "LICENSE", "Description-Content-Type": "text/markdown"}
    for field, value in expected.items():
        if metadata[field] != value:
            yield f"{field} is {metadata[field]!r}, not {value!r}"
    for field in ("Summary", "Requires-Python", "Keywords", "Project-URL", "Requires-Dist"):
        if not metadata[field]:
            yield f"there is no {field}"
    for line in metadata.get_all("Project-URL", []):
        if not re.fullmatch(r"[A-Z][\w ]{1,31}, https://\S+", line):
            yield f"{line!r} is not an address"
    classifiers = metadata.get_all("Classifier", [])
    for start in ("Development Status", "Intended Audience", "Programming Language", "Topic", "Typing :: Typed"):
        if not any(each.startswith(start) for each in classifiers):
            yield f"no classifier says {start}"
    yield from wrong_in_page(str(metadata.get_payload()))


def wrong_in_page(page: str) -> Iterator[str]:
    """Images that an index could not show."""
    if not page.strip():
        yield "there is no long description"
    images = [*re.findall(r"!\[[^\]]*\]\(([^)\s]+)", page), *re.findall(r"<img[^>]*src=\"([^\"]+)", page)]
    for image in images:
        if not image.startswith("https://"):
            yield f"the image {image} has a relative address: an index has no such file"


def wrong_in_sdist(names: list[str], size: int) -> Iterator[str]:
    """What nobody needs who builds from it."""
    for name in names:
        if name.endswith(".safetensors") and not name.endswith(
            "choreo_agents/models/embedded/weights/model.safetensors"
        ):
            yield f"the sdist holds {name}, an adapter"
        if "/docs/" in name or "/tests/" in name or "__pycache__" in name:
            yield f"the sdist holds {name}, of which nothing is built"
    if size > LARGEST_SDIST:
        yield f"the sdist has {size:,} bytes, more than {LARGEST_SDIST:,}"


def build(distribution: Distribution, out: Path) -> Path:
    """The sdist in a folder, and beside it the wheel that is built of it.

    Raises:
        Wrong: One of them is not what it should be.
    """
    with TemporaryDirectory() as temporary:
        work = Path(temporary)
        hatch(distribution.folder, "sdist", work / "sdist")
        [sdist] = (work / "sdist").iterdir()
        with tarfile.open(sdist) as archive:
            wrong = list(wrong_in_sdist(archive.getnames(), sdist.stat().st_size))
            archive.extractall(work / "unpacked", filter="data")
        [unpacked] = (work / "unpacked").iterdir()
        hatch(unpacked, "wheel", work / "wheel")
        [wheel] = (work / "wheel").iterdir()
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
            [written] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            wrong += wrong_in(Parser().parsestr(archive.read(written).decode()))
        files = {
            str(file.relative_to(distribution.folder))
            for package in distribution.source
            for file in package.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        wrong += [f"the wheel lacks {name}" for name in sorted(files - names)]
        wrong += [f"the wheel has {name}, which is nowhere" for name in sorted(names - files)]
        if wrong:
            raise Wrong("\n".join(f"{distribution.name}: {each}" for each in wrong))
        shutil.copy(sdist, out)
        return Path(shutil.copy(wheel, out))


def hatch(folder: Path, target: str, out: Path) -> None:
    """Build one thing, as an index's people would."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


class CleanEnvironment:
    """A fresh virtual environment in which some wheels are installed, and in which the source tree cannot be read.

    Args:
        folder: Where; there is nothing yet.
        wheels: Of all distributions.
        dependencies: Whether pip fetches what they need; else the outer environment has it.
    """

    def __init__(self, folder: Path, wheels: list[Path], *, dependencies: bool = False) -> None:
        self.folder, self._python = folder, folder / "bin" / "python"
        venv.create(folder)
        pip = [sys.executable, "-m", "pip", "--python", str(self._python), "install", "--quiet"]
        alone = [] if dependencies else ["--no-deps", "--no-index"]
        self._run([*pip, *alone, "--disable-pip-version-check", *map(str, wheels)])
        [packages] = folder.glob("lib/python3*/site-packages")
        # A folder on the path is searched last, and its own .pth files, such as of an editable install, are not read.
        outer = [] if dependencies else [each for each in sys.path if Path(each).name == "site-packages"]
        (packages / "outer.pth").write_text("\n".join([*outer, "import refuse_the_source_tree"]))
        folders = [f"{package}{os.sep}" for each in distributions() for package in each.source]
        (packages / "refuse_the_source_tree.py").write_text(GUARD.format(folders=folders))

    def choreo(self, *arguments: str) -> str:
        """What the command prints."""
        return self._run([str(self.folder / "bin" / "choreo"), *arguments])

    def python(self, code: str) -> str:
        """What the code prints."""
        return self._run([str(self._python), "-c", code])

    def _run(self, command: list[str]) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(f"{' '.join(command)} has failed:\n{done.stdout}{done.stderr}")
        return done.stdout


def wrong_in_requirements(distribution: Distribution) -> Iterator[str]:
    """What it says it needs, and this environment has not, or has otherwise."""
    own = {each.name for each in distributions()}
    for requirement in map(Requirement, distribution.project["dependencies"]):
        if requirement.name in own:
            continue
        try:
            if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                yield f"{distribution.name} needs {requirement}, here is {version(requirement.name)}"
        except PackageNotFoundError:
            yield f"{distribution.name} needs {requirement}"


def main(arguments: list[str]) -> int:
    """Build into a folder, `dist` by default, and say what was checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--with-dependencies", action="store_true")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    found = distributions()
    try:
        if wrong := [each for one in found for each in wrong_in_requirements(one)]:
            raise Wrong("\n".join(wrong))
        wheels = [build(each, asked.out) for each in found]
        with TemporaryDirectory() as temporary:
            clean = CleanEnvironment(Path(temporary) / "venv", wheels, dependencies=asked.with_dependencies)
            check(clean, {each.name for each in found})
    except Wrong as wrong:
        say(str(wrong))
        return 1
    for file in sorted(asked.out.iterdir()):
        say(f"{file.stat().st_size:>12,} bytes  {file.name}")
    say(f"{', '.join(each.name for each in found)}: built, installed and run without the source tree")
    return 0


def check(clean: CleanEnvironment, names: set[str]) -> None:
    """Run what people run first.

    Raises:
        Wrong: It does not run, or reads the source tree.
    """
    for package in (package for each in distributions() for package in each.source):
        planted = f"import sys; sys.path.insert(0, {str(package.parent)!r}); import {package.name}"
        try:
            clean.python(planted)
        except Wrong as refused:
            if "is of the source tree" not in str(refused):
                raise
        else:
            raise Wrong(f"{package} could be imported in the clean environment: nothing is proved there")
        clean.python(f"import {package.name}")
    debate = clean.choreo("run", "debate", "--reports", "4", "--rounds", "1")
    if "tokens encoded" not in debate:
        raise Wrong(f"choreo run debate shows no counts:\n{debate}")
    clean.choreo("pml", "memory", "--help")  # an entry point's, in one of our groups
    if "langchain-choreo" in names:
        clean.python(CHAT)
    if "choreo-server" in names:
        clean.python(SERVE)
    if "choreo-ray" in names:
        clean.python(RAY)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
