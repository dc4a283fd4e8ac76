"""What is wrong with a cluster, or with what is asked of it, is said; and what was begun there ends."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from choreo_ray import ClusterError, RayEngine
from choreo_ray import cluster as clusters
from choreo_ray.cluster import Cluster
from ray.util import get_current_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from support.ray_actors import alive, left

from choreo_agents import Memory, Sampling
from choreo_agents.errors import (
    EngineLostError,
    EngineMismatchError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)

Make = Callable[..., RayEngine]
ROOT = Path(__file__).parents[3]


def groups() -> list[Any]:
    """The placement groups that there are."""
    return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": 0}, "engines must be an integer of at least 1, not 0"),
        ({"engines": 1.5}, "not 1.5"),
        ({"num_cpus": -1}, "num_cpus must not be negative"),
        ({"num_gpus": -0.5}, "num_gpus must not be negative"),
        ({"num_gpus": 1.5}, "num_gpus above 1 must be an integer, not 1.5"),
        ({"num_cpus": float("nan")}, "num_cpus must be a number, not nan"),
        ({"num_cpus": "2"}, "num_cpus must be a number, not '2'"),
        ({"name": ""}, "name must be a non-empty string, not ''"),
        ({"name": 7}, "name must be a non-empty string, not 7"),
        ({"namespace": ""}, "namespace must be a non-empty string, not ''"),
        ({"threads": 0}, "threads must be"),
        (
            {"placement": "ANYWHERE"},
            "one of 'PACK', 'SPREAD', 'STRICT_PACK', 'STRICT_SPREAD', a placement group or None",
        ),
        ({"placement": "PACK", "name": "lasting"}, "leave name or placement out"),
        ({"start_s": 0}, "start_s must be positive"),
        ({"object_store_bytes": 0}, "object_store_bytes must be positive"),
    ],
)
def test_what_can_never_work_is_said_before_anything_is_started(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        RayEngine.load("embedded", address="127.0.0.1:1", **options)


def test_a_model_that_is_loaded_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from choreo_agents.models import load_model

    with pytest.raises(InvalidRequestError, match="pass a folder or a name"):
        RayEngine.load(load_model("embedded"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("no-such-host.invalid:6379", "no Ray cluster answers"),
        ("auto", "no Ray cluster answers at 'auto'"),
        ("ray://127.0.0.1:10001", "Ray client address, which does not support streaming"),
        ("nonsense", "'nonsense' is not an address"),
    ],
)
def test_an_address_at_which_there_is_no_cluster(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(address: str) -> None:
        raise ConnectionError(f"nobody is at {address}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nobody)  # "auto" would find the cluster of other tests
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match=re.escape(said)) as raised:
        Cluster(None, None)
    assert isinstance(raised.value, EngineLostError) and isinstance(raised.value, ConnectionError)
    assert "HOST:PORT" in str(raised.value), "it says what to give"


def test_a_program_uses_one_cluster(address: str) -> None:
    Cluster(address, None).close()
    Cluster("auto", None).close()
    with pytest.raises(ClusterError, match="this process is connected to the cluster at"):
        Cluster("127.0.0.1:1", None)
    assert ray.is_initialized(), "it was reached by somebody else, who ends it"


@pytest.mark.parametrize(
    ("own", "address", "same"),
    [
        ("10.0.0.1:6379", "10.0.0.1:6379", True),
        ("10.0.0.1:6379", "10.0.0.2:6379", False),
        ("10.0.0.1:6379", "10.0.0.1:6380", False),
        ("10.0.0.1:6379", "head:6379", True),
        ("10.0.0.1:6379", "other:6379", False),
        ("10.0.0.1:6379", "nobody:6379", False),
        ("10.0.0.9:6379", "localhost:6379", True),
        ("10.0.0.1:6379", "localhost:6379", False),
        ("127.0.0.1:6379", "10.0.0.9:6379", True),
        ("[fd00::1]:6379", "[fd00::1]:6379", True),
    ],
)
def test_another_host_is_another_cluster_however_it_is_called(
    own: str, address: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"head": "10.0.0.1", "other": "10.0.0.2", "localhost": "127.0.0.1"}

    def resolved(host: str, *_: object) -> list[Any]:
        if host == "nobody":
            raise OSError("no such name")
        return [(None, None, None, "", (names.get(host, host), 0))]

    monkeypatch.setattr(clusters.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=own))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.9")
    if same:
        Cluster(address, None).close()
    else:
        with pytest.raises(ClusterError, match="this process is connected to the cluster at"):
            Cluster(address, None)


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There is none, and starting one starts nothing: what was done."""
    done: list[str] = []

    def shutdown() -> None:
        done.append("ended")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: done.append("started"))
    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(ray, "is_initialized", lambda: done.count("started") > done.count("ended"))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    return done


