"""Ray's cluster: reached or started, and ended by the last engine for which it was started."""

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
"""Seconds in which somebody has to listen at an address: Ray itself would try for minutes."""
_LOCK = threading.Lock()
_STARTED: set[int] = set()
"""Uses of the cluster that was started here; empty: there is none, or somebody else has started it."""
_BEFORE_END: dict[str, Callable[[], None]] = {}
"""What is done before it ends."""


class Cluster:
    """The one that this process uses, for as long as somebody here does.

    Args:
        address: Of a cluster, `HOST:PORT` or `"auto"`; None: what `RAY_ADDRESS` says, else one is started on this
            machine. A program that has called `ray.init` has chosen already.
        object_store_bytes: Of one that is started here; None: Ray's own share of the memory.
        starts: Whether one may be started.

    Raises:
        ClusterError: There is none at that address, or none can be started.
    """

    def __init__(self, address: str | None, object_store_bytes: int | None, *, starts: bool = True) -> None:
        if object_store_bytes is not None and object_store_bytes < 1:
            raise InvalidRequestError(f"object_store_bytes must be positive, not {object_store_bytes!r}")
        with _LOCK:
            if not ray.is_initialized():
                _STARTED.clear()  # somebody has ended it
                _BEFORE_END.clear()
                address = address or os.environ.get("RAY_ADDRESS") or "local"
                if address == "local" and not starts:
                    raise ClusterError(
                        "there is no cluster to look in: give its address as HOST:PORT, or set RAY_ADDRESS. What was "
                        "on one that a program has started for itself has ended with it"
                    )
                self._reach(address, object_store_bytes)
            else:
                _require_ours(address)
                if _STARTED:
                    _STARTED.add(id(self))
        self.started = id(self) in _STARTED
        """Whether it is of this process."""

    def before_end(self, what: str, work: Callable[[], None]) -> None:
        """Have something done before the cluster ends, once for all who say the same, if it is of this process."""
        with _LOCK:
            if id(self) in _STARTED:
                _BEFORE_END[what] = work

    def close(self) -> None:
        """It is used no longer."""
        with _LOCK:
            if id(self) in _STARTED:
                _STARTED.discard(id(self))
                if not _STARTED and ray.is_initialized():
                    try:
                        while _BEFORE_END:
                            _BEFORE_END.popitem()[1]()
                    finally:
                        ray.shutdown()

    def _reach(self, address: str, object_store_bytes: int | None) -> None:
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


def object_store_bytes() -> float:
    """That the object stores of all its machines have room for."""
    return float(ray.cluster_resources().get("object_store_memory", 0.0))


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
    if address not in (None, "auto", "local") and not _same(address, own):
        raise ClusterError(
            f"this process uses the cluster at {own!r} already, and can use no other: leave the address {address!r} "
            "out, or call ray.shutdown() before"
        )


def _same(one: str, other: str) -> bool:
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and (host == other_host or not _numbers(host).isdisjoint(_numbers(other_host)))


def _numbers(host: str) -> set[str]:
    """The addresses that a host's name means: of this machine, all that Ray may call it by."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()
    if any(ip_address(each.partition("%")[0]).is_loopback for each in found):
        found |= {"127.0.0.1", "::1", str(ray.util.get_node_ip_address())}
    return found


def _nobody(address: str) -> str:
    return (
        f"no cluster of Ray's answers at {address!r}: start one (ray start --head --port=6379), give another as "
        "HOST:PORT, or none, and unset RAY_ADDRESS, to have one started here"
    )
