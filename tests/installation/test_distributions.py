"""What people install: what its pages say, what an sdist holds, and that it runs where there is no source tree."""

from __future__ import annotations

import re
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.metadata.spec import DEFAULT_METADATA_VERSION, get_core_metadata_constructors
from hatchling.plugin.manager import PluginManager
from installation.package_check import (
    LARGEST_SDIST,
    ROOT,
    Distribution,
    distributions,
    main,
    wrong_in,
    wrong_in_page,
    wrong_in_requirements,
    wrong_in_sdist,
)

ALL = distributions()
WEIGHTS = "choreo_agents/models/embedded/weights/model.safetensors"


def metadata_of(folder: Path) -> Message:
    """As a wheel would have it."""
    written = get_core_metadata_constructors()[DEFAULT_METADATA_VERSION](ProjectMetadata(str(folder), PluginManager()))
    return Parser().parsestr(written)


@pytest.mark.parametrize("distribution", ALL, ids=lambda each: each.name)
def test_its_page_says_what_an_index_shows(distribution: Distribution) -> None:
    assert list(wrong_in(metadata_of(distribution.folder))) == []
    assert list(wrong_in_requirements(distribution)) == []


@pytest.mark.parametrize("distribution", ALL, ids=lambda each: each.name)
def test_an_sdist_holds_what_is_built_and_nothing_else(distribution: Distribution) -> None:
    held = {
        each.distribution_path: Path(each.path)
        for each in SdistBuilder(str(distribution.folder)).recurse_included_files()
    }
    assert list(wrong_in_sdist([f"sdist/{name}" for name in held], 0)) == []
    assert sum(file.stat().st_size for file in held.values()) < 2 * LARGEST_SDIST
    if distribution.folder == ROOT:
        assert WEIGHTS in held


def test_all_of_them_are_one_version_of_one_project() -> None:
    first, *others = (each.project for each in ALL)
    for other in others:
        assert {name: other[name] for name in ("version", "license", "authors", "requires-python")} == {
            name: first[name] for name in ("version", "license", "authors", "requires-python")
        }
        assert any(each.startswith("choreo-agents") for each in other["dependencies"])


def test_what_is_wrong_is_said() -> None:
    assert list(wrong_in_page("![a](docs/images/a.svg)")) and list(wrong_in_page(" "))
    assert list(wrong_in_page("![a](https://example.org/a.svg)")) == []
    assert len(list(wrong_in_sdist(["a/docs/b/adapter_model.safetensors"], LARGEST_SDIST + 1))) == 3
    assert len(list(wrong_in(Message()))) > 10


def test_the_page_on_installing_names_them_all() -> None:
    page = (ROOT / "docs/how-to/install.md").read_text()
    assert ALL[0].folder == ROOT and '"choreo-agents @ git+URL"' in page
    for each in ALL:
        assert re.search(rf"^pip install .*{each.name}\b", page, re.MULTILINE)
        if each.folder != ROOT:
            assert f'"{each.name} @ git+URL#subdirectory={each.folder.relative_to(ROOT)}"' in page
        assert {extra for extra in each.project["optional-dependencies"] if extra not in ("test", "nightly")} <= set(
            re.findall(rf"{each.name}\[(\w+)\]", page)
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_where_there_is_no_source_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(tmp_path)])
    assert (code, len(list(tmp_path.iterdir()))) == (0, 2 * len(ALL)), capsys.readouterr().out
