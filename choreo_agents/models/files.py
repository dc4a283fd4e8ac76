"""Files of tensors and of text: written whole or not at all."""

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
        with put(path) as partial:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(plain, partial, metadata={"format": "pt", **(metadata or {})})
            _sort_header(partial)
            partial.chmod(0o644)  # it is written for the owner's eyes only
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} cannot be written: {error}") from error


@contextlib.contextmanager
def put(path: Path) -> Iterator[Path]:
    """A file to write to, which then takes the place of that which was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _sort_header(path: Path) -> None:
    """Let equal tensors be equal files: metadata come in any order otherwise."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(content) <= size:
            file.seek(8)
            file.write(content.ljust(size))


def same_file(one: Path, other: Path) -> bool:
    """Whether two files say the same; those of tensors may do so in other bytes."""
    if not (one.is_file() and other.is_file()):
        return False
    if one.read_bytes() == other.read_bytes():
        return True
    try:
        (tensors, said), (others, also_said) = read_tensors(one), read_tensors(other)
    except OSError:
        return False
    return (
        said == also_said
        and tensors.keys() == others.keys()
        and all(each.dtype == others[name].dtype and each.equal(others[name]) for name, each in tensors.items())
    )


def write_text(path: Path, text: str) -> None:
    """Write a text file, or leave the file that was there as it is.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    with put(path) as partial:
        partial.write_text(text)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    Raises:
        OSError: There is no such file, or it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} is damaged: {error}") from error
