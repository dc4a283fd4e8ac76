"""Constructors of engines whose calls run on remote engines."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from choreo_agents import Engine
from choreo_agents.engine.delegation import engine_over
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EventSink, discard
from choreo_ray.remote.execution import RemoteExecution
from choreo_ray.remote.fleet import Fleet
from choreo_ray.remote.protocol import EngineClient, Hello, HelloReply, own_version
from choreo_ray.remote.routing import Costs

Made = TypeVar("Made", bound=Engine)

COPIED_BYTES, PATIENCE_S = 1 << 28, 60.0
"""Defaults of `RouterOptions`."""


class RouterOptions(TypedDict, total=False):
    """Options of a router: keyword arguments of `RayEngine.load` and `remote_engine`, which may all be left out."""

    adapter: str | Path | None
    """Folder of the adapter that its engines have loaded for calls that name none; by default none."""
    chat: Mapping[str, Any] | None
    """Variables of the model's chat template, as for `Engine.load`; by default none."""
    copied_bytes: int
    """Most bytes of KV on their way to one engine at once, by default 256 MiB: what exceeds them is encoded again."""
    patience_s: float
    """Seconds that calls wait while no engine is up before they fail with `EngineLostError`; by default 60."""
    costs: Costs
    """Costs from which the engine that finishes a call first is estimated; by default guesses for a CPU."""
    seed: int
    """Seed from which the seeds of calls without one are derived; by default 0."""
    sink: EventSink
    """Receives the router's trace events; by default nothing does."""


def remote_engine(
    engines: Sequence[EngineClient],
    model: str | Path | LoadedModel,
    *,
    salt: str = "",
    made: type[Made] = Engine,  # type: ignore[assignment]
    **options: Unpack[RouterOptions],
) -> Made:
    """Make an engine whose calls run on remote engines: it knows all messages, and has no KV itself.

    Args:
        engines: Clients of the engines that compute, each with a name of its own (see `EngineWorker`).
        model: Model of the engines, of which only small files are read here; or one loaded before.
        salt: As for `Engine.load`.
        made: Class of the engine that is made.
        options: See `RouterOptions`.

    Raises:
        EngineMismatchError: They have other models, dtypes or versions. EngineLostError: One does not answer.
    """
    if unknown := options.keys() - RouterOptions.__annotations__.keys():
        raise TypeError(f"a router has no options {', '.join(map(repr, sorted(unknown)))}: see RouterOptions")
    if not engines or len({engine.name for engine in engines}) < len(engines):
        names = [engine.name for engine in engines]
        raise InvalidRequestError(f"a router needs engines with different names, not {names!r}")
    served = _greet(engines[0]).served
    if not isinstance(model, LoadedModel):
        model = served.load(model, chat=options.get("chat"))
    per_token, copied_bytes = model.adapter.geometry.bytes_per_token, options.get("copied_bytes", COPIED_BYTES)
    fleet = Fleet(engines, options.get("costs", Costs()), per_token, copied_bytes)
    return engine_over(
        made,
        RemoteExecution(fleet, options.get("patience_s", PATIENCE_S)),
        model,
        salt=salt,
        adapter=options.get("adapter"),
        seed=options.get("seed", 0),
        sink=options.get("sink", discard),
    )


def _greet(engine: EngineClient) -> HelloReply:
    """Greet an engine, on a thread of its own, since an event loop may run on this one."""
    greeting = Hello(secrets.token_hex(16), "", own_version())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(engine.greet(greeting))).result()
