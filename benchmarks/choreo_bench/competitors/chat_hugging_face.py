"""The usual way today: a stock LangGraph graph of agents that exchange strings, each a `ChatHuggingFace`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
import transformers
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from choreo_bench.competitors.base import Absent, absent_on_failure

Said = Callable[[str, int], Sequence[int]]
"""The tokens that an agent must say in a round; the first round is 0."""


class ChatDebateState(TypedDict, total=False):
    """A debate's channels."""

    messages: Annotated[list[AnyMessage], add_messages]
    rounds_over: int


@dataclass(frozen=True)
class ChatRun:
    """Cost of a debate. The tuples have an entry for each call: by round, then by agent in the given order."""

    end_to_end_s: float
    """From the graph's start to its end."""
    ttft_s: tuple[float, ...]
    """From the node's start to its first token. A node starts when the one before it has ended."""
    prompts: tuple[tuple[int, ...], ...]
    """The tokens of each prompt, as they reached the model."""
    answers: tuple[str, ...]
    """The words that went on through the graph."""

    @property
    def calls(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return tuple(len(prompt) for prompt in self.prompts)


class ForcedCall:
    """Logits processor that leaves one token in each step, so that every step is still computed.

    Args:
        tokens: The answer.
    """

    prompt: Tensor
    """[1, tokens], as it reached the model."""
    answer: str
    started_s: float
    first_s: float
    """When the first token could be chosen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._steps = tuple(tokens), 0

    def make(self, chat: Any, messages: list[BaseMessage]) -> str:
        """The words of the answer.

        Raises:
            Absent: The model was stopped before its last token.
        """
        self.started_s = time.perf_counter()
        # A call has to bring all of this: what a `HuggingFacePipeline` was made with, it ignores.
        settings = {
            "do_sample": False,
            "eos_token_id": None,
            "logits_processor": [self],
            "max_new_tokens": len(self._tokens),
            "return_full_text": False,
        }
        answer = chat.invoke(messages, pipeline_kwargs=settings)
        if self._steps != len(self._tokens):
            raise Absent("ChatHuggingFace generated another number of tokens")
        # The template puts a space before a message's first word, as does that word's token.
        self.answer = str(answer.text).strip()
        return self.answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._steps == 0:
            self.first_s, self.prompt = time.perf_counter(), input_ids
        only = torch.full_like(scores, -torch.inf)
        only[:, self._tokens[self._steps]] = 0
        self._steps += 1
        return only


class ChatHuggingFaceDebate:
    """A debate, one call at a time: over a pipeline `ChatHuggingFace` has no async. A call encodes its whole chat."""

    name = "LangGraph with ChatHuggingFace"

    def __init__(self, path: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        self._chat: Any = chat_over(path, dtype, device)

    def debate(self, agents: Sequence[str], *, rounds: int, system: str, question: str, texts: Said) -> ChatRun:
        """MADpar: all agents answer in each round, seeing their own answers and the others' last ones.

        Args:
            agents: Their names.
            rounds: How often each speaks.
            system: The system message of all of them.
            question: What they are asked.
            said: The tokens of every answer; each costs a decode step.

        Raises:
            Absent: It cannot do this.
        """
        calls = {(turn, name): ForcedCall(texts(name, turn)) for turn in range(rounds) for name in agents}
        app = self._graph(agents, rounds, calls)
        inputs: ChatDebateState = {"messages": [SystemMessage(system), HumanMessage(question)], "rounds_over": 0}
        with absent_on_failure("ChatHuggingFace"), quietly():
            started = time.perf_counter()
            app.invoke(inputs, {"max_concurrency": 1, "recursion_limit": 2 * rounds + 1})
            elapsed = time.perf_counter() - started
        made = calls.values()
        return ChatRun(
            elapsed,
            tuple(call.first_s - call.started_s for call in made),
            tuple(tuple(call.prompt[0].tolist()) for call in made),
            tuple(call.answer for call in made),
        )

    def close(self) -> None:
        del self._chat

    def _graph(self, agents: Sequence[str], rounds: int, calls: Mapping[tuple[int, str], ForcedCall]) -> Any:
        def agent(name: str) -> Any:
            def node(state: ChatDebateState) -> ChatDebateState:
                words = calls[state["rounds_over"], name].make(self._chat, _chat_of(name, state["messages"]))
                return {"messages": [AIMessage(words, name=name)]}

            return node

        def count_round(state: ChatDebateState) -> ChatDebateState:
            return {"rounds_over": state["rounds_over"] + 1}

        def next_round(state: ChatDebateState) -> Sequence[str] | Literal["__end__"]:
            return "__end__" if state["rounds_over"] == rounds else list(agents)

        graph = StateGraph(ChatDebateState)
        graph.add_node("join", count_round)
        for name in agents:
            graph.add_node(name, agent(name))
            graph.add_edge(START, name)
        graph.add_edge(list(agents), "join")
        graph.add_conditional_edges("join", next_round, [*agents, "__end__"])
        return graph.compile()


def _chat_of(name: str, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Build an agent's chat: shared messages, its own answers, and the others' last ones. It ends with a user turn."""
    shared = [message for message in messages if message.name is None]
    own = [message for message in messages if message.name == name]
    last = {message.name: message.text for message in messages if message.name not in (None, name)}
    return [*shared, *own, *(HumanMessage(f"{other}: {words}") for other, words in last.items())]


def chat_over(path: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """A `ChatHuggingFace` over a checkpoint.

    Raises:
        Absent: It is not installed, or cannot serve it.
    """
    if find_spec("langchain_huggingface") is None:
        raise Absent("langchain-huggingface is not installed")
    with absent_on_failure("ChatHuggingFace"), quietly():
        langchain: Any = importlib.import_module("langchain_huggingface")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
        pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device=device)
        llm = langchain.HuggingFacePipeline(pipeline=pipeline)
        return langchain.ChatHuggingFace(llm=llm, tokenizer=tokenizer)


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings; and a pipeline changes the environment, which is put back."""
    logging, environment = transformers.utils.logging, dict(os.environ)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        os.environ.clear()
        os.environ.update(environment)
