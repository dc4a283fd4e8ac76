"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stepping import Steps
from support.tiny import save_tiny_llama

from choreo_agents import Engine, Memory, Scheduling
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import TokenSampler


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LoadedModel:
    return load_model(tiny_path)


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    return load_model("embedded")


MakeEngine = Callable[..., Engine]
HoldSteps = Callable[[Engine], Steps]


@pytest.fixture(scope="session")
def load_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """What `make_engine` loads engines with: `Engine.load`, or what a plugin's `--engine` says."""
    return request.getfixturevalue("load_remote") if request.config.getoption("--engine", None) else Engine.load


@pytest.fixture
def make_engine(tiny: LoadedModel, load_engine: Callable[..., Engine]) -> Iterator[MakeEngine]:
    """Makes engines (over the tiny model unless another is given); checks and closes them after the test.

    Fields of `Memory` and `Scheduling` may stand among the options.
    """
    made: list[Engine] = []

    def make(model: Any = tiny, **options: Any) -> Engine:
        memory = {name: options.pop(name) for name in list(options) if name in Memory.model_fields}
        scheduling = {name: options.pop(name) for name in list(options) if name in Scheduling.model_fields}
        options["memory"] = Memory(**({"kv_budget_bytes": 1 << 23} | memory))
        engine = load_engine(model, scheduling=Scheduling(**scheduling), **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check()
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def hold_steps(make_engine: MakeEngine) -> Iterator[HoldSteps]:
    """Holds engines before each of their steps until the test lets them go on, and after it in any case."""
    held: list[Steps] = []

    def hold(engine: Engine) -> Steps:
        held.append(Steps(engine))
        return held[-1]

    yield hold
    for each in held:
        each.go_on()


@pytest.fixture
def logits_by_seed(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[torch.Tensor]]:
    """The logits that every decode sampled from, step by step, under its sampling seed."""
    seen: dict[int, list[torch.Tensor]] = {}
    shown = TokenSampler.show

    def recording(self: TokenSampler, logits: torch.Tensor) -> None:
        if self.sampling.seed is not None:
            seen.setdefault(self.sampling.seed, []).append(logits.detach().clone())
        shown(self, logits)

    monkeypatch.setattr(TokenSampler, "show", recording)
    return seen
