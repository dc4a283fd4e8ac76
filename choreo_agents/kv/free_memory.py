"""Free memory of a device, and the default KV budget that follows from it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from choreo_agents.kv.geometry import KVGeometry

POOL_SHARES = {"cpu": 0.5, "cuda": 0.9}
"""Share of the memory that is free once weights are loaded: a host serves other processes; a GPU, steps."""
_OTHER_SHARE = 0.5
_UNKNOWN = 2 << 30
"""Bytes assumed to be free on a device that does not report them."""
_GROUPS = "/proc/self/cgroup"
_CGROUPS = (
    ("/sys/fs/cgroup", "", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""For cgroups v2 and v1: mount point, controller, and the names of the files with the limit and the usage."""


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; on the host, including the page cache."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        return min([_available_bytes(), *_group_headrooms()])
    return _UNKNOWN


def _available_bytes() -> int:
    try:
        return int(psutil.virtual_memory().available)
    except OSError:  # a Linux without /proc
        return _UNKNOWN


def _group_headrooms() -> Iterator[int]:
    """Yield the bytes that each cgroup limit of this process leaves: of its container, its job, and their parents."""
    for root, controller, limit, use in _CGROUPS:
        for folder in _list_folders(Path(root), _find_group(controller)):
            try:
                most, used = int((folder / limit).read_text()), int((folder / use).read_text())
                lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such version, no such group, or no limit
                continue
            droppable = int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))
            yield max(0, most - used + droppable)


def _find_group(controller: str) -> str:
    """Return the path of this process's cgroup for a controller; `/` if it is not visible."""
    try:
        groups = [line.split(":", 2) for line in Path(_GROUPS).read_text().splitlines()]
    except OSError:
        return "/"
    group = next((path for _, controllers, path in groups if controller in controllers.split(",")), "/")
    return "/" if ".." in group else group


def _list_folders(root: Path, group: str) -> list[Path]:
    """List a cgroup's folder and its parents; inside a container, which sees only its own, that is the root."""
    own = root / group.strip("/")
    return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]


def pool_bytes(geometry: KVGeometry, device: torch.device, context: int) -> int:
    """Return the default KV budget, a share of the free memory, and log it.

    Args:
        geometry: Shape of the model's KV.
        device: Device of the pool, on which the weights are loaded already.
        context: Tokens that the model can attend to; logs a warning if the budget holds fewer.
    """
    free, share = free_bytes(device), POOL_SHARES.get(device.type, _OTHER_SHARE)
    budget = int(free * share)
    log = logging.getLogger(__name__)
    holds = budget // geometry.bytes_per_token
    share_text = f"{budget / 2**30:,.1f} GiB for KV ({share:.0%} of the {free / 2**30:,.1f} GiB free on {device})"
    if holds >= context:
        log.info("%s: %s tokens, or %s contexts of the model", share_text, f"{holds:,}", f"{holds // context:,}")
    else:
        log.warning(
            "%s: %s tokens, less than one context of the model (%s tokens, %s GiB). Longer views are refused. Free "
            "memory, or set Memory(kv_budget_bytes=...)",
            share_text,
            f"{holds:,}",
            f"{context:,}",
            f"{context * geometry.bytes_per_token / 2**30:,.1f}",
        )
    return budget
