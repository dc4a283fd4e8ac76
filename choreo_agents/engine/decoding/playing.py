"""Decodes whose tokens are known before: of a run that is replayed, or of an engine that was lost on the way."""

from __future__ import annotations

from choreo_agents.engine.calls import Decode
from choreo_agents.runtime.decoding import Decoding
from choreo_agents.sampling import TokenSampler


def is_known(call: Decode) -> bool:
    """Whether nothing of it is sampled, so that nobody has to be asked what it says."""
    return call.played is not None and call.played.at_once


def played(decoding: Decoding, call: Decode) -> Decoding:
    """Give a call's decoding the answer that is known of it, if one is."""
    told = call.played
    if told is None:
        return decoding
    tokens = told.tokens if call.sampling.forced is None else call.sampling.forced
    if told.at_once:
        decoding.known = tokens
    elif told.tokens is not None and isinstance(decoding.sampler, TokenSampler):
        decoding.sampler.played = told.tokens
    return decoding


def label_of(call: Decode, sample: int) -> str:
    """What tells a decode from others of its author over an equal view (see `Lineage.label`)."""
    return f"decode {sample}" if call.played is None else f"decode {sample} {call.played.place}"
