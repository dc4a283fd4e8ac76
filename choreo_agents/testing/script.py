"""Scripted answers for agents in tests, in the place of a model."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from typing_extensions import TypeIs

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine
from choreo_agents.errors import ScriptError
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampler, SamplerCall, Sampling, ThinkingConstraint
from choreo_agents.testing.model import THINK, THOUGHT, ScriptedSampler, ScriptedTokenizer, generated, scripted_model

_CONTEXT = 32_768
_load = Engine.load  # a test may put `Script.load` in its place


@dataclass(frozen=True)
class PromptMessage:
    """A message that a call sees."""

    author: str | None
    """Author of the message: a node, `"__start__"` for input, `"scout.system"` for the system prompt of `scout`."""
    text: str
    """Text as the model reads it, without special tokens."""


@dataclass(frozen=True)
class ScriptedCall:
    """A decode that the script answered, one for each answer."""

    agent: str | None
    """Node that answers, prefixed with its subgraphs: `"team|judge"`; None if the call names no agent."""
    number: int
    """Index of this call among its agent's, from 0."""
    messages: tuple[PromptMessage, ...]
    """Messages in its view when it was submitted, in order."""
    header: str
    """Text that its message starts with, without special tokens."""
    sampling: Sampling
    said: str = ""
    """Text of the script, before the engine cuts it by `max_tokens` or `stop`, as with any model."""
    thought: str = ""
    """Thoughts before the answer, if it thinks."""

    @property
    def text(self) -> str:
        """Text of its view, a line for each message."""
        return "\n".join(message.text for message in self.messages)


Line = str | Callable[[ScriptedCall], str]
"""Answer of an agent to one call: text, or a function that returns it from the call. The function is called under the
engine's lock: it must be quick, and must not call the engine. Thoughts come before the text, as in `<think>Three and
two.</think>Five.`, and are left out where the agent does not think."""
Lines = Line | Sequence[Line]
"""One line for all calls, or a list that is used up in the order of calls. Parallel branches have no order: give them a
function of the call."""


