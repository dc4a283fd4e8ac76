"""Build hook that compiles the CPU kernels while a wheel is built, or the package is installed from its sources.

Run by hatch, where neither torch nor this package can be imported. Without a compiler, or for another processor,
nothing is compiled: attention then uses torch's operators, and the engine logs it when it loads a model.

    CC=...                          the compiler; default: the first of cc, gcc, clang and that of the package `ziglang`
    CHOREO_AGENTS_NATIVE=0          compile nothing
    CHOREO_AGENTS_NATIVE=manylinux  use ziglang, against the C library of manylinux 2.17: for a portable wheel
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
LIBRARY = "native.so"
SOURCES = ("segments.c", "linear.c", "decoder.c", "draw.c")
_WIDE = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
VARIANTS = {
    "avx2": (8, ("-mavx2", "-mfma")),
    "avx512": (16, _WIDE),
    "avx512_bf16": (16, (*_WIDE, "-mavx512bf16")),
    "amx": (16, (*_WIDE, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DHAS_TILES")),
}
"""Floats in a vector, and compiler flags, by the suffix of a variant's functions."""
_NEEDED = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512vl", "avx512bw", "avx512dq"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_bf16"},
}
"""CPU flags, as Linux reports them, that a variant needs."""
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
MANYLINUX = "x86_64-linux-gnu.2.17"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch hook that puts the compiled library into the wheel, and its platform into the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Implement hatchling's `BuildHookInterface`."""
        setting = os.environ.get("CHOREO_AGENTS_NATIVE", "1")
        reason = why_not() if setting != "0" else "CHOREO_AGENTS_NATIVE=0"
        library = HERE / LIBRARY
        if reason is None:
            compilers = [ziglang(MANYLINUX)] if setting == "manylinux" else find_compilers()
            # An editable install stays on its machine: variants that it cannot run would triple the build time.
            variants = variants_here() if version == "editable" else [*VARIANTS]
            if version != "editable" or not is_up_to_date(library, variants):
                reason = compile_by_one_of([cc for cc in compilers if cc is not None], HERE, library, variants)
        if reason is not None:
            self.app.display_warning(f"the CPU kernels are not compiled, which affects speed only: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{'manylinux_2_17_x86_64' if setting == 'manylinux' else 'linux_x86_64'}"
        build_data["artifacts"].append(library.relative_to(Path(self.root).resolve()).as_posix())


def why_not() -> str | None:
    """Return why the kernels cannot be compiled for this machine; None if they can."""
    machine = platform.machine().lower()
    if sys.platform != "linux" or machine not in ("x86_64", "amd64"):
        return f"they require Linux on x86-64, but this is {sys.platform} on {machine}"
    return None


def variants_here(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """List the variants that this processor can run; all of them if its flags are unknown."""
    try:
        flags = set(cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return [*VARIANTS]
    return [name for name, needed in _NEEDED.items() if needed <= flags]


def is_up_to_date(library: Path, variants: Iterable[str]) -> bool:
    """Return whether a library has these variants, and is newer than its sources."""
    sources = [*HERE.glob("*.[ch]"), Path(__file__)]
    if not library.exists() or library.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        return False
    compiled = library.read_bytes()
    return all(f"choreo_layout_{name}".encode() in compiled for name in variants)


def find_compilers(environment: Mapping[str, str] = os.environ) -> list[Sequence[str] | None]:
    """Return commands of C compilers: that of `CC`, or all that are installed."""
    if environment.get("CC"):
        return [shlex.split(environment["CC"])]
    return [*([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), ziglang()]


def ziglang(target: str | None = None) -> Sequence[str] | None:
    """Return the command of the compiler in the Python package `ziglang`, if it is installed."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    return [sys.executable, "-m", "ziglang", "cc", *(() if target is None else ("-target", target))]


def compile_by_one_of(
    compilers: Sequence[Sequence[str]], sources: Path, library: Path, variants: Iterable[str] = VARIANTS
) -> str | None:
    """Compile by the first compiler that works; if none does, remove an older library and return the reasons."""
    reasons = [] if compilers else ["there is no C compiler"]
    for compiler in compilers:
        try:
            failure = compile_library(compiler, sources, library, variants)
        except OSError as error:
            failure = str(error)
        if failure is None:
            return None
        reasons.append(failure)
    with suppress(OSError):
        library.unlink(missing_ok=True)
    return "\n".join(reasons)


def compile_library(
    compiler: Sequence[str], sources: Path, library: Path, variants: Iterable[str] = VARIANTS
) -> str | None:
    """Compile the variants, on all cores, and link them; return the compiler's output if it fails.

    Raises:
        OSError: The compiler cannot be started, or a file cannot be written.
    """
    with (
        TemporaryDirectory(dir=library.parent, prefix=".native-") as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects: list[str] = []
        commands: list[list[str]] = []
        for name in variants:
            width, flags = VARIANTS[name]
            defines = (f"-DWIDTH={width}", f"-DNAMED(name)=choreo_##name##_{name}")
            for source in SOURCES:
                objects.append(str(Path(folder) / f"{name}-{source}.o"))
                commands.append([*compiler, *FLAGS, *flags, *defines, "-c", str(sources / source), "-o", objects[-1]])
        failure = next((error for error in pool.map(_run, commands) if error is not None), None)
        if failure is not None:
            return failure
        linked = Path(folder) / LIBRARY
        failure = _run([*compiler, "-shared", "-s", "-o", str(linked), *objects, "-lm"])
        if failure is None:
            linked.replace(library)  # processes that have the old one loaded keep it
        return failure


def _run(command: Sequence[str]) -> str | None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else f"{shlex.join(command)} failed:\n{result.stderr.strip()}"
