"""What leads answers and calls of tools, and tells them apart.

Grammars are compiled before the engine is asked: it would keep the event loop that asks meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial

from choreo_agents.chat.tools import Described
from choreo_agents.engine import Constraint, Engine
from choreo_agents.models import LoadedModel, MakeConstraint, tools_format
from choreo_agents.sampling import Grammar, Sampling, TokenConstraint


class CallsOrAnswer:
    """Reads one message token by token, and tells whether it calls or answers; what may be both is taken for calls.

    Args:
        calls: Makes constraints to calls alone.
        answer: Makes constraints to the answer alone.
        ends: Tokens that end either.
    """

    def __init__(self, calls: MakeConstraint, answer: MakeConstraint, ends: frozenset[int]) -> None:
        self._calls, self._answer, self._ends = calls, answer, ends
        self._constraints = calls(ends), answer(ends)
        self.tokens: list[int] = []
        """All that were taken."""

    def take(self, token: int) -> bool | None:
        """Go on with this token, and tell whether it is an answer; None: nobody can know yet."""
        self.tokens.append(token)
        calls, answers = (_goes_on(constraint, token) for constraint in self._constraints)
        if calls and answers:
            return None
        return answers if calls or answers else self._is_answer(self.tokens[:-1])

    def ended(self) -> bool:
        """Tell whether it is an answer, when nothing follows; one that was cut as both might have been calls."""
        return self._is_answer(self.tokens)

    def _is_answer(self, tokens: Sequence[int]) -> bool:
        return not self._ends_as(self._calls, tokens) and self._ends_as(self._answer, tokens)

    def _ends_as(self, make: MakeConstraint, tokens: Sequence[int]) -> bool:
        constraint = make(self._ends)
        return all(_goes_on(constraint, token) for token in tokens) and (
            constraint.done or _goes_on(constraint, min(self._ends))
        )


def _goes_on(constraint: TokenConstraint, token: int) -> bool:
    try:
        constraint.take(token)
    except ValueError:
        return False
    return True


_KEPT = 64


class CompiledConstraints:
    """Of one tenant: the time that one takes would tell others what it asks for. May be used from any thread.

    Args:
        model: Whose answers are led.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._compiled = lru_cache(_KEPT)(partial(compiled, model))
        self._told_apart = lru_cache(_KEPT)(self._ways)

    def of(self, grammar: Grammar, tools: Described = ()) -> Constraint:
        """Return the constraint of an answer by a grammar, or of calls if it begins so.

        Raises `GrammarError` if there is none.

        Args:
            grammar: Of the answer.
            tools: What may be called in its place.
        """
        told = json.dumps(tools)
        calls = f", or calls of {told}" if tools else ""
        return Constraint(
            f"an answer of {grammar.plain()!r}{calls}", ConstrainedCall(grammar, told, self._compiled(grammar, told))
        )

    def ways(self, grammar: Grammar, tools: Described) -> Callable[[], CallsOrAnswer] | None:
        """Return what tells whether a message that is led so calls; None: each reader does, by its header."""
        return self._told_apart(grammar, json.dumps(tools))

    def _ways(self, grammar: Grammar, told: str) -> Callable[[], CallsOrAnswer] | None:
        model, how = self._model, tools_format(self._model.chat)
        if how.is_headed:
            return None
        calls = model.grammars.compile_call(how, json.loads(told), model.controls, several=True)
        return partial(CallsOrAnswer, calls, model.grammars.compile(grammar), frozenset(model.adapter.end_tokens))


class ConstrainedCall:
    """Makes constraints of what was compiled: here, or where it is sent to, for which what it is made of is enough.

    Args:
        grammar: As of `compiled`; `told`: likewise.
        made: Makes them, if that was compiled.
    """

    def __init__(self, grammar: Grammar | None, told: str, made: MakeConstraint | None = None) -> None:
        self._source, self._made = (grammar, told), made

    def __call__(self, model: LoadedModel, ends: frozenset[int]) -> TokenConstraint:
        if self._made is None:
            self._made = compiled(model, *self._source)
        return self._made(ends)

    def __reduce__(self) -> tuple[type[ConstrainedCall], tuple[Grammar | None, str]]:
        return ConstrainedCall, self._source


def compiled(model: LoadedModel, grammar: Grammar | None, told: str) -> MakeConstraint:
    """Compile what leads an answer by a grammar, or calls of tools, or either.

    Raises `GrammarError` if nothing can be.

    Args:
        model: Whose answer it is.
        grammar: Of the answer; None: it is a call.
        told: The tools, as JSON.
    """
    if grammar is not None and told == "[]":
        return model.grammars.compile(grammar)
    return model.grammars.compile_call(tools_format(model.chat), json.loads(told), model.controls, grammar)


def required_call(model: LoadedModel, tools: Described, names: Collection[str]) -> Constraint | None:
    """What leads an answer to one call of one of some tools; None: nothing has to be called.

    Args:
        model: Whose answer it is.
        tools: All that may be called.
        names: Of those of which one must be.

    Raises:
        GrammarError: The arguments of one cannot be led by their schema.
        InvalidRequestError: The extra `guided` is not installed, or the model's tokens cannot be guided.
    """
    wanted = [tool for tool in tools if tool["function"]["name"] in names]
    if not wanted:
        return None
    told = json.dumps(wanted)
    # Made before the engine asks for it, which waits for it.
    led_by = ConstrainedCall(None, told, compiled(model, None, told))
    return Constraint(f"one call of {json.dumps(wanted, sort_keys=True)}", led_by)


def led(
    engine: Engine, tools: Described, names: Collection[str], sampling: Sampling
) -> tuple[Sampling, Constraint | None, Callable[[], CallsOrAnswer] | None]:
    """How an answer is sampled, and what leads it: to one call, or, where none must be made, to calls or an answer.

    The third makes what tells these apart; None: the reader of calls does.

    Args:
        engine: Whose model answers.
        tools: All that may be called.
        names: Of those of which one must be; nothing else is said then.
        sampling: Its constraint is that of an answer that calls nothing.

    Raises:
        GrammarError: Nothing can be led by its constraint, or by what the arguments of a tool must be.
        InvalidRequestError: See `required_call`.
    """
    constraint, ways = required_call(engine.model, tools, names), None
    if sampling.constraint is None:
        return sampling, constraint, ways
    if constraint is None:
        compiled = engine.kv.get_or_create(CompiledConstraints, engine.model)
        constraint, ways = (
            compiled.of(sampling.constraint, tools),
            compiled.ways(sampling.constraint, tools) if tools else None,
        )
    return sampling.model_copy(update={"constraint": None}), constraint, ways
