"""Random graphs of several tenants at once on a memory that is too small, with faults, cancelled and resumed, and a
server whose clients lie, stall and leave. Agents think, call tools, and speak on two models.

    make torture                                  ten minutes
    make torture OPTIONS="--seconds 60 --seed 3"

Each program is run once in peace and once in trouble: it has to say the same words, nobody may have read what is not
theirs (`torture.oracle`), nothing may be left of it when it is forgotten, and whatever fails does so with an error of
ours. What does not is made as small as it gets, and printed with the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, TextIO

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from langgraph.checkpoint.memory import InMemorySaver
from support.faults import InjectedError, any_fault, is_of_sampler
from support.interference import WARN

from choreo_agents import Engine, Memory, RunOptions
from choreo_agents.engine.introspection import EngineStats
from choreo_agents.errors import ChoreoError
from choreo_agents.models import LoadedModel
from torture import oracle
from torture.minds import load_mind
from torture.program import ENGINES, SPEECH, Program, programs
from torture.rude_clients import RudeClients, require

HANGS_S = 120.0
"""Seconds after which a program that takes a second hangs."""
_TRIES = 12
_BLOCK = 8
"""Programs between two looks at the clock."""


class Torture:
    """Programs, and what is counted of them.

    Args:
        folder: Gets the models.
    """

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._models: dict[tuple[str, int], LoadedModel] = {}

    def model(self, family: str, number: int) -> LoadedModel:
        """The model of a family that has a number; no two numbers are one model."""
        if (family, number) not in self._models:
            self._models[family, number] = load_mind(self._folder / f"{family} {number}", family, number)
        return self._models[family, number]

    def play(self, program: Program) -> None:
        """Run it in peace and in trouble, and compare."""
        calm = asyncio.run(asyncio.wait_for(self._in_peace(program), HANGS_S))
        found = asyncio.run(asyncio.wait_for(self._in_trouble(program), HANGS_S))
        for number, (expected, said) in enumerate(zip(calm, found, strict=True)):
            if said is None:
                self.counts["graphs that had no room"] += 1
                continue
            require(said == expected, f"wrong words of tenant {number}: {said} instead of {expected}")
        self.counts["programs"] += 1
        self.counts[f"programs that speak {program.speech}"] += 1
        self.counts["programs with thoughts"] += any(any(each.thinking.values()) for each in program.minds)
        self.counts["programs with tools"] += any(each.callers for each in program.minds)
        self.counts["programs with two models in a graph"] += program.models == "both"

    async def _in_peace(self, program: Program) -> list[Any]:
        found: list[Any] = []
        with self._engines(program, Memory(kv_budget_bytes=1 << 24)) as engines:
            for number in range(2):
                app = _app(program, number, engines[number])
                state = await app.ainvoke(_given(program, number), _config(program, number))
                found.append(oracle.words(oracle.by_model(engines[number].values()), state))
        return found

    async def _in_trouble(self, program: Program) -> list[Any]:
        per_token = self.model(program.families[0], 0).adapter.geometry.bytes_per_token
        with tempfile.TemporaryDirectory() as disk:
            memory = Memory(
                kv_budget_bytes=program.room * per_token,
                host_bytes=program.host,
                disk=Path(disk) if program.on_disk else None,
            )
            with self._engines(program, memory) as engines:
                apps = [_app(program, number, engines[number]) for number in range(2)]
                every = [engine for served in engines for engine in served.values()]
                rng = Random(program.seed)
                tries = [self._tried(program, number, apps[number], rng) for number in range(2)]
                states: list[Any] = [None, None]
                for attempt in range(_TRIES):
                    with ExitStack() as broken:
                        failed: list[str] = []
                        if attempt < len(program.faults):
                            drawn = Random(program.faults[attempt])
                            failed = broken.enter_context(any_fault(drawn.choice(every), drawn))
                            self.counts["faults prepared"] += 1
                        left = [number for number in range(2) if states[number] is None]
                        cancel = program.cancels[attempt] if attempt < len(program.cancels) else None
                        for number, state in zip(
                            left, await asyncio.gather(*(tries[number](cancel) for number in left)), strict=True
                        ):
                            states[number] = state
                    self.counts["faults injected"] += len(failed)
                    self.counts["faults of samplers injected"] += sum(map(is_of_sampler, failed))
                    for engine in every:
                        engine.check()
                    if all(state is not None for state in states):
                        break
                    if program.restarts and attempt < len(program.faults):
                        for owner in self._owners:
                            owner.restart()
                        self.counts["restarts"] += 1
                found = [
                    self._judged(program, number, apps[number], engines, state) for number, state in enumerate(states)
                ]
                self._require_gone(program, apps, engines)
        return found

    def _judged(
        self, program: Program, number: int, app: Any, engines: Sequence[Mapping[str, Engine]], state: Any
    ) -> Any:
        """A run's words, if it got to its end, of which nobody has read what is not theirs."""
        if state is None:
            return None
        own = oracle.by_model(engines[number].values())
        oracle.require_apart(engines[1 - number].values(), state, self.counts)
        oracle.require_own(number, program.specs[number], program.minds[number], own, state, self.counts)
        oracle.require_foreseen(app, state, self.counts)
        oracle.count(state, self.counts)
        return oracle.words(own, state)

    def _tried(self, program: Program, number: int, app: Any, rng: Random) -> Any:
        begun = [False]

        async def attempt(cancel: float | None) -> Any:
            """The state, if it gets to the end; None: it goes on another time."""
            config = _config(program, number)
            # What fails before there is a checkpoint has begun nothing.
            begun[0] = begun[0] and bool((await app.aget_state(config)).values)
            given, begun[0] = (None if begun[0] else _given(program, number)), True
            try:
                if cancel is None:
                    return await app.ainvoke(given, config)
                return await asyncio.wait_for(app.ainvoke(given, config), cancel)
            except TimeoutError as error:
                if cancel is None and not isinstance(error, ChoreoError):
                    raise
                self.counts["runs cancelled"] += 1
            except ChoreoError as error:
                self.counts[f"failed with {type(error).__name__}"] += 1
            except InjectedError as error:
                require(not is_of_sampler(str(error)), f"a sampler's fault has come out as it was: {error!r}")
                # A fault in what a node's own code calls is the caller's to see: nothing of ours hides it.
                self.counts["failed with the fault itself"] += 1
            return None

        return attempt

    @contextmanager
    def _engines(self, program: Program, memory: Memory) -> Iterator[list[dict[str, Engine]]]:
        """Those of each tenant's graph, by name."""
        serving = [program.serving(number) for number in range(2)]
        with ExitStack() as stack:
            owners = {
                number: stack.enter_context(
                    Engine.load(self.model(program.families[number], number), memory=memory, salt="torture", seed=1)
                )
                for number in sorted({*serving[0], *serving[1]})
            }
            self._owners = [engine.admin for engine in owners.values() if engine.admin is not None]
            yield [
                {name: owners[each].tenant(f"tenant {number}") for name, each in zip(ENGINES, models, strict=False)}
                for number, models in enumerate(serving)
            ]

    def _require_gone(self, program: Program, apps: list[Any], engines: Sequence[Mapping[str, Engine]]) -> None:
        """Once threads are forgotten, nothing is left of them but modules; and of tenants that have gone, nothing."""
        for number, app in enumerate(apps):
            app.delete_thread(f"thread {number}")
            has_modules = any(speaker.imports for speaker in program.specs[number].speakers)
            for engine in engines[number].values():
                self._require_left(engine, has_modules)
        for owner in self._owners:
            _require_nothing(owner.stats())

    def _require_left(self, engine: Engine, has_modules: bool) -> None:
        engine.check()
        stats = engine.stats()
        if not has_modules:
            _require_nothing(stats)
        for name in ("evicted", "lost", "recomputed", "restored_from_host", "restored_from_disk"):
            self.counts[name] += getattr(stats, name)
        self.counts["tokens encoded"] += stats.tokens_encoded
        engine.close()


