"""Constraints of answers and tool calls, and a classifier that distinguishes the two.

Grammars are compiled before the request reaches the engine, where compiling would block its event loop.
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
    """Classifier of one message, token by token: tool calls or an answer. What could be both counts as calls.

    Args:
        calls: Makes constraints that allow calls only.
        answer: Makes constraints that allow an answer only.
        ends: Tokens that end either.
    """

    def __init__(self, calls: MakeConstraint, answer: MakeConstraint, ends: frozenset[int]) -> None:
        self._calls, self._answer, self._ends = calls, answer, ends
        self._constraints = calls(ends), answer(ends)
        self.tokens: list[int] = []
        """All tokens so far."""

    def take(self, token: int) -> bool | None:
        """Add a token, and return whether the message is an answer; None: undecided."""
        self.tokens.append(token)
        calls, answers = (_goes_on(constraint, token) for constraint in self._constraints)
        if calls and answers:
            return None
        return answers if calls or answers else self._is_answer(self.tokens[:-1])

    def ended(self) -> bool:
        """Return whether the complete message is an answer; one that was cut while undecided counts as calls."""
        return self._is_answer(self.tokens)

    def _is_answer(self, tokens: Sequence[int]) -> bool:
        return not self._ends_as(self._calls, tokens) and self._ends_as(self._answer, tokens)

    def _ends_as(self, make: MakeConstraint, tokens: Sequence[int]) -> bool:
        constraint = make(self._ends)
        goes_on = partial(_goes_on, constraint)
        return all(map(goes_on, tokens)) and (constraint.done or goes_on(min(self._ends)))


def _goes_on(constraint: TokenConstraint, token: int) -> bool:
    try:
        constraint.take(token)
    except ValueError:
        return False
    return True


MakeClassifier = Callable[[], CallsOrAnswer]
_MAX_COMPILED = 64


class CompiledConstraints:
    """Cache of compiled constraints of one tenant; thread-safe.

    It is not shared: the time that a request takes would tell other tenants which grammars are cached.

    Args:
        model: Model that answers.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def of(
        self, grammar: Grammar | None, tools: Described = (), required: Collection[str] = ()
    ) -> tuple[Constraint, MakeClassifier | None]:
        """Return the constraint of an answer by a grammar, of calls in its place, or of one required call.

        The classifier of constrained messages comes as a factory; None: nothing can be both, or headers tell.

        Args:
            grammar: Grammar of the answer, if none is required to be a call.
            tools: Tools that may be called instead.
            required: Names of those of which one must be called.

        Raises:
            GrammarError: The grammar, or the schema of a tool's arguments, cannot be compiled.
            InvalidRequestError: The extra `guided` is not installed, or the model's tokens cannot be constrained.
        """
        if required:
            grammar, tools = None, tuple(tool for tool in tools if tool["function"]["name"] in required)
        text = json.dumps(tools)
        factory, classifier = self._compiled(grammar, text)
        key = f"one call of {json.dumps(tools, sort_keys=True)}"
        if grammar is not None:
            key = f"an answer of {grammar.plain()!r}" + (f", or calls of {text}" if tools else "")
        return Constraint(key, ConstrainedCall(grammar, text, factory)), classifier

    def _compile(self, grammar: Grammar | None, tools_json: str) -> tuple[MakeConstraint, MakeClassifier | None]:
        model, how = self._model, tools_format(self._model.chat)
        constraint = compile_constraint(model, grammar, tools_json)
        if grammar is None or tools_json == "[]" or how.is_headed:
            return constraint, None
        calls = model.grammars.compile_call(how, json.loads(tools_json), model.controls, several=True)
        ends = frozenset(model.adapter.end_tokens)
        return constraint, partial(CallsOrAnswer, calls, model.grammars.compile(grammar), ends)


class ConstrainedCall:
    """Factory of token constraints. Pickles as its source and compiles again in the process that it is sent to.

    Args:
        grammar: See `compile_constraint`, also for `tools_json`.
        factory: The compiled constraint, if there is one in this process.
    """

    def __init__(self, grammar: Grammar | None, tools_json: str, factory: MakeConstraint | None = None) -> None:
        self._source, self._factory = (grammar, tools_json), factory

    def __call__(self, model: LoadedModel, ends: frozenset[int]) -> TokenConstraint:
        if self._factory is None:
            self._factory = compile_constraint(model, *self._source)
        return self._factory(ends)

    def __reduce__(self) -> tuple[type[ConstrainedCall], tuple[Grammar | None, str]]:
        return ConstrainedCall, self._source


def compile_constraint(model: LoadedModel, grammar: Grammar | None, tools_json: str) -> MakeConstraint:
    """Compile the constraint of an answer by a grammar, of tool calls, or of either.

    Raises `GrammarError` if it cannot be compiled.

    Args:
        model: Model that answers.
        grammar: Grammar of the answer; None: calls only.
        tools_json: Descriptions of the tools, as JSON.
    """
    if grammar is not None and tools_json == "[]":
        return model.grammars.compile(grammar)
    return model.grammars.compile_call(tools_format(model.chat), json.loads(tools_json), model.controls, grammar)


def constrained_sampling(
    engine: Engine, tools: Described, names: Collection[str], sampling: Sampling
) -> tuple[Sampling, Constraint | None, MakeClassifier | None]:
    """Return sampling, constraint and classifier of an answer, constrained to a required call or to calls or an answer.

    The classifier comes as a factory; None: the parser of calls needs none. Raises what `CompiledConstraints.of` does.

    Args:
        engine: Engine of the model.
        tools: All tools.
        names: Names of those of which one must be called; the answer is nothing else then.
        sampling: Its constraint is that of an answer without calls.
    """
    grammar = sampling.constraint
    if grammar is None and not names:
        return sampling, None, None
    # Compiled here, and not on the engine's thread: its step would wait for it.
    compiled = engine.kv.get_or_create(CompiledConstraints, engine.model).of(grammar, tools, names)
    return sampling.model_copy(update={"constraint": None}), *compiled
