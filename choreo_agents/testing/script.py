"""What agents say in a test, in the place of a model."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from typing_extensions import TypeIs

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine
from choreo_agents.errors import ScriptError
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampler, SamplerCall, Sampling, ThinkingConstraint
from choreo_agents.testing.model import THINK, THOUGHT, ScriptedSampler, ScriptedTokenizer, follows, scripted_model

_CONTEXT = 32_768
_load = Engine.load  # a test may put `Script.load` in its place


@dataclass(frozen=True)
class PromptMessage:
    """A message that a call sees."""

    author: str | None
    """Who said it: a node, `"__start__"` for input, `"scout.system"` for the system prompt of `scout`."""
    text: str
    """As the model reads it, without special tokens."""


@dataclass(frozen=True)
class ScriptedCall:
    """A decode that a script was asked for, once for each answer."""

    agent: str | None
    """The node that speaks, behind the subgraphs that it stands in: `"team|judge"`; None: nobody was named."""
    number: int
    """Which of its agent's calls this is, from 0."""
    messages: tuple[PromptMessage, ...]
    """What its view held when it was made, in order."""
    header: str
    """What its message starts with, without special tokens."""
    sampling: Sampling
    said: str = ""
    """The words of the script; what the message holds of them is the engine's business, as with any model."""
    thought: str = ""
    """What it thinks before, if it does."""

    @property
    def text(self) -> str:
        """All that it sees, a line for each message."""
        return "\n".join(message.text for message in self.messages)


Line = str | Callable[[ScriptedCall], str]
"""What an agent says once: words, or a function that makes them of what the call sees. The function is called under the
engine's lock: it must be quick, and must not call the engine. What is thought first stands before the words, as in
`<think>Three and two.</think>Five.`, and is left out where the agent does not think."""
Lines = Line | Sequence[Line]
"""One line for always, or a list that is used up in the order in which calls are made. Calls of branches that run side
by side are made in no order: what these should say a function makes of what each of them sees."""


