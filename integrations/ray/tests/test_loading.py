"""What becomes of actors when they are loaded, when that fails, and when they end: without Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from choreo_ray import ClusterError, naming
from choreo_ray import fleet as fleets
from choreo_ray.actor import EngineActor, Loading
from choreo_ray.fleet import Actors
from choreo_ray.naming import end_actors
from choreo_ray.placing import Placing, with_absolute
from choreo_ray.remote.protocol import own_version
from ray import exceptions as ray_errors

from choreo_agents import Memory
from choreo_agents.errors import EngineLostError, EngineMismatchError, ModelNotFoundError

LOADING = Loading("right", 1, {"dtype": torch.float32})


class Handle:
    """Of an actor that answers what it is told to, if it has begun.

    Args:
        name: Its.
        answers: By method.
        begun: Whether it has.
    """

    def __init__(self, name: str, answers: dict[str, Any] | None = None, *, begun: bool = True) -> None:
        self.name, self.begun = name, begun
        self.answers = {"meet": ("right", torch.float32), "there": 1} | (answers or {})
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *_: self._ask(method))

    def _ask(self, method: str) -> tuple[Any, ...]:
        self.asked.append(method)
        return (self, method, len(self.asked))


def raised(cause: Exception) -> Exception:
    """As Ray raises it."""
    return ray_errors.RayTaskError("it", "Traceback ...", cause, "actor", 1, "127.0.0.1").as_instanceof_cause()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of actors that were ended; asking them is as `Handle` says."""
    found: list[str] = []

    def get(reference: tuple[Handle, str, int]) -> Any:
        answer = reference[0].answers.get(reference[1])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(references: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        done = [each for each in references if each[0].begun][:num_returns]
        return done, [each for each in references if each not in done]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: found.append(handle.name))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(fleets, "resources", lambda: ({"CPU": 8.0, "GPU": 0.0}, {"CPU": 8.0, "GPU": 0.0}))
    return found


class Closing:
    """A cluster of somebody else's, and how often it was left."""

    started, closed = False, 0

    def close(self) -> None:
        self.closed += 1

    def before_end(self, what: str, work: Callable[[], None]) -> None:
        pass


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, killed: list[str]) -> Callable[..., Actors]:
    """Loads engines in actors, of which those were there before that are not called new."""

    def made(*handles: Handle, new: tuple[str, ...] = (), cluster: Any = None, name: str | None = "pool") -> Actors:
        known = {each.name: each for each in handles}

        def found_or_made(kind: type, options: Any, found: Any, namespace: str, own: str, *_: Any) -> tuple[Any, bool]:
            return known[own], own in new

        monkeypatch.setattr(fleets, "get_or_start", found_or_made)
        placing = Placing(len(handles), 1, 0, None, name, "tests", 60.0)
        return Actors(cluster or Closing(), placing, LOADING)

    return made


def test_a_load_that_fails_ends_those_that_it_has_started_and_no_others(
    load: Callable[..., Actors], killed: list[str]
) -> None:
    missing = raised(ModelNotFoundError("there is no such folder"))
    cluster, old, new = Closing(), Handle("pool-0"), Handle("pool-1", {"load": missing})
    with pytest.raises(ModelNotFoundError):
        load(old, new, new=("pool-1",), cluster=cluster)
    assert killed == ["pool-1"] and cluster.closed == 1
    assert "close" not in new.asked, "it has nothing to keep"


def test_those_that_find_no_room_end_at_once(load: Callable[..., Actors], killed: list[str]) -> None:
    old, new = Handle("pool-0"), Handle("pool-1", begun=False)
    with pytest.raises(ClusterError, match="'pool-1' had not started"):
        load(old, new, new=("pool-1",))
    assert killed == ["pool-1"] and "load" not in old.asked + new.asked


@pytest.mark.parametrize("served", [("wrong", torch.float32), ("right", torch.bfloat16), ("wrong", None)])
def test_those_of_another_model_are_refused_before_anything_is_loaded(
    load: Callable[..., Actors], killed: list[str], served: tuple[str, Any]
) -> None:
    old, new = Handle("pool-0", {"meet": served}), Handle("pool-1")
    with pytest.raises(EngineMismatchError, match="'pool-0' exists already, and serves"):
        load(old, new, new=("pool-1",))
    assert killed == ["pool-1"] and old.asked == ["meet"] and new.asked == ["meet"]


def test_what_is_known_only_when_it_is_loaded_is_looked_at_again(
    load: Callable[..., Actors], killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Handle("pool-0", {"meet": ("right", None)})
    ask = old._ask

    def asked(method: str) -> tuple[Any, ...]:
        if method == "load":
            old.answers["meet"] = ("right", torch.bfloat16)
        return ask(method)

    monkeypatch.setattr(old, "_ask", asked)
    with pytest.raises(EngineMismatchError, match=r"in torch.bfloat16, not 'right' in torch.float32"):
        load(old)
    assert killed == []


def test_what_ray_fails_with_is_no_error_of_rays(load: Callable[..., Actors], killed: list[str]) -> None:
    gone = ray_errors.ActorUnavailableError("restarting", None)
    with pytest.raises(EngineLostError, match="'pool-1' is lost"):
        load(Handle("pool-0"), Handle("pool-1", {"load": gone}), new=("pool-0", "pool-1"))
    assert killed == ["pool-0", "pool-1"]
    with pytest.raises(ClusterError, match="'pool-0' could not start"):
        load(Handle("pool-0", {"meet": ray_errors.ActorDiedError()}))


def test_another_version_is_refused(load: Callable[..., Actors], killed: list[str]) -> None:
    other = raised(EngineMismatchError("engine 'pool-0' runs choreo-ray 9"))
    with pytest.raises(EngineMismatchError, match="runs choreo-ray 9"):
        load(Handle("pool-0", {"meet": other}))
    assert killed == []


async def test_an_actor_says_what_it_is_to_serve_and_loads_nothing_for_it() -> None:
    actor = EngineActor("engine-0", LOADING)
    assert await actor.meet(own_version()) == ("right", torch.float32)
    with pytest.raises(
        EngineMismatchError,
        match=r"runs choreo-agents .*, choreo-ray .*, but its router 0.0.9: install the same version",
    ):
        await actor.meet("0.0.9")
    assert actor._engine is None


def test_those_that_have_begun_write_before_they_end_and_no_other_is_waited_for(
    killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[list[str], float]] = []
    wait = ray.wait

    def watched(references: list[Any], num_returns: int, timeout: float) -> Any:
        waits.append(([f"{each[0].name} {each[1]}" for each in references], timeout))
        assert not killed, "they write first"
        return wait(references, num_returns=num_returns, timeout=timeout)

    monkeypatch.setattr(ray, "wait", watched)
    assert end_actors([Handle("pool-0"), Handle("pool-1", begun=False)]) == 2
    asked, closing = waits
    assert asked == (["pool-0 there", "pool-1 there"], naming._THERE_S) and naming._THERE_S < naming._CLOSE_S
    assert closing == (["pool-0 close"], naming._CLOSE_S)
    assert killed == ["pool-0", "pool-1"]
    assert end_actors([]) == 0


def test_folders_of_memory_are_those_of_who_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    told = with_absolute(Memory(persist_dir=Path("kept"), host_bytes=7))
    assert told == Memory(persist_dir=tmp_path / "kept", host_bytes=7) and not (tmp_path / "kept").exists()
    assert with_absolute(None) is None
