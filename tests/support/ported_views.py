"""What a call of a stock program is sent, and one of the ported program sees, in one form; and how they differ."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from choreo_agents import START
from choreo_agents.sampling import SamplerCall
from support.scripted_chat import CALL, ScriptedChat

_TURN = re.compile(r"<\|(system|user|assistant)\|> (.*?)<\|end\|>", re.DOTALL)
_TOLD = "\n\nYou may call tools."
_TOOL = re.compile(r'^\{"name": "(\w+)"', re.MULTILINE)

Difference = Literal["own", "role", "name"]
ROWS: Mapping[Difference, str] = {
    "own": "An agent's own messages",
    "role": "Whose turn words stand in",
    "name": "Whose name stands before words",
}
"""Of the porting table, those by which views may differ."""


@dataclass(frozen=True)
class Heard:
    """A message that a call sees."""

    role: str
    """`system`, `user`, `assistant` or `tool`: a tool's result."""
    speaker: str | None
    """The node that has said it, or the tool; None: input, instructions, and what is asked."""
    words: str
    calls: tuple[str, ...] = ()
    """Of tools, as JSON."""
    tools: tuple[str, ...] = ()
    """That it tells of."""
    is_named: bool = False
    """Whether the speaker's name can be read."""

    @property
    def key(self) -> tuple[object, ...]:
        """All but whether it stands in a user's turn or an assistant's, and whether its speaker is named."""
        role = self.role if self.role in ("system", "tool") else "said"
        return role, self.speaker, self.words, self.calls, self.tools


@dataclass(frozen=True)
class View:
    """What one call sees, and what it says."""

    agent: str
    said: str
    heard: tuple[Heard, ...]


def sent_views(model: ScriptedChat) -> list[View]:
    """Of a stock program's calls. Who has said a message is known by its name, its id or its words."""
    by_words = {call.said: call.agent for call in model.calls}
    views = []
    for call in model.calls:
        tools = tuple(convert_to_openai_tool(each)["function"]["name"] for each in call.tools)
        heard = tuple(_sent(each, model.speakers, by_words, tools) for each in call.messages)
        views.append(View(call.agent, call.said, heard))
    return views


def _sent(
    message: BaseMessage, speakers: Mapping[str, str], by_words: Mapping[str, str], tools: tuple[str, ...]
) -> Heard:
    words = message.text.strip()
    if isinstance(message, SystemMessage):
        return Heard("system", None, words, tools=tools)
    if isinstance(message, ToolMessage):
        return Heard("tool", message.name, words)
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    speaker = message.name or speakers.get(str(message.id)) or by_words.get(words)
    role = "assistant" if isinstance(message, AIMessage) else "user"
    written = tuple(_written(each["name"], each["args"]) for each in calls)
    return Heard(role, speaker, words, written, is_named=message.name is not None)


def seen_view(call: SamplerCall, said: str, decode: Any, speakers: Collection[str]) -> View:
    """Of a ported program's call.

    Args:
        call: As the engine makes it.
        said: What the script answers.
        decode: Makes text of tokens, special ones included.
        speakers: The program's nodes.
    """
    view = [_seen(author, decode([*tokens]), speakers) for author, tokens in call.view]
    return View(_node(call.author), said, tuple(each for each in view if each is not None))


def _seen(author: str | None, text: str, speakers: Collection[str]) -> Heard | None:
    if text == "<s>":
        return None
    turn = _TURN.fullmatch(text)
    assert turn is not None, text
    role, words = turn[1], turn[2].strip()
    speaker = None if author == START or str(author).endswith(".system") else _node(author)
    if role == "system":
        words, *told = words.split(_TOLD)
        return Heard(role, speaker, words, tools=tuple(name for each in told for name in _TOOL.findall(each)))
    name, _, rest = words.partition(": ")
    if role == "user" and speaker is not None and name != speaker:
        return Heard("tool", name, rest)
    if speaker is None and name in speakers:
        speaker = name  # what a function has handed on as input, under a name
    is_named = name == speaker
    words = rest if is_named else words
    calls = tuple(_written(**json.loads(each)) for each in CALL.findall(words))
    return Heard(role, speaker, CALL.sub("", words).strip(), calls, is_named=is_named)


def _written(name: str, args: Any = None, *, arguments: Any = None) -> str:
    return json.dumps({name: arguments if args is None else args})


def _node(author: str | None) -> str:
    return str(author).rpartition("|")[2]


def matched(stock: Sequence[View], ported: Sequence[View]) -> list[tuple[View, View]]:
    """Each call of one program with that of the other, by who says what."""

    def ordered(views: Sequence[View]) -> list[View]:
        return sorted(views, key=lambda each: (each.agent, each.said))

    one, other = ordered(stock), ordered(ported)
    assert [(each.agent, each.said) for each in one] == [(each.agent, each.said) for each in other]
    return list(zip(one, other, strict=True))


def differences(stock: View, ported: View) -> tuple[set[Difference], list[str]]:
    """In what a ported call differs that the porting table names; and, as text, in what else."""
    rows: set[Difference] = set()
    other: list[str] = []
    sent, seen = list(stock.heard), list(ported.heard)
    aligned = SequenceMatcher(None, [each.key for each in sent], [each.key for each in seen], autojunk=False)
    for kind, a, b, c, d in aligned.get_opcodes():
        if kind == "equal":
            for one, two in zip(sent[a:b], seen[c:d], strict=True):
                rows |= {"role"} if one.role != two.role else set()
                rows |= {"name"} if one.is_named != two.is_named else set()
            continue
        other += [f"{stock.agent} does not see {each}" for each in sent[a:b]]
        for each in seen[c:d]:
            if each.speaker == ported.agent:
                rows.add("own")
            else:
                other.append(f"{stock.agent} sees {each}")
    return rows, other
