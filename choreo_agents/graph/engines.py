"""The engines that serve a graph: one, or several by the names that agents choose from, one for each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent

EngineChoice = Engine | Mapping[str, Engine]
"""The engine that a graph is compiled with, or engines by name."""


class Engines:
    """The engines of one graph.

    Args:
        choice: One engine for all agents, or engines by name; None: agents bring their own.

    Raises:
        InvalidRequestError: It is neither.
    """

    def __init__(self, given: EngineChoice | None) -> None:
        self._named: Mapping[str, Engine] = dict(given) if isinstance(given, Mapping) else {}
        if not isinstance(given, Engine | Mapping | None) or not all(
            isinstance(name, str) and isinstance(engine, Engine) for name, engine in self._named.items()
        ):
            raise InvalidRequestError(
                f"engine must be an Engine, such as Engine.load(), or a dict of Engines by name: not {given!r:.80}"
            )
        self.engines = tuple(dict.fromkeys([given] if isinstance(given, Engine) else self._named.values()))
        """All engines given to the graph, each once."""

    def of(self, agent: Agent) -> Engine | None:
        """Return an agent's engine: its own, the one it names, or the graph's only one; None: there is none yet.

        Raises:
            InvalidRequestError: It names none of the graph's, or the graph has several and it names none.
        """
        if agent.engine is not None:
            return agent.engine
        names = ", ".join(map(repr, self._named))
        if agent.engine_name is not None and agent.engine_name not in self._named:
            has = f"has {names}" if self._named else "has no named engines: compile(engine={...})"
            raise InvalidRequestError(f"agent {agent.name!r} runs on engine {agent.engine_name!r}, but the graph {has}")
        if agent.engine_name is not None:
            return self._named[agent.engine_name]
        if len(self._named) > 1:
            raise InvalidRequestError(
                f"agent {agent.name!r} names no engine, and the graph has several, {names}: pass Agent(..., "
                f"engine={next(iter(self._named))!r})"
            )
        return next(iter(self.engines), None)


def require_distinct(engines: Iterable[Engine | None]) -> tuple[Engine, ...]:
    """Return the engines, each once and without None.

    Raises:
        InvalidRequestError: Two of them run one model: each would take what the other has encoded for lost.
    """
    different = tuple(dict.fromkeys(engine for engine in engines if engine is not None))
    if len({engine.model.adapter.fingerprint for engine in different}) < len(different):
        names = ", ".join(repr(engine.model.name) for engine in different)
        raise InvalidRequestError(
            f"agents of the graph or its subgraphs run on several engines of one model ({names}), which do not share "
            "KV: load it once, and use the same engine for all of them"
        )
    return different


def choose_signer(engines: Sequence[Engine]) -> Engine | None:
    """Return the engine whose tenant's key signs all messages of a graph.

    A key is derived from a salt, whatever the model: engines of one salt have the same key. Without a salt the key is
    random, so that engines with a salt go first; among equals, the first.

    Raises:
        InvalidRequestError: They have different salts: a conversation is one tenant's.
    """
    salted = [engine for engine in engines if engine.lineage.seals.salted]
    for engine in salted[1:]:
        if not engine.lineage.seals.agree(salted[0].lineage.seals):
            names = f"{salted[0].model.name!r} and {engine.model.name!r}"
            raise InvalidRequestError(
                f"the engines of {names} have different salts, but a graph runs for one tenant: load them with the "
                "same salt, or use compile(tenant=...)"
            )
    return next(iter([*salted, *engines]), None)
