"""Engines that run on others: a router knows all messages, and remote engines compute them. Needs no Ray.

    router            tenants, handles, leases, idempotency keys, lineage: all that an engine knows, and no KV
    remote engines    KV; each gets calls with the lineage of the messages that it lacks

Read `protocol`, the values that are sent, then `dispatcher`, which runs a request, and `worker`, which serves it.
`routing` chooses the engine, and `copies` brings KV from one engine to another. `execution` replaces
the step loop of an engine. A new transport implements `EngineClient`.
"""

from choreo_ray.remote.execution import RemoteExecution
from choreo_ray.remote.protocol import (
    Copying,
    EngineClient,
    Hello,
    HelloReply,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
)
from choreo_ray.remote.router import COPIED_BYTES, RouterOptions, remote_engine
from choreo_ray.remote.routing import Costs
from choreo_ray.remote.worker import EngineWorker

__all__ = [
    "COPIED_BYTES",
    "Copying",
    "Costs",
    "EngineClient",
    "EngineWorker",
    "Hello",
    "HelloReply",
    "Releasing",
    "RemoteExecution",
    "RouterOptions",
    "SentAdapter",
    "SentAnswer",
    "SentCall",
    "remote_engine",
]
