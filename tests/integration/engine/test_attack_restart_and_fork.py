"""Engines that are closed, started again or forked while they work: typed errors, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine

from choreo_agents import Engine, Memory, MessageHandle, Sampling
from choreo_agents.errors import ChoreoError, EngineClosedError, HandleError
from choreo_agents.models import LoadedModel

TOKEN = 2 * 3 * 2 * 16 * 4
SHORT = Sampling(max_tokens=3, stop_tokens=())


def test_attack_messages_leave_while_the_disk_is_closed(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing goes through the files of an engine while its callers still release what is in them."""
    engine = make_engine(disk=tmp_path)
    made = [engine.prefill([5 + number] * 20) for number in range(40)]
    engine.kv.offload()
    while engine.kv.tiers(made).count("disk") < len(made):
        time.sleep(0.005)
    shutdown = ThreadPoolExecutor.shutdown
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", lambda *a, **b: (time.sleep(0.05), shutdown(*a, **b))[1])
    errors: list[BaseException] = []

    def close() -> None:
        try:
            engine.admin.restart()
        except BaseException as error:
            errors.append(error)

    closing = threading.Thread(target=close)
    closing.start()
    for handle in made:
        engine.release(handle)
        time.sleep(0.001)
    closing.join(60)
    assert not errors and not closing.is_alive()
    engine.check()


@pytest.mark.parametrize("end", ["restart", "close"])
def test_attack_ending_an_engine_under_load_raises_nothing_but_that_it_is_closed(
    tiny: LoadedModel, tmp_path: Path, end: str
) -> None:
    for attempt in range(6):
        memory = Memory(kv_budget_bytes=200 * TOKEN, host_bytes=60 * TOKEN, disk=tmp_path)
        with Engine.load(tiny, memory=memory) as engine:
            stop, wrong = threading.Event(), list[BaseException]()
            threads = [threading.Thread(target=_work, args=(engine, number, stop, wrong)) for number in range(4)]
            for thread in threads:
                thread.start()
            try:
                for _ in range(5):
                    time.sleep(0.02)
                    engine.admin.restart() if end == "restart" else engine.admin.close()
            finally:
                stop.set()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert wrong == [], f"in attempt {attempt}"
            engine.check()


def _work(engine: Engine, number: int, stop: threading.Event, wrong: list[BaseException]) -> None:
    """All that callers do, over and over."""
    turn = 0
    while not stop.is_set():
        turn += 1
        try:
            with engine.tenant(f"{number} {turn % 3}") as tenant, tenant.scope():
                made = [tenant.prefill([5 + number, turn % 300 + 3, *range(10, 40)]) for _ in range(2)]
                tenant.decode([7], made, sampling=SHORT, idempotency_key="m")
                tenant.kv.offload()
                tenant.kv.read(made[0])
                tenant.kv.memory_map()
                engine.stats()
                engine.admin.tenants()
                assert engine.method == "choreo"
                kept: MessageHandle = tenant.prefill([9] * 12)
                tenant.release(kept)
        except (EngineClosedError, HandleError):
            pass
        except BaseException as error:
            wrong.append(error)
            return


FORK = """
import os, signal, sys, threading, time
import torch
from choreo_agents import Engine, Memory, Sampling
from choreo_agents.errors import EngineForkedError, EngineClosedError
torch.set_num_threads(2)
torch.randn(900, 900) @ torch.randn(900, 900)  # on threads that a child does not have
memory = Memory(kv_budget_bytes=1 << 22, disk=sys.argv[2])
engine = Engine.load(sys.argv[1], memory=memory)
engine.tenant("", calls_per_second=1000.0)  # its own
root = engine.prefill([5] * 20)
parked = engine.prefill([6] * 20)
engine.kv.offload([parked])
while engine.kv.tiers([parked]) != ["disk"]:
    time.sleep(0.01)
running = engine.stream([7], [root], sampling=Sampling(max_tokens=500, stop_tokens=()))
next(running)
stop = threading.Event()
def busy():
    while not stop.is_set():
        engine.stats()
threading.Thread(target=busy).start()
children = []
for _ in range(8):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            uses = [
                lambda: engine.prefill([9]), lambda: engine.decode([9]), lambda: next(engine.stream([9])),
                lambda: engine.release(root), lambda: engine.kv.read(root), lambda: engine.stats(),
                lambda: engine.tokens(root), lambda: engine.check(), lambda: engine.admin.restart(),
                lambda: engine.kv.pin(root),
                lambda: engine.tenant("x").prefill([9]),
            ]
            for number, use in enumerate(uses):
                try:
                    use()
                except EngineForkedError as error:
                    assert isinstance(error, EngineClosedError) and "load an engine in this process" in str(error)
                except Exception as error:
                    print("wrong", number, repr(error), flush=True)
                else:
                    print("no error", number, flush=True)
            engine.close()
            with Engine.load(engine.model, memory=Memory(kv_budget_bytes=1 << 22)) as own:
                torch.randn(900, 900) @ torch.randn(900, 900)
                said = own.decode([7], [own.prefill([5] * 20)], sampling=Sampling(max_tokens=3, stop_tokens=()))
                print("child", own.tokens(said), flush=True)
        finally:
            sys.exit(0)
    children.append(child)
for child in children:
    _, status = os.waitpid(child, 0)
    assert status == 0, status
stop.set()
running.close()
said = engine.decode([7], [root], sampling=Sampling(max_tokens=3, stop_tokens=()))
print("parent", engine.tokens(said), flush=True)
assert engine.kv.tiers([parked]) == ["disk"]
engine.decode([7], [parked], sampling=Sampling(max_tokens=3))
assert engine.stats().restored_from_disk == 1, "the children left the parent's files alone"
engine.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_attack_a_forked_process_is_told_at_once_and_can_load_an_engine_of_its_own(
    tiny_path: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tiny_path), str(tmp_path)]
    done = subprocess.run(command, check=False, timeout=170, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answer = lines[-1].removeprefix("parent ")
    assert lines == [f"child {answer}"] * 8 + [f"parent {answer}"], done.stdout


def test_attack_an_engine_that_cannot_start_again_says_so(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    root = engine.prefill([5] * 20)
    with monkeypatch.context() as patch:
        patch.setattr("choreo_agents.engine.core.KVPool", _no_room)
        with pytest.raises(ChoreoError, match="no room"):
            engine.admin.restart()
        for use in (lambda: engine.prefill([5]), lambda: engine.kv.read(root), lambda: engine.kv.key(root)):
            with suppress(EngineClosedError):
                use()
        assert engine.stats().unfinished == 0 and engine.method == "choreo"
    engine.admin.restart()
    assert engine.tokens(root) == [5] * 20 and engine.decode([7], [root], sampling=SHORT).length == 4


def _no_room(*_: Any) -> Any:
    raise ChoreoError("no room")
