"""Arguments of engine calls: prefills, decodes and their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.sampling import Phase, SampledToken, Sampling, TokenConstraint

Content = str | PromptText | Sequence[int]
"""Text, tokenized without adding anything, or token ids.

Control tokens in a `str` count as such, so it suits text that you write in full yourself. Pass other people's text as
the plain parts of a `PromptText`, as `engine.chat.turn` does, or with `escape_special_tokens=True`.
"""


@refuses_unknown()
@dataclass(frozen=True)
class Thinking:
    """Lets a model think before it answers; it ends its thoughts itself, or is made to.

    The call returns the answer alone, encoded again behind a header of its own, which costs a prefill of its length.
    Readers depend on the thoughts only through the answer's text. The thoughts are a confidential message by
    `author.thoughts` (see `Inspection.thoughts`), which lives as long as the call's lease of the answer. `max_tokens`,
    `stop` and `choices` apply to the answer; empty lines before its first word are not part of it. `timeout_s` covers
    both.
    """

    end: str
    """Text that ends the thoughts, control tokens included: `</think>`."""
    answer: str | PromptText
    """Header of the answer, as readers see it."""
    before: str = ""
    """Text between thoughts and `end`, where the model is made to end them."""
    after: PromptText = field(default_factory=PromptText)
    """Text between `end` and the answer."""
    budget: int = 4096
    """Most tokens of thoughts; 0: none."""
    counts: bool = False
    """Whether `max_tokens` bounds thoughts and answer together: thoughts that use it up leave no answer."""

    def __post_init__(self) -> None:
        texts = isinstance(self.end, str) and isinstance(self.before, str) and isinstance(self.after, PromptText)
        if not texts or not isinstance(self.answer, str | PromptText) or not self.end.strip():
            raise InvalidRequestError(
                "`end` (not empty) and `before` must be strings, `answer` a string or a PromptText, and `after` a "
                f"PromptText: not {self!r}"
            )
        if not isinstance(self.budget, int) or isinstance(self.budget, bool) or self.budget < 0:
            raise InvalidRequestError(f"the thinking budget must be a number of tokens, not {self.budget!r}")

    @classmethod
    def of(cls, chat: ChatFormat, name: str | None, budget: int | None = None) -> Thinking:
        """Return the settings of a model's chat template.

        Args:
            chat: Chat format of the model.
            name: Name of the author.
            budget: Most tokens of thoughts; None: the default.

        Raises:
            InvalidRequestError: The template has no thoughts.
        """
        thoughts = chat.thoughts
        if thoughts is None:
            raise InvalidRequestError("the model's chat template does not support thinking: leave `thinking` out")
        before, _, after = thoughts.close.partition(thoughts.end)
        lead = PromptText.special(after)
        if name is not None:
            lead += PromptText.plain(name) + PromptText.special(":")
        opening = chat.assistant.opening(name).rstrip(" ")
        return cls(thoughts.end, opening, before, lead, cls.budget if budget is None else budget)


@refuses_unknown()
@dataclass(frozen=True)
class Constraint:
    """A custom constraint on a decode's answer."""

    key: str
    """Name of what it allows: constraints with one key must allow the same. Calls are remembered by it, in this process
    and the next."""
    make: Callable[[LoadedModel, frozenset[int]], TokenConstraint]
    """Makes a new constraint for one answer, from the model and the tokens that end a message. Called under the
    engine's lock, once for each answer that is sampled, or replayed and as long as `max_tokens`: it must be quick."""
    may_be_cut: bool = False
    """Whether an answer that `max_tokens` cuts where it may not end is valid, with the finish reason `"length"`,
    instead of a `ConstraintError`. The key must reflect it."""


@dataclass(frozen=True)
class PlayedCall:
    """A decode of a graph's run, or one that another engine has begun, whose answer may be known."""

    place: str
    """Id of the call within its run: author, superstep, branch and number."""
    tokens: tuple[int, ...] | None = None
    """Tokens that it sampled before: each is taken in place of a drawn one. Constraints and end conditions apply as
    before. None: it samples."""
    at_once: bool = False
    """Whether these tokens, or those that its sampling forces, are encoded like a prompt: no step samples, and there
    are no log-probabilities."""


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
    """Author, for traces and audits."""
    role: str | None = None
    confidential: bool = False
    """Marks the message for audits (see `Inspection.audit`)."""
    source: MessageHandle | None = None
    """Message whose text this encodes again: audits follow it. It may be another model's."""
    adapter: str | None = None
    """Name of the adapter that encodes it; None: the engine's default, `"base"`: the base model."""
    lazy: bool = False
    """Whether it is encoded only when it is first read, in the same step as its reader; until then it costs nothing,
    and if there is no memory for it, its reader fails. Ignored for mapped copies."""
    maps: bool = False
    """Whether its KV is mapped from its one parent's by the adapter's cache mapper (see `Branches.map`)."""
    recomputed: bool = False
    """Whether this text was encoded before and lost: its tokens are counted as recomputed."""
    priority: int = 0
    """Priority; higher calls come first, equal ones first come first served."""
    timeout_s: float | None = None
    """Seconds after which the call fails with `RequestTimeoutError`; None: never."""
    escape_special_tokens: bool = False
    """Whether a `str` is plain text, in which nothing is a control token."""


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
    """Same as for `Prefill`."""
    turn_suffix: Content | None = None
    """Tokens that the message must end with, such as the end of a chat turn. Those the model has generated itself
    are not repeated; the first of them that is not blank also stops the decode, unless `sampling` names its own stop
    tokens. Where a suffix is given, even an empty one, any other end token of the model ends the decode and is not
    part of the message: readers see a turn as its format ends it. None: the message is not a turn, and keeps its end
    token."""
    extra_stop_token_ids: Sequence[int] = ()
    """More tokens that end the message, in place of the turn suffix, and are part of it: `<|call|>`, where other turns
    end with `<|end|>`."""
    in_parts: bool = False
    """Whether the suffix ends a part of the turn and not the decode, as `<|end|>` does between gpt-oss' messages."""
    idempotency_key: str | None = None
    """Key of this very call: the same call with the same key returns the first answer instead of a new one."""
    regenerate: bool = False
    """Whether a call that has an answer gets a new one, which replaces the remembered one."""
    logits_callback: Callable[[Tensor], None] | None = None
    """Called with the model's logits, [vocabulary], before every token, on the engine's thread: for measurements. It
    must not change them, nor raise, and must copy what it keeps: the next step overwrites them."""
    adapter: str | None = None
    """Same as for `Prefill`."""
    priority: int = 0
    """Same as for `Prefill`."""
    timeout_s: float | None = None
    """Same as for `Prefill`."""
    escape_special_tokens: bool = False
    """Same as for `Prefill`, for the header."""
    thinking: Thinking | None = None
    """How it thinks before it answers; the header then starts its thoughts. None: it answers at once."""
    constraint: Constraint | None = None
    """Constraint on the answer, in place of `choices` or a `constraint` of `sampling`; None: those apply, if any."""
    played: PlayedCall | None = None
    """Id of the call in a run, with its answer if that is known; None: it is no such call, and samples."""


Calls = list[Prefill] | list[Decode]
"""A batch of calls."""


@dataclass(frozen=True)
class StreamedToken:
    """A decoded token; `text` is what it adds to the message, empty while a character is incomplete."""

    token: int
    text: str
    chosen: SampledToken
    """The token with its log-probabilities, if the call's sampling asked for them."""
    phase: Phase = "answer"
    """Part of the message it belongs to, where the call thinks: thoughts, answer, or what stands between."""
