"""Makes the front of engines elsewhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.elsewhere.core import RemoteExecution
from choreo_agents.engine.elsewhere.fleet import Fleet
from choreo_agents.engine.elsewhere.routing import Costs
from choreo_agents.engine.elsewhere.sending import FarEngine, Greeted, Greeting, own_version
from choreo_agents.engine.settings import Memory, Scheduling, Settings
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.weightless import load_weightless
from choreo_agents.tracing import EventSink, discard

COPIED_BYTES, PATIENCE_S = 1 << 28, 60.0
"""Unless a front is told otherwise: see `FrontOptions`."""
_OWN_BYTES = 1 << 20
"""Of a front's KV memory, in which there is never anything."""


class FrontOptions(TypedDict, total=False):
    """What a front may be told, by name."""

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
    """Receives the front's trace events."""


def front_of(engines: Sequence[FarEngine], model: str | Path | LoadedModel, options: FrontOptions) -> EngineCore:
    """See `engine_over`."""
    if unknown := options.keys() - FrontOptions.__annotations__.keys():
        raise TypeError(f"a front takes no {', '.join(map(repr, sorted(unknown)))}: see FrontOptions")
    if not engines or len({engine.name for engine in engines}) < len(engines):
        names = [engine.name for engine in engines]
        raise InvalidRequestError(f"a front needs engines, each with a name of its own, not {names!r}")
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
    greeting = Greeting(*whose, default)
    per_token, copied_bytes = model.adapter.geometry.bytes_per_token, options.get("copied_bytes", COPIED_BYTES)
    fleet = Fleet(engines, options.get("costs", Costs()), per_token, copied_bytes)
    execution = RemoteExecution(fleet, greeting, options.get("patience_s", PATIENCE_S))
    return EngineCore(model, settings, own, execution)


def _greeted(engine: FarEngine) -> Greeted:
    """What an engine says of itself; asked on a thread of its own, since an event loop may run on this one."""
    greeting = Greeting(secrets.token_hex(16), "", own_version())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(engine.greet(greeting))).result()
