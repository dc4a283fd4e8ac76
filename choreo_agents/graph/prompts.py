"""System prompts and prompts of agents: constants, or functions of the graph's state."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.runtime import get_runtime

from choreo_agents import pml
from choreo_agents.errors import InvalidRequestError

Words = str | BaseMessage | Sequence[str | BaseMessage]
"""Text, a message, or a sequence of these."""
Prompt = Words | Callable[..., Words | Awaitable[Words | None] | None]
"""A prompt: constant, or a sync or async function of the graph's state and, if it names them, of `runtime` and `config`
as for LangGraph's nodes. None: no prompt."""
AnyPrompt = Prompt | pml.Prompt
"""A prompt, or one of a schema, which imports modules."""


def require_prompt(name: str, field: str, prompt: Any) -> Any:
    """Return an agent's `system` or `prompt` after validation: text, None, or the function that makes it.

    Raises:
        InvalidRequestError: It is neither, or the function has parameters that cannot be filled.
    """
    if not callable(prompt):
        return text_of(name, field, prompt)
    if inspect.isclass(prompt):
        raise InvalidRequestError(f"the {field} of {name!r} must be text or a function that returns it, not {prompt!r}")
    required_arguments(name, field, prompt, ["state"])
    return prompt


def split_prompt(name: str, prompt: Any) -> tuple[Prompt | None, pml.Prompt | None]:
    """Return the prompt as a user's turn, or as a prompt of a schema; the other is None."""
    if isinstance(prompt, pml.Prompt):
        return None, prompt
    if isinstance(prompt, pml.Schema):
        raise InvalidRequestError(f"the prompt of {name!r} is a schema, not a prompt: pass schema.prompt(...)")
    return require_prompt(name, "prompt", prompt), None


def required_arguments(name: str, field: str, function: Callable[..., Any], positional: Sequence[str]) -> None:
    """Raise `InvalidRequestError` unless an agent's function can be called with these, `runtime` and `config`."""
    if _arguments(function, len(positional)) is None:
        raise InvalidRequestError(
            f"the {field} of {name!r} is a function with other parameters: it may take ({', '.join(positional)}), and "
            f"runtime or config by name, not {inspect.signature(function)}"
        )


async def called(function: Callable[..., Any], arguments: Sequence[Any], config: RunnableConfig) -> Any:
    """Call an agent's function, and return its result. It may take fewer positional arguments than there are."""
    count, named = _arguments(function, len(arguments)) or (len(arguments), ())
    extra: dict[str, Any] = {name: get_runtime() if name == "runtime" else config for name in named}
    result = function(*arguments[:count], **extra)
    return await result if inspect.isawaitable(result) else result


async def prompt_text(name: str, field: str, prompt: Any, state: Any, config: RunnableConfig) -> str | None:
    """Return the text of an agent's `system` or `prompt` in one call.

    Raises:
        InvalidRequestError: Its function returns no text.
    """
    return text_of(name, field, await called(prompt, [state], config)) if callable(prompt) else prompt


def text_of(name: str, field: str, prompt: Any) -> str | None:
    """Return a prompt as one text, joined by blank lines; raises `InvalidRequestError` for other types or roles."""
    parts = prompt if isinstance(prompt, list | tuple) else [prompt] if prompt is not None else []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, BaseMessage):
            _require_role(name, field, part)
            texts.append(str(part.text))
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise InvalidRequestError(
                f"the {field} of {name!r} must be text, a message or a list of these, not {type(part).__name__}"
            )
    return "\n\n".join(texts) if texts else None


def _require_role(name: str, field: str, message: BaseMessage) -> None:
    kind: type[BaseMessage] = SystemMessage if field == "system" else HumanMessage
    if not isinstance(message, kind):
        raise InvalidRequestError(
            f"the {field} of {name!r} contains a {type(message).__name__}, but only {kind.__name__} is allowed: "
            "messages of others are in the graph's state, and their visibility is declared"
        )
    blocks = message.content if isinstance(message.content, list) else []
    if kinds := [str(block.get("type")) for block in blocks if isinstance(block, dict) and block.get("type") != "text"]:
        raise InvalidRequestError(f"the {field} of {name!r} contains {kinds[0]!r}: only text can be encoded")


def _arguments(function: Callable[..., Any], most: int) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of positional arguments and the names of others that a function takes; None: not callable."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return most, ()  # built-ins may have no signature
    named = tuple(name for name in ("runtime", "config") if name in signature.parameters)
    takes_all = any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    for count in [most] if takes_all else range(1, most + 1):
        with suppress(TypeError):
            signature.bind(*[None] * count, **dict.fromkeys(named))
            return count, named
    return None
