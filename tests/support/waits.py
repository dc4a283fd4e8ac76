"""What a GPU would have to be waited for: found on a CPU, by what is asked of tensors that would be on the GPU.

Those are the model's and the pool's, what was sent to them, and all that is computed of any of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READ = frozenset(("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"))
"""Methods of a tensor that give its numbers to the host."""
_MADE = frozenset(("tensor", "as_tensor", "asarray"))
"""Functions that copy what the host has from memory that is not pinned, if they are told a device."""
_SIZED = (
    "_local_scalar_dense",
    "nonzero",
    "bincount",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "is_nonzero",
    "equal",
    "repeat_interleave.Tensor",
)
"""Operators whose result, or its size, the host has to know."""
_MARK = "_choreo_on_device"


def mark(tensors: Iterable[Tensor]) -> None:
    """Let tensors count as a GPU's."""
    for tensor in tensors:
        setattr(tensor, _MARK, True)


def _marked(*given: Any) -> bool:
    return any(isinstance(leaf, Tensor) and hasattr(leaf, _MARK) for leaf in tree_leaves(given))


class Waits:
    """Those that were found, by name."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._seeing = True

    def note(self, name: str) -> None:
        if self._seeing:
            self.found.append(name)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is done inside a GPU does by itself."""
        self._seeing = False
        try:
            yield
        finally:
            self._seeing = True


class _Calls(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, named = getattr(function, "__name__", ""), kwargs.get("device")
        if name in _READ and _marked(args):
            self._waits.note(name)
        if name in _MADE and named is not None:
            self._waits.note(name)
        moved = name == "to" and any(isinstance(each, torch.device | str) for each in (*args[1:], named))
        if moved and not _marked(args[0]) and not kwargs.get("non_blocking"):
            self._waits.note(name)
        made = function(*args, **kwargs)
        if named is not None or moved:
            mark(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        return made


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if _marked(args, kwargs):
            name = str(function).removeprefix("aten.")
            if name.startswith(_SIZED) or (name == "index.Tensor" and _picks(args[1])):
                self._waits.note(name)
            mark(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        return made


def _picks(indices: Any) -> bool:
    """Whether some of them are bools, of which as many rows come as are true."""
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """The waits that what is done inside would cost on a GPU."""
    waits = Waits()
    with _Calls(waits), _Operators(waits):
        yield waits
