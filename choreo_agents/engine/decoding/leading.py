"""What leads the answers of a call: a list of them, a grammar, or a guide of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from choreo_agents.engine.calls import Decode, Guided
from choreo_agents.engine.decoding.allowed import answer_guide, answer_paths
from choreo_agents.engine.decoding.detokenizer import TextStop
from choreo_agents.errors import GrammarError, GuideError, InvalidRequestError
from choreo_agents.models import LoadedModel, MakeGuide
from choreo_agents.sampling import Grammar, Guide, GuidedAnswer, Sampling, TokenGuide


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
