"""Makes engines whose calls are run by others."""

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
"""Unless a router is told otherwise: see `RouterOptions`."""
_OWN_BYTES = 1 << 20
"""Of a router's KV memory, in which there is never anything."""


class RouterOptions(TypedDict, total=False):
    """What a router may be told, by name."""

    adapter: str | Path | None
    """What its engines have loaded for calls that name no other."""
    chat: Mapping[str, Any] | None
    """Variables of the model's chat template, as for `Engine.load`."""
    copied_bytes: int
    """Of KV that may be on its way to one of the engines at once at most: what is beyond is encoded again."""
    patience_s: float
    """Seconds that calls wait while none of the engines is there."""
    costs: Costs
    """From which is reckoned which of them should have a call done first; by default guesses for a CPU."""
    seed: int
    """From which the seeds of calls without one are derived."""
    sink: EventSink
    """Receives the router's trace events."""


def remote_engine(
    engines: Sequence[EngineClient],
    model: str | Path | LoadedModel,
    *,
    salt: str = "",
    made: type[Made] = Engine,  # type: ignore[assignment]
    **options: Unpack[RouterOptions],
) -> Made:
    """An engine whose calls others run: it knows all messages, and has no KV itself.

    Args:
        engines: Compute, each with a name of its own: by whatever reaches them (see `EngineWorker`).
        model: Theirs, of which only small files are read here; or one loaded before.
        salt: As for `Engine.load`.
        made: What is made.
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
    greeted = _greeted(engines[0])
    memory = Memory(kv_budget_bytes=_OWN_BYTES)
    chosen = {"method": "choreo", "memory": memory, "scheduling": Scheduling(), "backend": "auto"}
    told = {"seed": options.get("seed", 0), "sink": options.get("sink", discard)}
    settings = Settings.model_validate(chosen | told)
    if not isinstance(model, LoadedModel):
        model = load_weightless(model, greeted.served, chat=options.get("chat"))
    adapter = options.get("adapter")
    own = None if adapter is None else read_loaded(model.adapter, adapter)
    default = "" if own is None else own.key
    whose = (secrets.token_hex(16), model.adapter.fingerprint, own_version())
    greeting = Hello(*whose, default)
    per_token, copied_bytes = model.adapter.geometry.bytes_per_token, options.get("copied_bytes", COPIED_BYTES)
    fleet = Fleet(engines, options.get("costs", Costs()), per_token, copied_bytes)
    execution = RemoteExecution(fleet, greeting, options.get("patience_s", PATIENCE_S))
    return EngineCore(model, settings, own, execution)


def _greeted(engine: EngineClient) -> HelloReply:
    """What an engine says of itself; asked on a thread of its own, since an event loop may run on this one."""
    greeting = Hello(secrets.token_hex(16), "", own_version())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(engine.greet(greeting))).result()
