"""Reads and writes safetensors and text files; writes are atomic."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, or leave the file that was there as it is.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    try:
        with replace_file(path) as partial:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(plain, partial, metadata={"format": "pt", **(metadata or {})})
            _sort_header(partial)
            partial.chmod(0o644)  # safetensors makes it readable for its owner only
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} cannot be written: {error}") from error


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it replaces the file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _sort_header(path: Path) -> None:
    """Sort the metadata of the header in place, so that equal tensors give equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(content) <= size:
            file.seek(8)
            file.write(content.ljust(size))


def write_text(path: Path, text: str) -> None:
    """Write a text file, or leave the file that was there as it is.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    with replace_file(path) as partial:
        partial.write_text(text)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        OSError: There is no such file, or it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} is damaged: {error}") from error
