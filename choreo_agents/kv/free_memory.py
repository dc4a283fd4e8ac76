"""How much memory a device has free, and how much of it keys and values get."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from choreo_agents.kv.geometry import KVGeometry

POOL_SHARES = {"cpu": 0.5, "cuda": 0.9}
"""Of the memory that is free once the weights are there. A CPU's is everybody's; of a GPU's, steps need the rest."""
_OTHER_SHARE = 0.5
_UNKNOWN = 2 << 30
"""Bytes that a device is taken to have free if it does not say."""
_GROUPS = "/proc/self/cgroup"
_CGROUPS = (
    ("/sys/fs/cgroup", "", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Of both versions: where groups are, which of a process's groups counts, and the files of a limit and of its use."""


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be had on a device: on the host also those of files that are only cached."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        return min([_available(), *_left_in_groups()])
    return _UNKNOWN


def _available() -> int:
    try:
        return int(psutil.virtual_memory().available)
    except OSError:  # a Linux without /proc
        return _UNKNOWN


def _left_in_groups() -> Iterator[int]:
    """What the limits leave that a process is under: those of its container, of its job, and of all around it."""
    for root, controller, limit, use in _CGROUPS:
        for folder in _folders(Path(root), _group(controller)):
            try:
                most, used = int((folder / limit).read_text()), int((folder / use).read_text())
                lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such version, no such group, or no limit
                continue
            droppable = int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))
            yield max(0, most - used + droppable)


def _group(controller: str) -> str:
    """This process's group for a controller, from the root on, as far as it can see."""
    try:
        groups = [line.split(":", 2) for line in Path(_GROUPS).read_text().splitlines()]
    except OSError:
        return "/"
    found = next((path for _, controllers, path in groups if controller in controllers.split(",")), "/")
    return "/" if ".." in found else found


def _folders(root: Path, group: str) -> list[Path]:
    """A group's folder, and those around it; inside a container, which sees no others, its own is the root."""
    own = root / group.strip("/")
    return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]


def pool_bytes(geometry: KVGeometry, device: torch.device, context: int) -> int:
    """A KV budget for whoever names none: a share of what is free, which the log names.

    Args:
        geometry: The model's KV shape.
        device: Where the pool will live, and the weights do already.
        context: Tokens that the model can attend to; a warning says so if the budget holds fewer.
    """
    free, share = free_bytes(device), POOL_SHARES.get(device.type, _OTHER_SHARE)
    budget = int(free * share)
    log = logging.getLogger(__name__)
    holds = budget // geometry.bytes_per_token
    what = f"{share:.0%} of the {free / 2**30:,.1f} GiB that {device} has free: {budget / 2**30:,.1f} GiB for KV"
    if holds >= context:
        log.info("%s, %s tokens, or %s contexts of the model", what, f"{holds:,}", f"{holds // context:,}")
    else:
        log.warning(
            "%s hold %s tokens, and not the %s of one context of the model, which take %s GiB: longer views are "
            "refused. Free memory, or give Memory(kv_budget_bytes=...)",
            what,
            f"{holds:,}",
            f"{context:,}",
            f"{context * geometry.bytes_per_token / 2**30:,.1f}",
        )
    return budget