class Script:
    """Scripted answers of each agent, for a real engine over a model that computes nothing.

    Memory, leases, streams, constraints, refusals and audits are the engine's own, and so is what ends a message:
    `max_tokens` cuts it, `stop` ends it. May be used from any thread, and by several engines.

    Args:
        lines: Lines by node name; in a subgraph as `team|judge`, or just `judge`.
        default: Line of agents that have none, and of calls that name no agent.
        context: Length of the model's context in tokens.

    Raises:
        ScriptError: Lines are not text. Calls raise it, too, before any work is done: their agent has no line or none
            left, or its line is not among the answers that it may give.
    """

    @refuses_unknown()
    def __init__(
        self, lines: Mapping[str, Lines] | None = None, *, default: Line | None = None, context: int = _CONTEXT
    ) -> None:
        if not isinstance(lines, Mapping | None):
            raise ScriptError(
                f"a script must map agents to lines, as in {{'writer': ...}}, or have a default=...: not {lines!r:.80}"
            )
        self._lines = dict(lines or {})
        for agent, entry in self._lines.items():
            if not (_is_line(entry) or (isinstance(entry, Sequence) and all(map(_is_line, entry)))):
                raise ScriptError(f"lines of {agent!r} must be text, a function, or a list of these, not {entry!r}")
        if default is not None and not _is_line(default):
            raise ScriptError(f"the default is used for many calls: it must be text or a function, not {default!r}")
        self._default = default
        self._said: defaultdict[str | None, set[int]] = defaultdict(set)
        """By agent, the numbers of its calls that were answered; withdrawn calls leave theirs to the next ones."""
        self._calls: list[ScriptedCall] = []
        self._lock = threading.RLock()
        self.model: LoadedModel = scripted_model(self._sampler, context)
        """Model to pass to `Engine.load`."""

    @refuses_unknown(_load)
    def load(self, model: object = None, **settings: Any) -> Engine:
        """Return an engine that answers from the script; takes what `Engine.load` takes, and loads no other model.

        A test can put it in the place of `Engine.load` where the code under test loads an engine itself.
        """
        of_models = ("device", "dtype", "prepacked", "chat", "generation_config")
        return _load(self.model, **{name: value for name, value in settings.items() if name not in of_models})

    def __repr__(self) -> str:
        return f"Script({', '.join(map(str, self._lines)) or 'default'}, {len(self._calls)} calls)"

    @property
    def calls(self) -> tuple[ScriptedCall, ...]:
        """Calls answered so far, in order; without those refused, or withdrawn before their first token."""
        with self._lock:
            return tuple(self._calls)

    @property
    def unsaid(self) -> dict[str, int]:
        """Number of lines left by agent, for lists that are not used up."""
        with self._lock:
            listed = {agent: lines for agent, lines in self._lines.items() if not _is_line(lines)}
            counts = {agent: len(lines) - len(self._said[agent]) for agent, lines in listed.items()}
            return {agent: left for agent, left in counts.items() if left}

    def _sampler(self, call: SamplerCall) -> Sampler:
        """Return the sampler of a decode; raise `ScriptError` if the script has no line that is allowed."""
        with self._lock:
            part = call.author if call.author in self._lines else (call.author or "").rpartition("|")[2]
            agent = part if part in self._lines else call.author
            number = next(number for number in count() if number not in self._said[agent])
            draft = self._read(call, number)
            if call.sampling.forced_token_ids is not None:
                recorded = replace(draft, said=self.model.decode([*call.sampling.forced_token_ids], special=False))
                self._calls.append(recorded)
                return ScriptedSampler(call, call.sampling.forced_token_ids, partial(self._withdraw, recorded))
            thought, text = _thought_before(self._text_of(agent, draft))
            thoughts = [*ScriptedTokenizer().spell(thought)]
            # A grammar may not allow the space before a first word, and tags of a forced tool call need lines of their
            # own.
            led = text.replace("<tool_call>{", "<tool_call>\n{").replace("}</tool_call>", "}\n</tool_call>")
            spaced = (space + variant if variant else "" for variant in (text, led) for space in (" ", ""))
            written = (generated(call, ScriptedTokenizer().spell(variant), thoughts) for variant in spaced)
            tokens = next((tokens for tokens in written if tokens is not None), None)
            if tokens is None:
                raise _not_allowed(agent, text, call.sampling)
            self._said[agent].add(number)
            thinks = isinstance(call.constraint and call.constraint(), ThinkingConstraint)
            recorded = replace(draft, said=text, thought=thought if thinks else "")
            self._calls.append(recorded)
            return ScriptedSampler(call, tokens, partial(self._withdraw, recorded, agent))

    def _withdraw(self, withdrawn: ScriptedCall, *used: str | None) -> None:
        """Remove a call that ended before its first token; `used` is the agent whose line it used up, if it did."""
        with self._lock:
            self._calls = [call for call in self._calls if call is not withdrawn]
            for agent in used:
                self._said[agent].discard(withdrawn.number)

    def _read(self, call: SamplerCall, number: int) -> ScriptedCall:
        messages = tuple(
            PromptMessage(author, self.model.decode([*tokens], special=False).strip()) for author, tokens in call.view
        )
        header = self.model.decode([*call.header], special=False).strip()
        return ScriptedCall(call.author, number, messages, header, call.sampling)

    def _text_of(self, agent: str | None, call: ScriptedCall) -> str:
        lines = self._default if agent is None else self._lines.get(agent, self._default)
        if lines is None:
            agents = ", ".join(map(repr, self._lines)) or "nobody"
            raise ScriptError(f"the script has no lines for {agent!r}, only for {agents}: add some, or a default")
        if not _is_line(lines) and call.number >= len(lines):
            raise ScriptError(
                f"{agent!r} has used all {len(lines)} lines of the script, and is called again after "
                f"{call.text[-80:]!r}: add a line, or pass one for all calls instead of a list"
            )
        line = lines if _is_line(lines) else lines[call.number]
        text = line(call) if callable(line) else line
        if not isinstance(text, str):
            raise ScriptError(f"the script of {agent!r} must return text, not {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ScriptError(f"the script of {agent!r} must return valid UTF-8, not {text!r}") from error
        return text


def _thought_before(text: str) -> tuple[str, str]:
    """Split a text into its thoughts and its answer."""
    thought, closed, answer = text.removeprefix(THINK).partition(THOUGHT)
    return (thought, answer.lstrip()) if closed and text.startswith(THINK) else ("", text)


def _is_line(lines: object) -> TypeIs[Line]:
    return isinstance(lines, str) or callable(lines)


def _not_allowed(agent: str | None, text: str, sampling: Sampling) -> ScriptError:
    if not sampling.choices:
        rule = sampling.constraint
        limit = "its constraint" if rule is None else f"the constraint {str(rule.plain())[:120]}"
        return ScriptError(f"{agent!r} cannot say {text!r} in {sampling.max_tokens} tokens: {limit} does not allow it")
    behind = f" behind {sampling.answer_prefix!r}" if sampling.answer_prefix else ""
    example = f"{sampling.answer_prefix} {sampling.choices[0]}".strip()
    return ScriptError(
        f"{agent!r} cannot say {text!r} in {sampling.max_tokens} tokens: one of {sampling.choices!r} is "
        f"allowed{behind}, such as {example!r}"
    )
