"""What an agent is told and asked: always the same, or made of the graph's state when it speaks."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.runtime import get_runtime

from choreo_agents.errors import InvalidRequestError

Words = str | BaseMessage | Sequence[str | BaseMessage]
"""Text, a message, or several, which stand one behind the other."""
Prompt = Words | Callable[..., Words | Awaitable[Words | None] | None]
"""What an agent is told or asked: always the same, or a function, plain or async, of the graph's state, and of
`runtime` and `config`, if it names them, as LangGraph's nodes do. None: nothing."""

_SPOKEN_BY: Mapping[str, type[BaseMessage]] = {"system": SystemMessage, "prompt": HumanMessage}
_GIVEN = ("runtime", "config")


def required_words(name: str, what: str, words: Any) -> Any:
    """What an agent is told (`system`) or asked (`prompt`): text, None, or a function that is called when it speaks.

    Raises:
        InvalidRequestError: It is neither, or the function asks for what nobody can give it.
    """
    if not callable(words):
        return text_of(name, what, words)
    if inspect.isclass(words):
        raise InvalidRequestError(f"the {what} of {name!r} must be text or a function that makes it, not {words!r}")
    required_arguments(name, what, words, ["state"])
    return words


def required_arguments(name: str, what: str, function: Callable[..., Any], positional: Sequence[str]) -> None:
    """Raise `InvalidRequestError` if a function of an agent's cannot be called with these, `runtime` and `config`."""
    if _arguments(function, len(positional)) is None:
        raise InvalidRequestError(
            f"the {what} of {name!r} is a function that cannot be called: it may take ({', '.join(positional)}), and "
            f"runtime or config by name, not {inspect.signature(function)}"
        )


async def called(function: Callable[..., Any], given: Sequence[Any], config: RunnableConfig) -> Any:
    """What a function of an agent's makes of what is given to it, of which it may take less from the end."""
    count, named = _arguments(function, len(given)) or (len(given), ())
    extra: dict[str, Any] = {}
    if "runtime" in named:
        extra["runtime"] = get_runtime()
    if "config" in named:
        extra["config"] = config
    found = function(*given[:count], **extra)
    return await found if inspect.isawaitable(found) else found


async def words_of(name: str, what: str, words: Any, state: Any, config: RunnableConfig) -> str | None:
    """What an agent is told or asked in one call.

    Raises:
        InvalidRequestError: What its function makes is no words.
    """
    return text_of(name, what, await called(words, [state], config)) if callable(words) else words


def text_of(name: str, what: str, words: Any) -> str | None:
    """Words as one text, paragraphs apart; raises `InvalidRequestError` if they are none, or another's."""
    parts = words if isinstance(words, list | tuple) else [words] if words is not None else []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, BaseMessage):
            _require_spoken(name, what, part)
            texts.append(str(part.text))
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise InvalidRequestError(
                f"the {what} of {name!r} must be text, a message or a list of these, not {type(part).__name__}"
            )
    return "\n\n".join(texts) if texts else None


def _require_spoken(name: str, what: str, message: BaseMessage) -> None:
    kind = _SPOKEN_BY[what]
    if not isinstance(message, kind):
        raise InvalidRequestError(
            f"the {what} of {name!r} holds a {type(message).__name__}, and is a {kind.__name__}'s to say: what others "
            "said stands in the graph's state, and who sees it is declared"
        )
    blocks = message.content if isinstance(message.content, list) else []
    if other := [str(block.get("type")) for block in blocks if isinstance(block, dict) and block.get("type") != "text"]:
        raise InvalidRequestError(f"the {what} of {name!r} holds {other[0]!r}: only text can be encoded")


def _arguments(function: Callable[..., Any], most: int) -> tuple[int, tuple[str, ...]] | None:
    """How many positional arguments a function takes, and which others by name; None: it cannot be called so."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return most, ()  # built in: it says nothing about itself
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = tuple(each.name for each in parameters if each.name in _GIVEN and each.kind in by_name)
    others = [each for each in parameters if each.name not in named]
    if any(each.kind == each.VAR_POSITIONAL for each in others):
        return most, named
    places = [each for each in others if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in others if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if not places or len(needed) > most or any(each not in places for each in needed):
        return None
    return len(needed) or 1, named
