"""Allowed answers as tokens: as the tokenizer spells them, with and without a space before them."""

from __future__ import annotations

from choreo_agents.engine.decoding.detokenizer import TextEnd, TextStop
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import FramedText, LoadedModel
from choreo_agents.sampling import AnswerGuide, AnswerPaths, Sampling
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
