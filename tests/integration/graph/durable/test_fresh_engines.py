"""A run that is left after each of its supersteps goes on, on an engine that knows nothing, as if it never had been."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from support.broken_runs import Leg, Program, Stop, Visible, decoded_once, heard_on, said_by
from support.teams import save_team_model, teams
from support.visible_graphs import specs

from choreo_agents.models import LoadedModel, load_model


@pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")  # what is asked is what is said
def test_random_runs_go_on_on_a_fresh_engine_after_each_superstep(tiny: LoadedModel, tmp_path: Path) -> None:
    """The same messages, from the same contexts, each sampled once, also where all nodes run again from the start."""
    model, adapter = save_team_model(tmp_path)
    team_model = load_model(model)

    @seed(1)
    @given(specs().map(Visible) | teams())
    # The first is the simplest that there is; those behind it are random.
    @settings(
        max_examples=6, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    def goes_on(program: Program) -> None:
        here, tuned = (tiny, None) if isinstance(program, Visible) else (team_model, str(adapter))
        whole, left = heard_on(Leg(program, begins=True, adapter=tuned), here), Stop(after=tuple(program.graph().nodes))
        with TemporaryDirectory() as folder:
            kept: Any = {"states": f"{folder}/states", "adapter": tuned}
            legs = [heard_on(Leg(program, begins=True, stop=left, **kept), here)]
            while legs[-1].waiting:
                legs.append(heard_on(Leg(program, stop=left, **kept), here))
            again = heard_on(Leg(program, from_start=True, **kept), here)
        assert sum(bool(leg.decoded) for leg in legs) > 1, "agents speak on several engines"
        assert decoded_once(legs) == whole.decoded and not again.decoded
        for broken in (legs, [*legs, again]):
            assert said_by(broken) == [*whole.said] and broken[-1].words == whole.words

    goes_on()
