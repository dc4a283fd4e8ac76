"""A node with many instances: one `Send` branch each, every one with its own instruction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.types import Send

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.sending import INSTRUCTION, SPEAKER, Selected, send, sent
from choreo_agents.graph.words.prompts import Prompt, words_of
from choreo_agents.pml import Prompt as SchemaPrompt


class Worker(Agent):
    """An agent that runs as many instances, all over one trunk: what they see is the same, what they are told differs.

    Its public root, system prompt and view come first, encoded once for all instances; the instruction comes last, as
    a user's turn. A route starts instances by `worker.send(state, "Write part 1.")`; without a route there is one,
    which is asked `prompt`. Instances run as one batch, and those who read them see them in the order of the sends.

    Args:
        name: As for `Agent`.
        n: Messages that each instance samples, over one view: a superstep's candidates.
        prompt: What an instance is asked that is sent without an instruction; or a prompt of a schema (see `Agent`),
            which all instances have.
        speaker: The name in the headers of instances that are not given one; by default `name`.
        **options: As for `Agent`.
    """

    @refuses_unknown(Agent)
    def __init__(
        self,
        name: str,
        *,
        n: int = 1,
        prompt: Prompt | SchemaPrompt | None = None,
        speaker: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise InvalidRequestError(f"a worker says at least one message at a time, not {n!r}")

        super().__init__(name, prompt=prompt, **options)
        self.prompt = instance_prompt(name, self.prompt)
        self.n = n
        self.writes_list = True
        self._speaker = speaker or name

    def speaker(self, state: Any) -> str:
        return sent(state, SPEAKER) or self._speaker

    @refuses_unknown()
    def send(
        self,
        state: Mapping[str, Any],
        instruction: str | None = None,
        *,
        speaker: str | None = None,
        node: str | None = None,
        shared: Iterable[Selected] | None = None,
        reencoded: Iterable[Selected] | None = None,
    ) -> Send:
        """One instance, for a route to return.

        Args:
            state: The state, as the route has it.
            instruction: What this instance is asked; None: the worker's own prompt.
            speaker: Its name in the header of what it says.
            node: The worker's node, if that is not called as the worker is.
            shared: Messages that it attends to, as for `send`; without them and `reencoded`, all that the graph lets
                it see.
            reencoded: Messages that it attends to in a fresh encoding.
        """
        if not isinstance(state, Mapping):
            raise InvalidRequestError(
                f"an instance of {self.name!r} takes its instruction with the state, which must be a TypedDict's, "
                f"not {type(state).__name__}"
            )
        for what, said in (("instruction", instruction), ("speaker", speaker)):
            if not isinstance(said, str | None):
                raise InvalidRequestError(
                    f"the {what} of an instance of {self.name!r} must be a text, not {said!r:.80}"
                )
        # Those of an instance that came before must not be handed on.
        channels = {INSTRUCTION: instruction, SPEAKER: speaker}
        target = node or self.name
        if shared is None and reencoded is None:
            return Send(target, {**state, **channels})
        return send(target, state, shared=shared or (), reencoded=reencoded or (), **channels)


def instance_prompt(name: str, usual: Prompt | None) -> Prompt:
    """What an instance of the worker of this name is asked: what it is sent, or what is usual."""

    async def asked(state: Any, config: RunnableConfig) -> str | None:
        told = sent(state, INSTRUCTION)
        return told if told is not None else await words_of(name, "prompt", usual, state, config)

    return asked
