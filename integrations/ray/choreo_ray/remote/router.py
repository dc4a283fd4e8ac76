"""Constructors of engines whose calls run on remote engines."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from choreo_agents import Engine, Memory, Scheduling
from choreo_agents.engine.delegation import EngineAdmin, EngineCore, Settings, load_weightless, read_loaded
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
_OWN_BYTES = 1 << 20
"""Bytes of a router's own KV memory, which is always empty."""


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
    return made(EngineAdmin(_core(engines, model, options)), salt, is_owners=True)


def _core(engines: Sequence[EngineClient], model: str | Path | LoadedModel, options: RouterOptions) -> EngineCore:
    if unknown := options.keys() - RouterOptions.__annotations__.keys():
        raise TypeError(f"a router takes no {', '.join(map(repr, sorted(unknown)))}: see RouterOptions")
    if not engines or len({engine.name for engine in engines}) < len(engines):
        names = [engine.name for engine in engines]
        raise InvalidRequestError(f"a router needs engines, each with a name of its own, not {names!r}")
    reply = _greet(engines[0])
    chosen = {"method": "choreo", "memory": Memory(kv_budget_bytes=_OWN_BYTES), "backend": "auto"}
    events = {"seed": options.get("seed", 0), "sink": options.get("sink", discard)}
    settings = Settings.model_validate(chosen | events | {"scheduling": Scheduling()})
    if not isinstance(model, LoadedModel):
        model = load_weightless(model, reply.served, chat=options.get("chat"))
    adapter = options.get("adapter")
    own = None if adapter is None else read_loaded(model.adapter, adapter)
    default = "" if own is None else own.key
    greeting = Hello(secrets.token_hex(16), model.adapter.fingerprint, own_version(), default)
    per_token, copied_bytes = model.adapter.geometry.bytes_per_token, options.get("copied_bytes", COPIED_BYTES)
    fleet = Fleet(engines, options.get("costs", Costs()), per_token, copied_bytes)
    execution = RemoteExecution(fleet, greeting, options.get("patience_s", PATIENCE_S))
    return EngineCore(model, settings, own, execution)


def _greet(engine: EngineClient) -> HelloReply:
    """Greet an engine, on a thread of its own, since an event loop may run on this one."""
    greeting = Hello(secrets.token_hex(16), "", own_version())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(engine.greet(greeting))).result()
