"""Long texts become tokens on a thread of their own, while whoever waits for them goes on: an event loop, say."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from choreo_agents.engine.calls import Decode, Prefill
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import FramedText, LoadedModel

LONG = 1 << 14
"""Characters from which on a text is long: about 15 ms."""


def tokens_to_come(model: LoadedModel, calls: Sequence[Prefill | Decode]) -> Future[list[Prefill | Decode]] | None:
    """The same calls, with tokens in the place of long texts; None: no text is long.

    What cannot be tokenized stays as it is: whoever makes the request of it says what is wrong.
    """
    if not any(map(_is_long, calls)):
        return None
    made: Future[list[Prefill | Decode]] = Future()

    def run() -> None:
        if made.set_running_or_notify_cancel():
            try:
                made.set_result([_tokenized(model, call) if _is_long(call) else call for call in calls])
            except BaseException as error:
                made.set_exception(error)

    # One for all of a batch: a thousand long texts are no reason for a thousand threads.
    threading.Thread(target=run, name="choreo-tokenizing", daemon=True).start()
    return made


def _name(call: Prefill | Decode) -> str:
    return "content" if isinstance(call, Prefill) else "header"


def _is_long(call: Prefill | Decode) -> bool:
    text = getattr(call, _name(call))
    return isinstance(text, str | FramedText) and len(text) >= LONG


def _tokenized(model: LoadedModel, call: Prefill | Decode) -> Prefill | Decode:
    text = getattr(call, _name(call))
    framed = FramedText.words(text) if call.words and isinstance(text, str) else text
    try:
        tokens: dict[str, Any] = {_name(call): tuple(model.encode(framed))}
    except (InvalidRequestError, TypeError, UnicodeError):
        return call
    return replace(call, **tokens)