class Script:
    """What each agent says, for a real engine over a model that computes nothing.

    Memory, leases, streams, allowed answers, refusals and audits are the engine's own, and so is what ends a message:
    `max_tokens` cuts it off, `stop` ends it. May be used from any thread, and by several engines.

    Args:
        lines: Of each agent, by its node's name; behind a subgraph's as in `team|judge`, or alone.
        default: The line of agents that have none, and of calls that name nobody.
        context: The length of the model's context in tokens.

    Raises:
        ScriptError: Lines are no text. Calls raise it, too, before any work is done: their agent has no lines or has
            said them all, or what it should say is not among the answers that it may give.
    """

    @refuses_unknown()
    def __init__(
        self, lines: Mapping[str, Lines] | None = None, *, default: Line | None = None, context: int = _CONTEXT
    ) -> None:
        if not isinstance(lines, Mapping | None):
            raise ScriptError(
                f"a script has lines by agent, as in {{'writer': ...}}, or a default=...: not {lines!r:.80}"
            )
        self._lines = dict(lines or {})
        for agent, told in self._lines.items():
            if not (_is_line(told) or (isinstance(told, Sequence) and all(map(_is_line, told)))):
                raise ScriptError(f"{agent!r} must be given text, a function, or a list of these, not {told!r}")
        if default is not None and not _is_line(default):
            raise ScriptError(f"the default must be text or a function, for it is the line of many: not {default!r}")
        self._default = default
        self._asked: Counter[str | None] = Counter()
        self._unsaid: defaultdict[str | None, set[int]] = defaultdict(set)
        """Of each agent, the numbers of calls that were withdrawn: the next ones get them."""
        self._calls: list[ScriptedCall] = []
        self._lock = threading.RLock()
        self.model: LoadedModel = scripted_model(self._sampler, context)
        """What `Engine.load` takes."""

    @refuses_unknown(_load)
    def load(self, model: object = None, **settings: Any) -> Engine:
        """An engine that says what the script says; takes what `Engine.load` takes, and loads no other model.

        So it can stand in the place of `Engine.load` where what is tested loads an engine itself.
        """
        of_models = ("device", "dtype", "prepacked", "chat", "generation_config")
        return _load(self.model, **{name: given for name, given in settings.items() if name not in of_models})

    def __repr__(self) -> str:
        return f"Script({', '.join(map(str, self._lines)) or 'default'}, {len(self._calls)} calls)"

    @property
    def calls(self) -> tuple[ScriptedCall, ...]:
        """What was asked so far, in order, with what was said; not what was refused, or given up before a word."""
        with self._lock:
            return tuple(self._calls)

    @property
    def unsaid(self) -> dict[str, int]:
        """How many lines are left, by agent, of those whose list is not used up."""
        with self._lock:
            listed = {agent: lines for agent, lines in self._lines.items() if not _is_line(lines)}
            left = {a: len(lines) - self._asked[a] + len(self._unsaid[a]) for a, lines in listed.items()}
            return {agent: count for agent, count in left.items() if count}

    def _sampler(self, call: SamplerCall) -> Sampler:
        """What chooses the tokens of a decode; raises `ScriptError` if the script has none that it may say."""
        with self._lock:
            part = call.author if call.author in self._lines else (call.author or "").rpartition("|")[2]
            whose = part if part in self._lines else call.author
            number = min(self._unsaid[whose], default=self._asked[whose])
            asked = self._read(call, number)
            if call.sampling.forced_token_ids is not None:
                said = replace(asked, said=self.model.decode([*call.sampling.forced_token_ids], special=False))
                self._calls.append(said)
                return ScriptedSampler(call, call.sampling.forced_token_ids, partial(self._withdraw, said))
            thought, words = _thought_before(self._words(whose, asked))
            thoughts = [*ScriptedTokenizer().spell(thought)]
            # A grammar may not know the space that stands before a first word.
            # And the tags of a call that has to be made stand on lines of their own.
            led = words.replace("<tool_call>{", "<tool_call>\n{").replace("}</tool_call>", "}\n</tool_call>")
            spaced = (space + said if said else "" for said in (words, led) for space in (" ", ""))
            written = [[*ScriptedTokenizer().spell(said)] for said in spaced]
            tokens = next((tokens for tokens in written if follows(call, tokens, thoughts)), None)
            if tokens is None:
                raise _not_allowed(whose, words, call.sampling)
            self._asked[whose] = max(self._asked[whose], number + 1)
            self._unsaid[whose].discard(number)
            thinks = isinstance(call.constraint and call.constraint(), ThinkingConstraint)
            said = replace(asked, said=words, thought=thought if thinks else "")
            self._calls.append(said)
            return ScriptedSampler(call, tokens, partial(self._withdraw, said, whose), thoughts)

    def _withdraw(self, said: ScriptedCall, *used: str | None) -> None:
        """A call that goes no further before it has said anything; `used` is whose line it used up, if it did."""
        with self._lock:
            self._calls = [call for call in self._calls if call is not said]
            for whose in used:
                self._unsaid[whose].add(said.number)

    def _read(self, call: SamplerCall, number: int) -> ScriptedCall:
        seen = tuple(
            PromptMessage(author, self.model.decode([*tokens], special=False).strip()) for author, tokens in call.view
        )
        header = self.model.decode([*call.header], special=False).strip()
        return ScriptedCall(call.author, number, seen, header, call.sampling)

    def _words(self, whose: str | None, call: ScriptedCall) -> str:
        lines = self._default if whose is None else self._lines.get(whose, self._default)
        if lines is None:
            there = ", ".join(map(repr, self._lines)) or "nobody"
            raise ScriptError(f"the script has no lines for {whose!r}, only for {there}: add some, or a default")
        if not _is_line(lines) and call.number >= len(lines):
            raise ScriptError(
                f"{whose!r} has said all of its lines in the script ({len(lines)}), and is asked again after "
                f"{call.text[-80:]!r}: add a line, or give one for always instead of a list"
            )
        line = lines if _is_line(lines) else lines[call.number]
        words = line(call) if callable(line) else line
        if not isinstance(words, str):
            raise ScriptError(f"the script of {whose!r} must say text, not {words!r}")
        try:
            words.encode()
        except UnicodeEncodeError as error:
            raise ScriptError(f"the script of {whose!r} must say what UTF-8 can write, not {words!r}") from error
        return words


def _thought_before(words: str) -> tuple[str, str]:
    """What is thought before words are said, and these."""
    thought, closed, said = words.removeprefix(THINK).partition(THOUGHT)
    return (thought, said.lstrip()) if closed and words.startswith(THINK) else ("", words)


def _is_line(lines: object) -> TypeIs[Line]:
    return isinstance(lines, str) or callable(lines)


def _not_allowed(whose: str | None, words: str, sampling: Sampling) -> ScriptError:
    if not sampling.choices:
        asked = (
            "its constraint"
            if sampling.constraint is None
            else f"the constraint {str(sampling.constraint.plain())[:120]}"
        )
        return ScriptError(f"{whose!r} cannot say {words!r} in {sampling.max_tokens} tokens: {asked} does not allow it")
    behind = f" behind {sampling.answer_prefix!r}" if sampling.answer_prefix else ""
    example = f"{sampling.answer_prefix} {sampling.choices[0]}".strip()
    return ScriptError(
        f"{whose!r} cannot say {words!r} in {sampling.max_tokens} tokens: one of {sampling.choices!r} is allowed"
        f"{behind}, as in {example!r}"
    )
