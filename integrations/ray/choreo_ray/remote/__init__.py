"""Remote engines: one that knows all messages, and has others compute them. Needs no Ray.

    front            tenants, handles, leases, memos, lineage: all that an engine knows, and no KV
    remote engines   with KV, each given calls with the lineage of what it does not know yet

Read `sending`, what goes to and fro, then `errand`, what is done for a request, and `serving`, where it is run;
`routing` says where that is, and `parcels` brings KV from one of them to another. `execution` takes the place of what
runs steps in an engine. What is left to say is how engines are reached: `FarEngine`.
"""

from choreo_ray.remote.execution import RemoteExecution
from choreo_ray.remote.front import COPIED_BYTES, FrontOptions, engine_over
from choreo_ray.remote.parcels import Parcel, packed, unpacked
from choreo_ray.remote.routing import Costs
from choreo_ray.remote.sending import (
    Copying,
    FarEngine,
    Greeted,
    Greeting,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
)
from choreo_ray.remote.serving import EngineServer

__all__ = [
    "COPIED_BYTES",
    "Copying",
    "Costs",
    "EngineServer",
    "FarEngine",
    "FrontOptions",
    "Greeted",
    "Greeting",
    "Parcel",
    "Releasing",
    "RemoteExecution",
    "SentAdapter",
    "SentAnswer",
    "SentCall",
    "engine_over",
    "packed",
    "unpacked",
]
