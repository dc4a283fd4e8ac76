"""The kernels are compiled where there is a compiler, and where there is none the package goes without and says why."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

from choreo_agents import native
from choreo_agents.attention.backends import make_backend
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import load_model
from choreo_agents.native import library

HERE = Path(native.__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="require Linux on x86-64")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_hook", HERE / "build_hook.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class Build:
    """As hatch calls a hook of a project in a folder."""

    def __init__(self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        sources = tmp_path / "choreo_agents" / "native"
        sources.mkdir(parents=True)
        for file in HERE.iterdir():
            if file.suffix in (".c", ".h"):
                (sources / file.name).write_bytes(file.read_bytes())
        monkeypatch.setattr(hook, "HERE", sources)
        self.told: list[str] = []
        self.data: dict[str, object] = {"artifacts": []}
        self.library = sources / hook.LIBRARY
        self._hook = hook.NativeBuildHook.__new__(hook.NativeBuildHook)
        monkeypatch.setattr(hook.NativeBuildHook, "root", str(tmp_path))
        monkeypatch.setattr(hook.NativeBuildHook, "app", self)

    def display_warning(self, text: str) -> None:
        self.told.append(text)

    def run(self, version: str = "standard") -> None:
        self._hook.initialize(version, self.data)


@pytest.fixture
def build(hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    return Build(hook, monkeypatch, tmp_path)


@pytest.mark.slow
@linux
def test_a_wheel_has_every_variant_and_says_where_it_runs(build: Build, hook: ModuleType) -> None:
    if not any(hook.find_compilers()):
        pytest.skip("there is no C compiler")
    build.run()
    made = ctypes.CDLL(str(build.library))
    for name in hook.VARIANTS:
        for function in ("attend", "multiply", "decode", "normalise"):
            assert made[f"choreo_{function}_{name}"], f"{function} for {name} is missing"
    assert build.data["artifacts"] == ["choreo_agents/native/native.so"] and build.data["pure_python"] is False
    assert build.data["tag"] == "py3-none-linux_x86_64" and not build.told
    assert {file.suffix for file in build.library.parent.iterdir()} == {".c", ".h", ".so"}, "nothing else is left there"


@linux
def test_a_working_copy_is_compiled_for_its_processor_and_once(
    build: Build, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[list[str]] = []

    def compile_by_one_of(compilers: object, sources: object, library: Path, variants: list[str]) -> None:
        library.write_text(" ".join(f"choreo_layout_{name}" for name in variants))
        compiled.append(variants)

    monkeypatch.setattr(hook, "compile_by_one_of", compile_by_one_of)
    build.run("editable")
    build.run("editable")
    assert compiled == [hook.variants_here()], "what is up to date is not compiled again"
    os.utime(build.library, (0, 0))
    build.run("editable")
    build.library.write_text("choreo_layout_ of another processor")
    build.run("editable")
    assert compiled == [hook.variants_here()] * 3, "older than its sources, or without this processor's variant"
    build.run("standard")
    assert compiled[3:] == [[*hook.VARIANTS]]


def test_variants_are_those_of_the_processor(hook: ModuleType, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx fma avx2\nbugs\t\t: none\n")
    assert hook.variants_here(info) == ["avx2"]
    assert hook.variants_here(tmp_path / "missing") == ["avx2", "avx512", "avx512_bf16", "amx"]


@linux
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", "false"),
        ("no-such-compiler-here", "No such file"),
        ("sh -c 'echo out of memory >&2; exit 3'", "out of"),
    ],
)
def test_a_compiler_that_fails_costs_speed_alone(
    build: Build, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    build.library.write_text("of another time")
    build.run()
    [told] = build.told
    assert "not compiled" in told and reason in told
    assert build.data == {"artifacts": []} and not build.library.exists(), "what is stale is not used"


@linux
def test_without_a_compiler_or_if_asked_nothing_is_compiled(
    build: Build, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(hook.shutil, "which", lambda name: None)
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    build.run()
    monkeypatch.setenv("CHOREO_AGENTS_NATIVE", "0")
    build.run()
    assert ["no C compiler" in build.told[0], "CHOREO_AGENTS_NATIVE=0" in build.told[1]] == [True, True]
    assert build.data == {"artifacts": []}


def test_elsewhere_it_is_not_tried(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.sys, "platform", "darwin")
    assert "darwin" in (hook.why_not() or "")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "native.so")
    library.available_kernels.cache_clear()
    monkeypatch.setattr(library.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.mark.usefixtures("without_kernels")
def test_without_it_the_engine_serves_and_says_why(tmp_path: Path) -> None:
    try:
        loaded = load_model("embedded")
        adapter = loaded.adapter
        assert adapter.lean is None and "not compiled" in (loaded.fallback_reason or "")
        assert type(loaded.backend("auto")) is FoldedBackend
        with pytest.raises(InvalidRequestError, match=r'not compiled at installation.*use backend="auto"'):
            loaded.backend("native")
        (tmp_path / "native.so").write_text("no library")
        library.available_kernels.cache_clear()
        assert "cannot be loaded" in str(library.available_kernels())
        assert type(make_backend("auto", adapter.geometry.dtype, adapter.device)) is FoldedBackend
    finally:
        library.available_kernels.cache_clear()


def test_a_processor_without_vectors_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    library.available_kernels.cache_clear()
    try:
        assert "DEFAULT" in str(library.available_kernels())
    finally:
        library.available_kernels.cache_clear()


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    library.available_kernels.cache_clear()
    if isinstance(library.available_kernels(), str):
        pytest.skip("there are no kernels")
    try:
        monkeypatch.setattr(library, "LAYOUT", library.LAYOUT + 1)
        library.available_kernels.cache_clear()
        assert "another version" in str(library.available_kernels())
    finally:
        library.available_kernels.cache_clear()


@pytest.mark.slow
@linux
def test_another_compiler_is_tried_where_one_fails(build: Build, hook: ModuleType, tmp_path: Path) -> None:
    compilers = [each for each in hook.find_compilers() if each is not None]
    if not compilers:
        pytest.skip("there is no C compiler")
    made = tmp_path / "made.so"
    assert hook.compile_by_one_of([["false"], *compilers], build.library.parent, made) is None and made.exists()
    assert "false" in hook.compile_by_one_of([["false"]], build.library.parent, made) and not made.exists()
    missing = hook.compile_by_one_of(compilers, build.library.parent, tmp_path / "nowhere" / "made.so")
    assert "nowhere" in missing, "a folder that cannot be written costs speed alone"
