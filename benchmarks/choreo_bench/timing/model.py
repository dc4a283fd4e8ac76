"""The model that a benchmark times, by name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.terminal.loading import Loading
from choreo_agents.terminal.waiting import waiting


@contextmanager
def timed_model(
    console: Console, name: str, loading: Loading, longest: int, shorter: str
) -> Iterator[tuple[LoadedModel, Path]]:
    """A model, random weights drawn anew with a context that is long enough, and where a rival finds it.

    Args:
        console: Says that it is being loaded.
        name: `embedded`, one of `SHAPES`, or a checkpoint.
        loading: How; random weights are drawn in bf16 unless it says otherwise.
        longest: Tokens that are read at once.
        shorter: What to give instead if the context has no room for so many.

    Raises:
        InvalidRequestError: It has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        with waiting(console, f"loading [b]{escape(name)}[/b] ..."):
            path = WEIGHTS if name == "embedded" else Path(name)
            if name in SHAPES:
                path = Path(folder) / name
                drawn = loading.torch_dtype or torch.bfloat16
                save_random_llama(SHAPES[name], path, positions=max(1 << 15, 2 * longest), dtype=drawn)
            loaded = loading.model(path if name in SHAPES else name)
        if longest > loaded.adapter.max_positions:
            raise InvalidRequestError(
                f"{longest} tokens are to be read at once, the context of {name!r} has {loaded.adapter.max_positions}: "
                f"give {shorter}"
            )
        yield loaded, path