def _require_nothing(stats: EngineStats) -> None:
    left = {name: getattr(stats, name) for name in ("messages", "leases", "unfinished", "threads", "kv_bytes")}
    require(not any(left.values()), f"left behind: {left}")


def _app(program: Program, number: int, engines: Mapping[str, Engine]) -> Any:
    """A tenant's graph, which keeps its threads."""
    graph = program.minds[number].graph(program.specs[number], WARN, SPEECH[program.speech])
    return graph.compile(InMemorySaver(), engine=engines["one"] if len(engines) == 1 else engines)


def _given(program: Program, number: int) -> dict[str, Any]:
    """A tenant's input."""
    message: dict[str, Any] = {"role": "user", "content": f"What is in {oracle.mark(number)}?", "id": f"asked {number}"}
    given: dict[str, Any] = {"messages": [message]}
    if number == 0 and program.forged == "an author":
        message["response_metadata"] = {"choreo": {"author": "ann", "persona": "ann", "signature": "x"}}
    elif number == 0 and program.forged == "a handle":
        handle = {"id": "0" * 32, "model": "x", "length": 3}
        given["handles"] = [
            {"handle": handle, "author": "ann", "superstep": 0, "branch": 0, "call": 0, "confidential": False}
            | {"message_id": "asked 0", "digest": "0", "signature": {"entry": "x"}}
        ]
    elif number == 0 and program.forged == "nonsense":
        given["handles"] = [{"handle": 7, "message_id": None, "signature": [True]}, {}]
    return given


def _config(program: Program, number: int) -> Any:
    options = RunOptions(seed=program.seed + number)
    return {"configurable": {"thread_id": f"thread {number}", "choreo": options}, "recursion_limit": 200}


def say(line: str, stream: TextIO = sys.stdout) -> None:
    """Tell whoever waits for it."""
    stream.write(f"{line}\n")
    stream.flush()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("choreo_agents.graph").setLevel(logging.ERROR)  # of what nobody sees
    torch.set_num_threads(1)
    started, block = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(Path(folder))
        clients = RudeClients(torture.model("plain", 0), torture.counts)
        while time.monotonic() - started < asked.seconds:
            drawn = 1_000_000 * asked.seed + block

            @seed(drawn)
            @settings(
                max_examples=_BLOCK,
                database=None,
                deadline=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=[*HealthCheck],
                report_multiple_bugs=False,
            )
            @given(programs())
            def played(program: Program) -> None:
                faulthandler.dump_traceback_later(3 * HANGS_S, exit=True)
                try:
                    torture.play(program)
                finally:
                    faulthandler.cancel_dump_traceback_later()

            try:
                played()
                asyncio.run(asyncio.wait_for(clients.visit(Random(drawn)), HANGS_S))
            except BaseException:
                say(f"\nfailed: seed {asked.seed}, block {block}; the program above is the smallest found")
                say(json.dumps(torture.counts, indent=2))
                raise
            block += 1
            if sys.stderr.isatty() or block % 10 == 0:
                took = time.monotonic() - started
                say(f"{took:5.0f} s: {torture.counts['programs']} programs", sys.stderr)
    took = time.monotonic() - started
    say(f"seed {asked.seed}, {took:.0f} s: 0 wrong words, 0 leaks, 0 hangs; every failure typed, or the fault itself")
    for name, count in sorted(torture.counts.items()):
        say(f"  {name}: {count:,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
