"""What a caller asks of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from torch import Tensor

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.sampling import Phase, SampledToken, Sampling, TokenConstraint

Content = str | PromptText | Sequence[int]
"""Text, tokenized without adding anything, or token ids.

A `str` is taken for a frame: control tokens count wherever they stand in it. It is for who writes all of it. What
somebody else has written comes as the words of a `PromptText`, as `engine.chat.turn` has them, or with
`escape_special_tokens=True`."""
Handles = Sequence[MessageHandle]
Places = Sequence[int | None] | int | None
"""Offsets, or a new offset, as the fields of `Prefill`."""


@refuses_unknown()
@dataclass(frozen=True)
class Thinking:
    """Lets a model think before it answers: it closes its thoughts itself, or is made to.

    What a call with it returns is the answer alone, encoded again behind a header of its own once it is there: at the
    price of a prefill of its length. Whoever reads it depends on the thoughts through its words only. The thoughts are
    a message of their own, confidential, by `author.thoughts` (see `Inspection.thoughts`), which lives as long as the
    call's lease of the answer. `max_tokens`, `stop` and `choices` are of the answer: empty lines before its first word
    are no part of it. `timeout_s` is of both.
    """

    end: str
    """What tells that thoughts are over, control tokens included: `</think>`."""
    answer: str | PromptText
    """The header of the answer, as readers see it."""
    before: str = ""
    """What stands between thoughts and `end`, where the model is made to close them."""
    after: PromptText = field(default_factory=PromptText)
    """What stands between `end` and the answer."""
    budget: int = 4096
    """Tokens of thoughts at most; 0: none."""
    counts: bool = False
    """If true, `max_tokens` bounds thoughts and answer together: thoughts that use it up leave no answer."""

    def __post_init__(self) -> None:
        texts = isinstance(self.end, str) and isinstance(self.before, str) and isinstance(self.after, PromptText)
        if not texts or not isinstance(self.answer, str | PromptText) or not self.end.strip():
            raise InvalidRequestError(
                "end and before must be texts, of which end says something, answer a text or a PromptText, and after a "
                f"PromptText: not {self!r}"
            )
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 0:
            raise InvalidRequestError(f"the budget of thoughts must be a number of tokens, not {self.budget!r}")

    @classmethod
    def of(cls, chat: ChatFormat, name: str | None, budget: int | None = None) -> Thinking:
        """As a model's chat template has it.

        Args:
            chat: Of the model.
            name: Who speaks.
            budget: Tokens of thoughts at most; None: the usual.

        Raises:
            InvalidRequestError: The template knows of no thoughts.
        """
        thoughts = chat.thoughts
        if thoughts is None:
            raise InvalidRequestError("the model's chat template knows of no thoughts: decode without thinking")
        before, _, after = thoughts.close.partition(thoughts.end)
        lead = PromptText.special(after)
        if name is not None:
            lead += PromptText.plain(name) + PromptText.special(":")
        opening = chat.assistant.opening(name).rstrip(" ")
        return cls(thoughts.end, opening, before, lead, cls.budget if budget is None else budget)


@refuses_unknown()
@dataclass(frozen=True)
class Constraint:
    """A constraint of your own to what a decode may say."""

    key: str
    """Names what it allows: two that allow the same may have one key, any others must not. Calls are remembered by it,
    in this process and the next."""
    make: Callable[[LoadedModel, frozenset[int]], TokenConstraint]
    """Makes a new constraint to one answer, of the model and the tokens that end a message. Called under the engine's
    lock, once for each answer that is really decoded, or replayed and as long as `max_tokens`: it must be quick."""
    may_be_cut: bool = False
    """If true, an answer that `max_tokens` cuts where it may not end is one with the finish reason `"length"`, and no
    `ConstraintError`. The key says so."""


@dataclass(frozen=True)
class PlayedCall:
    """A decode of a graph's run, or one that another engine has begun: what it says may be known before."""

    place: str
    """What tells it from all others of its run: its author, its superstep, its branch and which call it is."""
    tokens: tuple[int, ...] | None = None
    """Tokens that it has sampled before: each is taken in its place, whatever is drawn. All else is as it was then:
    constraints are followed, and what ended it ends it. None: it samples."""
    at_once: bool = False
    """Whether these, or those that its sampling forces, are encoded as a prompt is: no step samples any, and nobody is
    told their log-probabilities."""


class CallOptions(TypedDict, total=False):
    """Fields of `Prefill` and of `Decode`, by name."""

    offsets: Sequence[int | None] | None
    position: int | None
    author: str | None
    confidential: bool
    adapter: str | None
    priority: int
    timeout_s: float | None
    escape_special_tokens: bool


class PrefillOptions(CallOptions, total=False):
    """Fields of `Prefill`, by name."""

    role: str | None
    source: MessageHandle | None
    lazy: bool


