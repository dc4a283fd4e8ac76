"""What happens in an engine, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    time_s: float
    """When, in seconds of `time.perf_counter()`."""


@dataclass(frozen=True)
class RequestSubmitted(Event):
    """A prefill or decode that will run (one answered from the cache emits nothing)."""

    request_id: int
    kind: str
    author: str | None
    role: str | None


@dataclass(frozen=True)
class FirstToken(Event):
    """The first sampled token of a decode; `waited_s` counts from its submission."""

    request_id: int
    waited_s: float


@dataclass(frozen=True)
class RequestFinished(Event):
    """A request that ended; `outcome` is `done`, `cancelled`, `timed out` or `failed`.

    Counts are what it was charged for: every token that the engine encodes is charged to one request. What is encoded
    for its readers is charged to them.
    """

    request_id: int
    outcome: str
    tokens_encoded: int
    tokens_reused: int
    tokens_recomputed: int = 0
    tokens_beyond: int = 0
    """Of those encoded and recomputed, in messages that its view does not hold."""
    tokens_mapped: int = 0
    tokens_of_other_models: int = 0
    """Of those encoded, in words that another model had said."""


@dataclass(frozen=True)
class StepRan(Event):
    """One forward pass: its rows (requests served), its tokens, and how many requests were unfinished at its start."""

    duration_s: float
    rows: int
    decode_rows: int
    tokens: int
    unfinished: int


@dataclass(frozen=True)
class StepFailed(Event):
    """A forward pass that failed: it, or parts of it, are run again, and only calls that fail alone are given up."""

    rows: int
    tokens: int
    error: str


@dataclass(frozen=True)
class FileSkipped(Event):
    """A file of KV that was passed over, and why: it is missing, damaged, forged, a link, no file, another user's.

    What should have been in it is computed again.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class FileUnwritten(Event):
    """Files of KV cannot be written to a folder, and why; told once until one can be."""

    path: str
    """The folder's."""
    reason: str


@dataclass(frozen=True)
class CallPlaced(Event):
    """A call was given to one of several engines, and how that comes to what the call reads and it lacks.

    What it has takes nothing. Bytes and tokens are what was expected when it was placed.
    """

    request_id: int
    engine: str
    bytes_copied: int
    """Of KV that is copied there from other engines."""
    tokens_again: int
    """That it encodes again, with what these come from."""
    expected_s: float
    """Until the call is done."""


@dataclass(frozen=True)
class KVCopied(Event):
    """KV has come from one engine to another, or was not taken there: then it is encoded again."""

    source: str
    engine: str
    messages: int
    refused: int
    """How many of these were not taken."""
    bytes: int
    took_s: float


@dataclass(frozen=True)
class EngineCame(Event):
    """An engine elsewhere can be sent calls: at first, or again."""

    engine: str


@dataclass(frozen=True)
class EngineWent(Event):
    """An engine elsewhere is gone, and with it the KV that it had; calls under way there are run by others."""

    engine: str
    why: str