@pytest.mark.parametrize("address", [None, "local"])
def test_no_cluster_is_started_to_look_for_a_name(no_cluster: list[str], address: str | None) -> None:
    with pytest.raises(ClusterError, match="HOST:PORT, or set RAY_ADDRESS"):
        RayEngine.end("nobody", address=address)
    with pytest.raises(InvalidRequestError, match="name must be"):
        RayEngine.end("", address=address)
    assert no_cluster == []


def test_what_has_to_be_done_before_a_cluster_ends_is_done_by_its_last_user(no_cluster: list[str]) -> None:
    one, other = Cluster(None, None), Cluster(None, None)
    for each in (one, other):
        each.before_end("a name", lambda: no_cluster.append("a name's actors"))
    one.close()
    assert no_cluster == ["started"]
    other.close()
    assert no_cluster == ["started", "a name's actors", "ended"]
    failing = Cluster(None, None)
    failing.before_end("a name", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.close()
    assert no_cluster[3:] == ["started", "ended"], "whatever fails"
    Cluster(None, None).close()
    assert no_cluster[5:] == ["started", "ended"], "and nothing is left of it"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": 1, "num_gpus": 1}, "1 engines with 1 CPU and 1 GPU each"),
        (
            {"engines": 2, "placement": "STRICT_SPREAD"},
            "the placement group 'STRICT_SPREAD' was not placed in 0.5 s",
        ),
    ],
)
def test_a_cluster_without_room_says_what_it_has(alone: None, options: dict[str, Any], said: str) -> None:
    before = alive()
    with pytest.raises(ClusterError, match=re.escape(said)) as raised:
        RayEngine.load("embedded", start_s=0.5, **options)
    assert re.search(r"It has 5 CPU \(\d free\) and 0 GPU \(0 free\)", str(raised.value))
    assert left(before) == before and groups() == []


def test_nobody_is_ended_by_a_name_that_nobody_has(address: str) -> None:
    assert RayEngine.end("nobody", namespace="tests") == 0


def test_closing_leaves_no_actor_behind(alone: None) -> None:
    before = alive()
    engine = RayEngine.load("embedded", engines=1, placement="PACK", memory=Memory(kv_budget_bytes=1 << 22))
    assert len(alive()) == len(before) + 1 and len(groups()) == 1
    tenant = engine.tenant("other")
    tenant.close()
    assert engine.text(engine.decode("Bob:", sampling=Sampling(max_tokens=3))).startswith("Bob:")
    engine.close()
    engine.close()
    assert left(before) == before and groups() == []
    assert ray.is_initialized()


@contextmanager
def reserved(cpus: int) -> Iterator[PlacementGroup]:
    """A placement group of so many bundles with a CPU each, which are free again whatever becomes of the test."""
    group = placement_group([{"CPU": 1}] * cpus)
    try:
        ray.get(group.ready())
        yield group
    finally:
        remove_placement_group(group)


