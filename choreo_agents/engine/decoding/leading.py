"""What leads the answers of a call: a list of them, a grammar, or a guide of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from choreo_agents.engine.calls import Decode, Guided
from choreo_agents.engine.decoding.detokenizer import TextEnd, TextStop
from choreo_agents.errors import GrammarError, GuideError, InvalidRequestError
from choreo_agents.models import FramedText, LoadedModel, MakeGuide
from choreo_agents.sampling import AnswerGuide, AnswerPaths, Grammar, Guide, GuidedAnswer, Sampling, TokenGuide
from choreo_agents.sampling.guiding.answers import Path


def answer_paths(model: LoadedModel, sampling: Sampling, ends: frozenset[int]) -> AnswerPaths | None:
    """What a decode may sample; None if its answers are not constrained.

    Args:
        model: Whose tokens they are.
        sampling: Its `choices`, `lead` and `max_tokens`.
        ends: Tokens that stop the decode or start its closing; if there are none, the model's own end tokens are.

    Raises:
        InvalidRequestError: A text cannot be written in tokens that hold no end, `max_tokens` is too small, or a choice
            starts another and no token can end it.
    """
    if not sampling.choices or sampling.forced is not None:
        return None
    adapter = model.adapter
    ends = frozenset(token for token in ends or adapter.end_tokens if 0 <= token < adapter.vocabulary_size)
    banned = ends | frozenset(adapter.end_tokens)
    choices = frozenset(path for choice in sampling.choices for path in _paths(model, choice, "choice", banned))
    lead = _paths(model, sampling.lead, "lead", banned) if sampling.lead else frozenset()
    paths = AnswerPaths(choices, lead, ends, sampling.max_tokens)
    if paths.needed > sampling.max_tokens:
        raise InvalidRequestError(
            f"the lead and the longest choice take up to {paths.needed} tokens, max_tokens is {sampling.max_tokens!r}: "
            "raise it, or shorten them"
        )
    if not ends and paths.is_ambiguous():
        raise InvalidRequestError(
            f"one of the choices {sampling.choices!r} starts another, and no token can say that it ends there: "
            "give stop_tokens"
        )
    return paths


def answer_guide(model: LoadedModel, sampling: Sampling, paths: AnswerPaths) -> AnswerGuide:
    """Leads one decode along these paths."""
    if not paths.lead:
        return AnswerGuide(paths)
    stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
    return AnswerGuide(paths, TextEnd(model, sampling.lead).complete, stop)


def _paths(model: LoadedModel, text: str, what: str, banned: frozenset[int]) -> frozenset[Path]:
    """The tokens of a text with and without a space before it.

    Headers end without a space, which most tokenizers write as part of the next word and some add by themselves.
    """
    written: dict[Path, str] = {}
    for spelled in (text, f" {text}"):
        try:
            path = tuple(model.encode(FramedText.words(spelled)))
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError(f"the {what} {text!r} cannot be tokenized: {error}") from error
        if path:
            written[path] = model.decode(list(path), special=False)
    # Special tokens have no text: a path with one of them says something else, as does one that was normalised.
    size = model.adapter.vocabulary_size
    faithful = [path for path, said in written.items() if said.endswith(text) and max(path) < size]
    if not faithful:
        raise InvalidRequestError(
            f"the {what} {text!r} cannot be written: its tokens say {sorted(written.values())!r}; "
            "give a text without special tokens that the tokenizer leaves as it is"
        )
    kept = frozenset(path for path in faithful if banned.isdisjoint(path))
    if not kept:
        raise InvalidRequestError(
            f"the {what} {text!r} cannot be written: it holds a token that ends the message; "
            "leave it out, or choose other stop_tokens or another closing"
        )
    return kept


@dataclass(frozen=True)
class LedAnswer:
    """Leads the answers of a call, each by a guide of its own."""

    longest: int
    """Tokens that are sampled at most."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    make: Callable[[], Guide]
    """The guide of a new answer."""


def led_answer(
    model: LoadedModel, call: Decode, stops: frozenset[int], compiled: Callable[[Grammar], MakeGuide]
) -> LedAnswer | None:
    """What leads the answers of a call; None: nothing, or its tokens are forced.

    Args:
        model: Whose tokens they are.
        call: Says what is allowed, at most once.
        stops: Tokens that stop the decode or start its closing; if there are none, the model's own end tokens do.
        compiled: Makes guides of a grammar.

    Raises:
        GrammarError: Its sampling's guide cannot be followed, and it is told why.
        InvalidRequestError: It says twice what is allowed, or what cannot be; the extra `guided` is missing.
    """
    if call.guide is not None:
        _require_alone(call.guide, call.sampling)
    return None if call.sampling.forced is not None else _led(model, call, stops, compiled)


def ends_replay(
    model: LoadedModel,
    call: Decode,
    stops: frozenset[int],
    compiled: Callable[[Grammar], MakeGuide],
    answer: Sequence[int],
) -> bool:
    """Whether an answer that a call replays was ended by the call's guide, and not by `max_tokens`.

    Args:
        model: Whose tokens they are.
        call: Has the guide.
        stops: As for `led_answer`.
        compiled: As for `led_answer`.
        answer: The tokens, without thoughts.
    """
    sampling = call.sampling
    if len(answer) < sampling.max_tokens or (call.guide is None and sampling.guide is None):
        return False
    try:
        led = _led(model, call, stops, compiled)
        assert led is not None
        guide = led.make()
        for number, token in enumerate(answer, start=1):
            guide.take(token)
            if guide.done:
                return number == len(answer) and not guide.cut
    except (GrammarError, GuideError):
        pass  # Whatever is forced is taken as it is.
    return False


def _led(
    model: LoadedModel, call: Decode, stops: frozenset[int], compiled: Callable[[Grammar], MakeGuide]
) -> LedAnswer | None:
    """See `led_answer`; of an answer that is really sampled."""
    sampling = call.sampling
    paths = answer_paths(model, sampling, stops)
    if paths is not None:
        return LedAnswer(paths.longest, paths.ends, partial(answer_guide, model, sampling, paths))
    own = call.guide
    ends = frozenset(t for t in stops or model.adapter.end_tokens if 0 <= t < model.adapter.vocabulary_size)
    make: Callable[[], TokenGuide]
    if own is not None:
        make = partial(own.make, model, ends)
    elif sampling.guide is not None:
        make = partial(compiled(sampling.guide), ends)
    else:
        return None

    def guide() -> Guide:
        stop = TextStop(model, sampling.stop).ends_with if sampling.stop else None
        size, text = model.adapter.vocabulary_size, partial(model.decode, special=False)
        may_be_cut = own is not None and own.may_be_cut
        return GuidedAnswer(make(), sampling.max_tokens, ends, size, text, stop, may_be_cut=may_be_cut)

    return LedAnswer(sampling.max_tokens, ends, guide)


def _require_alone(guide: Guided, sampling: Sampling) -> None:
    if not (isinstance(guide, Guided) and isinstance(guide.key, str) and guide.key and callable(guide.make)):
        raise InvalidRequestError(f"guide must be a Guided with a key and a function, not {guide!r}")
    if sampling.choices or sampling.guide is not None:
        raise InvalidRequestError(
            f"the guide {guide.key!r} and the sampling both say what the answer is: leave choices and guide out of it"
        )
