"""Ray's cluster: reached or started, and ended by the last engine for which it was started."""

from __future__ import annotations

import os
import socket
import threading

import ray

from choreo_agents.errors import InvalidRequestError
from choreo_ray.errors import ClusterError

_CONNECT_S = 10.0
"""Seconds in which somebody has to listen at an address: Ray itself would try for minutes."""
_LOCK = threading.Lock()
_STARTED: set[int] = set()
"""Uses of the cluster that was started here; empty: there is none, or somebody else has started it."""


class Cluster:
    """The one that this process uses, for as long as somebody here does.

    Args:
        address: Of a cluster, `HOST:PORT` or `"auto"`; None: what `RAY_ADDRESS` says, else one is started on this
            machine. A program that has called `ray.init` has chosen already.
        object_store_bytes: Of one that is started here; None: Ray's own share of the memory.

    Raises:
        ClusterError: There is none at that address, or none can be started.
    """

    def __init__(self, address: str | None, object_store_bytes: int | None) -> None:
        if object_store_bytes is not None and object_store_bytes < 1:
            raise InvalidRequestError(f"object_store_bytes must be positive, not {object_store_bytes!r}")
        with _LOCK:
            if not ray.is_initialized():
                _STARTED.clear()  # somebody has ended it
                self._reach(address or os.environ.get("RAY_ADDRESS") or None, object_store_bytes)
            else:
                _require_ours(address)
                if _STARTED:
                    _STARTED.add(id(self))
        self.started = id(self) in _STARTED
        """Whether it is of this process."""

    def close(self) -> None:
        """It is used no longer."""
        with _LOCK:
            if id(self) in _STARTED:
                _STARTED.discard(id(self))
                if not _STARTED and ray.is_initialized():
                    ray.shutdown()

    def _reach(self, address: str | None, object_store_bytes: int | None) -> None:
        try:
            if address is None or address == "local":
                ray.init(address="local", include_dashboard=False, object_store_memory=object_store_bytes)
                _STARTED.add(id(self))
            else:
                _require_listener(address)
                ray.init(address=address)
        except ClusterError:
            raise
        except Exception as error:  # Ray raises what it likes
            if address is None or address == "local":
                raise ClusterError(
                    f"no cluster of Ray's can be started on this machine: {error}. Its own log says more; a long path "
                    "of its temporary files is shortened with RAY_TMPDIR"
                ) from error
            raise ClusterError(f"{_nobody(address)}: {error}") from error


def resources() -> tuple[dict[str, float], dict[str, float]]:
    """What the cluster has, and what of it is free: CPUs and GPUs."""
    every, free = ray.cluster_resources(), ray.available_resources()
    return {each: every.get(each, 0.0) for each in ("CPU", "GPU")}, {
        each: free.get(each, 0.0) for each in ("CPU", "GPU")
    }


def _require_listener(address: str) -> None:
    """Raise `ClusterError` if nobody is at an address."""
    if "://" in address:
        raise ClusterError(
            f"{address!r} is for Ray's client, through which nothing can be streamed: run the program on a machine of "
            'the cluster, with address="auto", or give the address of its head as HOST:PORT'
        )
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ClusterError(f'{address!r} is no address: give HOST:PORT, "auto", or none to start a cluster here')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"{_nobody(address)}: {error}") from error


def _require_ours(address: str | None) -> None:
    """Raise `ClusterError` if this process uses another cluster already: it can use one."""
    own = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "auto", "local") and address.rpartition(":")[2] != own.rpartition(":")[2]:
        raise ClusterError(
            f"this process uses the cluster at {own!r} already, and can use no other: leave the address {address!r} "
            "out, or call ray.shutdown() before"
        )


def _nobody(address: str) -> str:
    return (
        f"no cluster of Ray's answers at {address!r}: start one (ray start --head --port=6379), give another address, "
        "or none, and unset RAY_ADDRESS, to have one started here"
    )
