"""A run that is broken off anywhere goes on in a process that has never seen it, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.broken_runs import Heard, Leg, Program, Said, Stop, Visible, decoded_once, heard_on, said_by
from support.fresh_processes import FreshProcesses
from support.teams import Team, save_team_model, teams
from support.visible_graphs import specs

from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling.noise import gumbel, noise_key

pytestmark = [
    # Declared-private pairs are broken on purpose here: what is asked is what is said.
    pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning"),
    pytest.mark.timeout(1800),
]


def drawn(examples: int) -> settings:
    """So many, of which none is made smaller: each takes seconds."""
    checks = [*HealthCheck]
    return settings(max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=checks)


PROGRAMS = specs().map(Visible) | teams()
PLAIN = specs().map(Visible) | teams(plain=True)


@dataclass
class Served:
    """A model here, and in processes that have never seen what they are to go on with."""

    here: LoadedModel
    elsewhere: FreshProcesses
    adapter: str | None = None


served: dict[type, Served] = {}
"""By the programs that run on it: hypothesis takes no fixtures."""
counted: list[Any] = []


@pytest.fixture(scope="module")
def paths(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[type, tuple[Path, str | None]]:
    model, adapter = save_team_model(tmp_path_factory.mktemp("team"))
    return {Visible: (tiny_path, None), Team: (model, str(adapter))}


@pytest.fixture
def models(paths: dict[type, tuple[Path, str | None]]) -> Iterator[None]:
    yield from _serve({kind: (*found, torch.float32) for kind, found in paths.items()})


@pytest.fixture
def half_models(paths: dict[type, tuple[Path, str | None]]) -> Iterator[None]:
    yield from _serve({kind: (*found, torch.bfloat16) for kind, found in paths.items()})


def _serve(wanted: dict[type, tuple[Path, str | None, torch.dtype]]) -> Iterator[None]:
    counted.clear()
    for kind, (path, adapter, dtype) in wanted.items():
        elsewhere = FreshProcesses(path, half=dtype == torch.bfloat16)
        served[kind] = Served(load_model(path, dtype=dtype), elsewhere, adapter)
    yield
    for each in served.values():
        each.elsewhere.close()


def whole_and_broken(program: Program, rng: Random, folder: str, *, logits: bool = False) -> tuple[Heard, list[Heard]]:
    """The run in one go, and its legs: the first here, each of the others in a process of its own."""
    model = served[type(program)]
    nodes = sorted(program.graph().nodes)
    legs = [
        Leg(program, f"{folder}/states", Stop(**{rng.choice(["before", "after"]): (rng.choice(nodes),)}))
        for _ in range(rng.choice([1, 1, 2]))
    ]
    options: Any = {"adapter": model.adapter, "with_logits": logits}
    whole = heard_on(Leg(program, begins=True, **options), model.here)
    first, *others = [*legs, Leg(program, legs[0].states)]
    broken = [heard_on(Leg(program, first.states, first.stop, True, **options), model.here)]
    broken += [model.elsewhere.heard_on(Leg(program, leg.states, leg.stop, **options)) for leg in others]
    return whole, broken


def require_same(program: Program, rng: Random) -> None:
    with TemporaryDirectory() as folder:
        whole, broken = whole_and_broken(program, rng, folder)
    last = broken[-1]
    assert not whole.waiting and not last.waiting
    for mine, theirs in zip(whole.said, said_by(broken), strict=True):
        assert mine == theirs
    assert last.words == whole.words
    assert decoded_once(broken).keys() == whole.decoded.keys()
    counted.append((len(whole.decoded), len(broken[0].decoded), sum(bool(leg.waiting) for leg in broken)))


def told(record_property: Callable[[str, object], None]) -> None:
    decodes, before, stops = (sum(column) for column in zip(*counted, strict=True))
    record_property(
        "counts", f"{len(counted)} graphs, {stops} stops, {decodes} decodes, {decodes - before} of them elsewhere"
    )


@given(PROGRAMS, st.randoms(use_true_random=False))
@drawn(2)
def _few_go_on(program: Program, rng: Random) -> None:
    require_same(program, rng)


@given(PROGRAMS, st.randoms(use_true_random=False))
@drawn(100)
def _many_go_on(program: Program, rng: Random) -> None:
    require_same(program, rng)


@pytest.mark.slow
def test_a_run_goes_on_in_a_fresh_process(models: None, record_property: Callable[[str, object], None]) -> None:
    _few_go_on()
    told(record_property)


@pytest.mark.slow
def test_a_hundred_runs_go_on_in_fresh_processes(models: None, record_property: Callable[[str, object], None]) -> None:
    _many_go_on()
    told(record_property)


# In bf16: KV that is computed again is rounded otherwise, as it is by whatever shares its batch.

OF_ANOTHER_SHAPE = 4.0
"""As far as from itself in steps of another shape may a run be from itself after it was broken off."""


@dataclass
class Flips:
    """What rounding has changed in runs that were broken off, and in others whose steps are cut otherwise."""

    messages: int = 0
    gaps: list[float] = field(default_factory=list)
    """Of the scores of the two best candidates, by the run that was not broken off, where a token was flipped."""
    after_flips: int = 0
    """Messages that saw something else for it."""
    farthest: float = 0.0
    """How far logits are from those of the run that was not broken off."""
    of_another_shape: float = 0.0
    """And those of the same words in steps of at most 16 tokens: nothing else differs."""

    @property
    def bound(self) -> float:
        """Of any logit's difference."""
        return OF_ANOTHER_SHAPE * self.of_another_shape

    def compare(self, whole: Heard, broken: Sequence[Heard]) -> None:
        """Hear what was said otherwise."""
        again, theirs = decoded_once(broken), {said.place: said for said in said_by(broken)}
        assert theirs.keys() == {said.place for said in whole.said}
        for mine in whole.said:
            other = theirs[mine.place]
            if mine.sampled and mine.sees != other.sees:
                self.after_flips += 1
            elif mine.sampled:
                self.messages += 1
                logits = whole.decoded[mine.place], again[mine.place]
                self._compare(mine, other, *logits, whole.seeds[mine.id])

    def shape(self, whole: Heard, reshaped: Heard) -> None:
        """Hear the same words in steps of another shape."""
        for place, logits in whole.decoded.items():
            apart = (torch.tensor(logits) - torch.tensor(reshaped.decoded[place])).abs().max()
            self.of_another_shape = max(self.of_another_shape, float(apart))

    def _compare(
        self, mine: Said, other: Said, logits: list[list[float]], others: list[list[float]], seed: int
    ) -> None:
        tokens = [*zip(mine.sampled, other.sampled, strict=False)]
        step = next((step for step, (one, two) in enumerate(tokens) if one != two), None)
        assert step is not None or mine.tokens == other.tokens
        seen = len(tokens) if step is None else step + 1
        apart = (torch.tensor(logits[:seen]) - torch.tensor(others[:seen])).abs().max()
        self.farthest = max(self.farthest, float(apart))
        if step is not None:
            key = noise_key(seed, step)
            one, two = (logits[step][token] + gumbel(token, key) for token in tokens[step])
            assert one >= two, "the run that was not broken off has chosen the better one"
            self.gaps.append(one - two)


