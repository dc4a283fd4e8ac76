"""Remote engines: one that knows all messages, and has others compute them. Needs no Ray.

    router            tenants, handles, leases, idempotency keys, lineage: all that an engine knows, and no KV
    remote engines   with KV, each given calls with the lineage of what it does not know yet

Read `sending`, what goes to and fro, then `errand`, what is done for a request, and `serving`, where it is run;
`routing` says where that is, and `parcels` brings KV from one of them to another. `execution` takes the place of what
runs steps in an engine. What is left to say is how engines are reached: `EngineClient`.
"""

from choreo_ray.remote.execution import RemoteExecution
from choreo_ray.remote.kv_packets import KVPacket, export_kv, import_kv
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
    "KVPacket",
    "Releasing",
    "RemoteExecution",
    "RouterOptions",
    "SentAdapter",
    "SentAnswer",
    "SentCall",
    "export_kv",
    "import_kv",
    "remote_engine",
]
