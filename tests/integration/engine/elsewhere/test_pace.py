"""What an engine finds out about itself before it serves fronts."""

from __future__ import annotations

import asyncio

from choreo_agents import Engine
from choreo_agents.engine.elsewhere import Greeting
from choreo_agents.engine.elsewhere.sending import own_version
from choreo_agents.models import LoadedModel


def test_its_pace_is_measured_once_and_nothing_of_that_stays(tiny: LoadedModel) -> None:
    with Engine.load(tiny) as engine:
        assert engine.owner is not None
        server = engine.owner.server("a", measures=True)

        async def greeted() -> list[object]:
            found = [server.greet(Greeting(front, "", own_version())) for front in ("one", "two")]
            return [(await each).pace for each in found]

        first, second = asyncio.run(greeted())
        assert first is not None and first is second
        assert first.encode_tokens_per_s > 0 < first.step_s and first.row_s >= 0  # type: ignore[attr-defined]
        encoded = engine.owner.stats().tokens_encoded
        assert 0 < encoded < 2000 and engine.owner.stats().messages == 0
        assert list(engine.owner.tenants()) == [engine.lineage.name]
        engine.check()
        unmeasured = asyncio.run(engine.owner.server("b").greet(Greeting("three", "", own_version())))
        assert unmeasured.pace is None and engine.owner.stats().tokens_encoded == encoded