@pytest.mark.slow
def test_a_placement_group_that_is_given_is_used_and_stays(alone: None) -> None:
    before = alive()
    with reserved(2) as group:
        with RayEngine.load("embedded", placement=group, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
            assert engine.prefill([7] * 3).length == 3 and len(groups()) == 1
            asked = [
                c.actor.__ray_call__.remote(lambda _: get_current_placement_group()) for c in engine._actors.clients
            ]
            inside = [each.id for each in ray.get(asked)]
            assert inside == [group.id] * 2, "they lie in its bundles"
        assert left(before) == before and len(groups()) == 1, "it is whose that made it"
        with pytest.raises(InvalidRequestError, match="the placement group has 2 bundles, but 3 engines need one each"):
            RayEngine.load("embedded", engines=3, placement=group)
        assert left(before) == before


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("/no/such/folder", {}, ModelNotFoundError),
        pytest.param("embedded", {"dtype": torch.float64}, UnsupportedModelError, marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_loaded_is_said_as_it_was_there(
    alone: None, model: str, options: dict[str, Any], error: type[Exception]
) -> None:
    before = alive()
    with pytest.raises(error, match=r"/no/such/folder|float64"):
        RayEngine.load(model, engines=1, **options)
    assert left(before) == before


@pytest.mark.slow
def test_named_actors_outlive_who_has_started_them(alone: None) -> None:
    before = alive()
    lasting = {"name": "lasting", "namespace": "tests", "engines": 1, "salt": "ours"}
    one = RayEngine.load("embedded", **lasting)
    note = one.prefill("Alice: the record says nine.")
    other = RayEngine.load("embedded", **lasting)
    assert other.prefill("Alice: the record says nine.") == note
    one.close()
    assert len(alive()) == len(before) + 1
    assert other.text(other.decode("Bob:", [note], sampling=Sampling(max_tokens=3))).startswith("Bob:")
    for wrong in ({"model": "/another/model"}, {"model": "embedded", "dtype": torch.bfloat16}):
        with pytest.raises(EngineMismatchError, match=r"exists already, and serves 'embedded' in torch.float32"):
            RayEngine.load(**(lasting | wrong))
    other.close()
    assert RayEngine.end("lasting", namespace="tests") == 1
    assert left(before) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"model": "/no/such/folder"}, ModelNotFoundError),
        ({"engines": 9, "start_s": 4}, ClusterError),
        ({"adapter": "/no/such/adapter"}, Exception),
    ],
    ids=["model", "room", "adapter"],
)
def test_a_named_load_that_fails_leaves_nothing_that_the_next_could_find(
    alone: None, wrong: dict[str, Any], error: type[Exception]
) -> None:
    before = alive()
    right = {"name": "again", "namespace": "tests", "engines": 1, "model": "embedded"}
    with pytest.raises(error):
        RayEngine.load(**(right | wrong))
    assert left(before) == before
    with RayEngine.load(**right, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        assert engine.prefill([7] * 3).length == 3
    there = alive()
    with pytest.raises(EngineMismatchError if "model" in wrong else error):
        RayEngine.load(**(right | {"engines": 2} | wrong))
    assert left(there) == there, "those that were there before go on, and no other"
    assert RayEngine.end("again", namespace="tests") == 1
    assert left(before) == before


@pytest.mark.slow
def test_its_page_runs(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "integrations/ray/README.md").read_text(), re.DOTALL)
    before = alive()
    exec(code, {})
    assert capsys.readouterr().out.startswith("Bob:")
    assert left(before) == before


@pytest.mark.slow
def test_its_example_runs(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/16_two_engines.py"), run_name="__main__")
    *_, where, counts, same = capsys.readouterr().out.splitlines()
    assert re.search(r"lost: \['debates-[01]'\]", where) and same.endswith(": True")
    assert int(re.findall(r"(\d+) computed again", counts)[0]) > 0


STARTS = """
import os, sys
import ray
from choreo_ray import ClusterError, RayEngine
from choreo_agents import Memory, Sampling
def watch(written, done, references):
    written.append((len(done), len(references)))
    return done
if __name__ == "__main__":
    try:
        RayEngine.load("embedded", engines=999, num_cpus=1)
    except ClusterError as none:
        assert "999 engines" in str(none) and "does not scale" in str(none), none
    assert not ray.is_initialized()
    memory = Memory(kv_budget_bytes=1 << 22)
    with RayEngine.load("embedded", engines=1, object_store_bytes=100 << 20, memory=memory) as one:
        with RayEngine.load("embedded", engines=1, num_cpus=0, memory=memory) as other:
            said = [each.text(each.decode("Bob:", sampling=Sampling(max_tokens=3))) for each in (one, other)]
        assert ray.is_initialized(), "another engine uses it"
        assert said[0] == said[1] == one.text(one.decode("Bob:", sampling=Sampling(max_tokens=3)))
    assert not ray.is_initialized()
    with RayEngine.load("embedded", engines=1, name="ours", salt="ours", memory=memory) as one:
        with RayEngine.load("embedded", engines=1, name="ours", salt="ours", memory=memory) as other:
            note = one.prefill([7] * 60)
        assert one.prefill([7] * 60) == note and one.engine_stats(), "its actors go on, for whoever has the cluster"
        written = []
        from choreo_ray import naming
        ended = naming._wait
        naming._wait = lambda references, s: [*watch(written, ended(references, s), references)]
    assert written == [(1, 1), (1, 1)], "it has begun, and has closed its engine, before the cluster ended"
    assert not ray.is_initialized()
    print("done")
"""


@pytest.mark.slow
def test_a_cluster_is_started_where_there_is_none_and_ends_with_its_last_engine(tmp_path: Path) -> None:
    import tempfile

    import psutil

    (tmp_path / "starts.py").write_text(STARTS)
    paths = [str(ROOT), str(ROOT / "integrations/ray"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # paths of sockets are short
        own = {"PYTHONPATH": os.pathsep.join(paths), "RAY_TMPDIR": short, "HOME": str(tmp_path)}
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
        command = [sys.executable, str(tmp_path / "starts.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
        assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
        left = [each.pid for each in psutil.process_iter(["cmdline"]) if short in " ".join(each.info["cmdline"] or ())]
        assert left == []
    assert not (tmp_path / ".ray").exists()
