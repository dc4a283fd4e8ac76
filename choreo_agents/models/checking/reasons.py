"""Why a model is fed otherwise than its chat template would write the same conversation."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Named in reports; the value is the sentence that they print."""

    NAMES = "the template has no names: they are the first words of a turn"
    HEADER_NAME = "the answer's header names who speaks, which the template does only once it is said"
    AS_ENCODED = (
        "KV on shared edges stands as encoded: every answer keeps the header it was asked for with, such as an empty "
        "block of thoughts"
    )
    MERGED = (
        "users and model must take turns in the template, which is given what others say as one user's turn; on shared "
        "edges KV stands as encoded: other agents' turns are the model's"
    )
    LATER_DROPPED = "the template drops later instructions: they are a developer's or user's turn here"
    LATER_HOISTED = "the template puts later instructions in the place of the first: they keep their own turn here"
    LATER_JOINED = "the template puts later instructions behind the first, as one: they keep their own turn here"
    LATER_BARE = "nothing opens later instructions in the template: they are a user's turn here"
    LATER_RAISES = "the template raises at later instructions: they are a user's words here, and given to it as such"
    NO_SYSTEM = "the template has no instructions: they are the first words of the first user's turn"
    LAST_USER = "the template has instructions only in a user's turn that comes last: they stay in the first here"
    THOUGHTS = "thoughts are left out of what others see, and of what is read in later turns"
    OPENS_THOUGHTS = "the answer's header opens the thoughts, which the template leaves to the model"
    NO_OPENING = "the template opens an answer only behind a question: here an answer opens as it would there"
    BLANK = "a blank at the end of the answer's header is left to the first word"
    NO_BLANK = "the template's prompt ends without the blank that it has before an answer: it is written here"
    LAST_OPENING = "the template opens the last turn otherwise than the same turn with others behind it"
    LAST_END = "the template closes the last turn otherwise than the same turn with others behind it"
    GOES_ON = (
        "the template takes an answer that nothing follows for the beginning of the next, behind the same header: here "
        "it is over, and the next has its own"
    )
    JOINTS = "every message is tokens of its own: none is joined across two of them"
    UNKNOWN = "not explained: please report it"