@pytest.mark.slow
def test_in_half_precision_only_what_is_nearly_tied_is_said_otherwise(
    half_models: None, record_property: Callable[[str, object], None]
) -> None:
    """What is computed again is computed in steps of another shape, and so are the same words if steps hold 16 tokens:
    logits may be four times as far apart as there, and a token flips only where its score is within twice that of
    another's, which is as much higher in one run as it is lower in the other.
    """
    flips: dict[type, Flips] = {kind: Flips() for kind in served}

    @given(PLAIN, st.randoms(use_true_random=False))
    @drawn(24)
    def compared(program: Program, rng: Random) -> None:
        with TemporaryDirectory() as folder:
            whole, broken = whole_and_broken(program, rng, folder, logits=True)
        assert not whole.waiting and not broken[-1].waiting
        words = {said.place: said.sampled for said in whole.said if said.sampled}
        reshaped = Leg(program, begins=True, with_logits=True, step_tokens=16, replay=words)
        flips[type(program)].shape(whole, heard_on(reshaped, served[type(program)].here))
        flips[type(program)].compare(whole, broken)
        counted.append(program)

    compared()
    assert len(counted) >= 20
    for kind, each in flips.items():
        assert each.farthest <= each.bound and all(gap <= 2 * each.bound for gap in each.gaps)
        assert each.gaps or not each.after_flips, "whoever saw something else saw a flip"
        gap, count = max(each.gaps, default=0.0), f"{len(each.gaps)} of {each.messages} messages flip"
        record_property(
            "counts",
            f"{kind.__name__}: {count}, at {gap:.2g} at most of {2 * each.bound:.2g}; {each.after_flips} see others "
            f"for it; logits are {each.farthest:.2g} apart at most of {each.bound:.2g}",
        )