class DecodeOptions(CallOptions, total=False):
    """Fields of `Decode`, by name."""

    sampling: Sampling
    turn_suffix: Content | None
    extra_stop_token_ids: Sequence[int]
    in_parts: bool
    idempotency_key: str | None
    regenerate: bool
    thinking: Thinking | None
    constraint: Constraint | None
    played: PlayedCall | None


@refuses_unknown()
@dataclass(frozen=True)
class Prefill:
    """Encode given tokens as a message (Prompt Choreography, section 2.3).

    Offsets are positions: `offsets[i]` is where parent i appears, `position` where the new message starts. Omitted
    ones follow the parent before; a list may hold None for single ones.
    """

    content: Content
    parents: Sequence[MessageHandle] = ()
    offsets: Sequence[int | None] | None = None
    position: int | None = None
    author: str | None = None
    """Who says it: for traces and audits."""
    role: str | None = None
    confidential: bool = False
    """Marks the message for audits (see `Inspection.audit`)."""
    source: MessageHandle | None = None
    """The message whose words these are, if they are encoded again: audits follow it. It may be another model's."""
    adapter: str | None = None
    """The name of the adapter that encodes it; None: the engine's own, `"base"`: the model alone."""
    lazy: bool = False
    """Whether it is encoded only when it is first read, in the same step as what reads it; until then it costs nothing,
    and if there is no room for it, its reader fails. Ignored for mapped copies."""
    maps: bool = False
    """Whether the KV is what the adapter's cache mapper makes of its one parent's (see `Branches.map`)."""
    recomputed: bool = False
    """Whether these words were encoded before, and are lost: what they cost is counted as recomputed."""
    priority: int = 0
    """Calls with a higher one come first; within one, first come first served."""
    timeout_s: float | None = None
    """Seconds from the call on after which it fails with `RequestTimeoutError`; None: never."""
    escape_special_tokens: bool = False
    """Whether a `str` is somebody's words, in which nothing is a control token, and no frame."""


@refuses_unknown()
@dataclass(frozen=True)
class Decode:
    """Generate a message that starts with `header` (Prompt Choreography, section 2.3).

    The header must not be empty: the first token is sampled from what its last token encodes.
    """

    header: Content
    parents: Sequence[MessageHandle] = ()
    offsets: Sequence[int | None] | None = None
    position: int | None = None
    sampling: Sampling = Sampling()
    author: str | None = None
    confidential: bool = False
    """As for `Prefill`."""
    turn_suffix: Content | None = None
    """Tokens that the message must end with, such as the end of a chat turn. Those the model has produced itself are
    not repeated; the first of them that is no blank also stops the decode, unless `sampling` names its own stop tokens.
    Where a closing is given, be it empty, any other end token of the model's ends the decode and is no part of the
    message: readers see a turn as its format closes it. None: the message is no turn, and keeps what ended it."""
    extra_stop_token_ids: Sequence[int] = ()
    """Tokens that end the message besides, as nothing else closes it then: `<|call|>`, where other turns are closed by
    `<|end|>`. They are part of it."""
    in_parts: bool = False
    """If true, the closing ends a part of the turn and not the decode, as `<|end|>` does between gpt-oss' messages."""
    idempotency_key: str | None = None
    """Names this very call: the same name and the same call again return the first answer instead of a new one."""
    regenerate: bool = False
    """Whether a call that has an answer gets a new one, which is remembered in the place of that."""
    logits_callback: Callable[[Tensor], None] | None = None
    """Shown the model's logits, [vocabulary], before every token, on the engine's thread: to measure by. It must not
    change them, nor raise, and copies what it keeps: the next step is computed where they are."""
    adapter: str | None = None
    """As for `Prefill`."""
    priority: int = 0
    """As for `Prefill`."""
    timeout_s: float | None = None
    """As for `Prefill`."""
    escape_special_tokens: bool = False
    """As for `Prefill`, of the header."""
    thinking: Thinking | None = None
    """How it thinks before it answers; the header is then where its thoughts start. None: it answers at once."""
    constraint: Constraint | None = None
    """Leads the answer, in the place of `choices` or a `constraint` of `sampling`; None: those do, or nothing."""
    played: PlayedCall | None = None
    """The call of a run that this is, with its answer if that is known; None: it is no such call, and samples."""


Calls = list[Prefill] | list[Decode]
"""A batch."""


@dataclass(frozen=True)
class StreamedToken:
    """One token as it was decoded; `text` is what it adds to the message, empty while a character is incomplete."""

    token: int
    text: str
    chosen: SampledToken
    """The token with its log-probabilities, if the call's sampling asked for them."""
    phase: Phase = "answer"
    """Whether it is thought, or stands between thoughts and answer, where the call thinks."""
