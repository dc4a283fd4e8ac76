"""A chat model of LangChain's that says what a script says, and remembers what each call was sent."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import BaseModel, PrivateAttr

from choreo_agents.testing.script import Lines

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class SentCall:
    """What a stock program has sent to its model once."""

    agent: str
    """The node that has called it."""
    number: int
    """Which of its node's calls this is, from 0."""
    messages: tuple[BaseMessage, ...]
    tools: tuple[Any, ...]
    said: str
    """By the script, as a model without a format of its own for calls writes it."""

    @property
    def text(self) -> str:
        """All that it was sent, a line for each message."""
        return "\n".join(message.text for message in self.messages)


class ScriptedChat(BaseChatModel):
    """Says what a `Script` with the same lines says; nodes are known by the run's metadata."""

    lines: dict[str, Any]
    _asked: Counter[str] = PrivateAttr(default_factory=Counter)
    _calls: list[SentCall] = PrivateAttr(default_factory=list)
    _speakers: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def calls(self) -> list[SentCall]:
        return self._calls

    @property
    def speakers(self) -> dict[str, str]:
        """The node that has got each answer, by the answer's id."""
        return self._speakers

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Runnable[Any, AIMessage]:
        return self.bind(tools=[*tools])

    def with_structured_output(self, schema: Any, **_: Any) -> Runnable[Any, Any]:
        assert issubclass(schema, BaseModel)
        return self | RunnableLambda(lambda said: schema.model_validate_json(said.text))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        tools: Sequence[Any] = (),
        **_: Any,
    ) -> ChatResult:
        assert run_manager is not None
        agent = (run_manager.metadata or {})["langgraph_node"]
        call = SentCall(agent, self._asked[agent], tuple(messages), tuple(tools), "")
        self._asked[agent] += 1
        lines: Lines = self.lines[agent]
        line = lines if isinstance(lines, str) or callable(lines) else lines[call.number]
        words: str = line(call) if callable(line) else line  # type: ignore[arg-type]
        self._calls.append(SentCall(call.agent, call.number, call.messages, call.tools, words))
        asked = [json.loads(each) for each in CALL.findall(words)]
        name = f"answer-{len(self._calls)}"
        self._speakers[name] = agent
        answer = AIMessage(
            CALL.sub("", words).strip(),
            id=name,
            tool_calls=[
                {"name": each["name"], "args": each["arguments"], "id": f"{name}-{i}", "type": "tool_call"}
                for i, each in enumerate(asked)
            ],
        )
        return ChatResult(generations=[ChatGeneration(message=answer)])
