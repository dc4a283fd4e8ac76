"""Ray's cluster: connects to it or starts it, and shuts it down with the last engine for which it was started."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address

import ray

from choreo_agents.errors import InvalidRequestError
from choreo_ray.errors import ClusterError

_CONNECT_S = 10.0
"""Seconds within which an address has to accept a connection: Ray itself would try for minutes."""
_LOCK = threading.Lock()
_STARTED: set[int] = set()
"""Users of the cluster that this process has started, by id; empty: there is none, or somebody else has started it."""
_BEFORE_END: dict[str, Callable[[], None]] = {}
"""Work to do before that cluster shuts down, by name."""


class Cluster:
    """The one Ray cluster of this process, shared by all that use it here.

    Args:
        address: Address of a cluster, `HOST:PORT` or `"auto"`; None: `RAY_ADDRESS`, else a cluster is started on this
            machine. A cluster that the program has reached with `ray.init` is used in any case.
        object_store_bytes: Size of the object store of a cluster that is started; None: Ray's own share of the memory.
        starts: Whether a cluster may be started.

    Raises:
        ClusterError: There is none at that address, or none can be started.
    """

    def __init__(self, address: str | None, object_store_bytes: int | None, *, starts: bool = True) -> None:
        if object_store_bytes is not None and object_store_bytes < 1:
            raise InvalidRequestError(f"object_store_bytes must be positive, not {object_store_bytes!r}")
        with _LOCK:
            if not ray.is_initialized():
                _STARTED.clear()  # somebody has shut it down
                _BEFORE_END.clear()
                address = address or os.environ.get("RAY_ADDRESS") or "local"
                if address == "local" and not starts:
                    raise ClusterError(
                        "there is no cluster to search: pass its address as HOST:PORT, or set RAY_ADDRESS. A cluster "
                        "that a program started for itself ended with it"
                    )
                self._connect(address, object_store_bytes)
            else:
                _require_ours(address)
                if _STARTED:
                    _STARTED.add(id(self))
        self.started = id(self) in _STARTED
        """Whether this process has started the cluster."""

    def before_end(self, name: str, work: Callable[[], None]) -> None:
        """Have work done before the cluster shuts down, once for each name, if this process has started it."""
        with _LOCK:
            if id(self) in _STARTED:
                _BEFORE_END[name] = work

    def close(self) -> None:
        """Stop using the cluster; its last user shuts it down if this process has started it."""
        with _LOCK:
            if id(self) in _STARTED:
                _STARTED.discard(id(self))
                if not _STARTED and ray.is_initialized():
                    try:
                        while _BEFORE_END:
                            _BEFORE_END.popitem()[1]()
                    finally:
                        ray.shutdown()

    def _connect(self, address: str, object_store_bytes: int | None) -> None:
        try:
            if address == "local":
                ray.init(address="local", include_dashboard=False, object_store_memory=object_store_bytes)
                _STARTED.add(id(self))
            else:
                _require_listener(address)
                ray.init(address=address)
        except ClusterError:
            raise
        except Exception as error:  # Ray raises what it likes
            if address == "local":
                raise ClusterError(
                    f"cannot start a Ray cluster on this machine: {error}. See Ray's log; RAY_TMPDIR shortens the path "
                    "of its temporary files"
                ) from error
            raise ClusterError(f"{_unreachable(address)}: {error}") from error


def resources() -> tuple[dict[str, float], dict[str, float]]:
    """Return the CPUs and GPUs of the cluster: all, and those that are free."""
    every, free, kinds = ray.cluster_resources(), ray.available_resources(), ("CPU", "GPU")
    return {kind: every.get(kind, 0.0) for kind in kinds}, {kind: free.get(kind, 0.0) for kind in kinds}


def object_store_bytes() -> float:
    """Return the bytes that the object stores of all its machines hold."""
    return float(ray.cluster_resources().get("object_store_memory", 0.0))


def _require_listener(address: str) -> None:
    """Raise `ClusterError` if nothing listens at an address."""
    if "://" in address:
        raise ClusterError(
            f"{address!r} is a Ray client address, which does not support streaming: run the program on a machine of "
            'the cluster, with address="auto", or pass the address of its head as HOST:PORT'
        )
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ClusterError(f'{address!r} is not an address: pass HOST:PORT, "auto", or nothing to start a cluster')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"{_unreachable(address)}: {error}") from error


def _require_ours(address: str | None) -> None:
    """Raise `ClusterError` if this process already uses another cluster: it can use only one."""
    own = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "auto", "local") and not _is_same(address, own):
        raise ClusterError(
            f"this process is connected to the cluster at {own!r}, and cannot use another: leave the address "
            f"{address!r} out, or call ray.shutdown() first"
        )


def _is_same(address: str, own: str) -> bool:
    (host, _, port), (own_host, _, own_port) = address.rpartition(":"), own.rpartition(":")
    return port == own_port and (host == own_host or not _ip_addresses(host).isdisjoint(_ip_addresses(own_host)))


def _ip_addresses(host: str) -> set[str]:
    """Return the IP addresses of a host; for this machine, all that Ray may call it by."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()
    if any(ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        addresses |= {"127.0.0.1", "::1", str(ray.util.get_node_ip_address())}
    return addresses


def _unreachable(address: str) -> str:
    return (
        f"no Ray cluster answers at {address!r}: start one (ray start --head --port=6379), pass another address as "
        "HOST:PORT, or none, and unset RAY_ADDRESS, to start one here"
    )
