"""`Worker`: an agent with many instances, one `Send` branch each, every one with its own instruction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.types import Send

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.prompts import AnyPrompt, Prompt, prompt_text
from choreo_agents.graph.sending import INSTRUCTION, SPEAKER, Selected, send, sent_text


class Worker(Agent):
    """An agent that runs as many instances over one shared view; only their instructions differ.

    Its public root, system prompt and view come first, encoded once for all instances; the instruction comes last, as a
    user's turn. A route starts instances by `worker.send(state, "Write part 1.")`; without a route there is one
    instance with `prompt`. Instances run as one batch, and their readers see them in the order of the sends.

    Args:
        name: As for `Agent`.
        n: Messages that each instance samples over one view: candidates of one superstep.
        prompt: Prompt of an instance that is sent without an instruction; or a prompt of a schema (see `Agent`), which
            all instances have.
        speaker: The name in the headers of instances that are not given one; by default `name`.
        **options: As for `Agent`.
    """

    @refuses_unknown(Agent)
    def __init__(
        self,
        name: str,
        *,
        n: int = 1,
        prompt: AnyPrompt | None = None,
        speaker: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise InvalidRequestError(f"n of a worker must be at least 1, not {n!r}")

        super().__init__(name, prompt=prompt, **options)
        self.prompt = instance_prompt(name, self.prompt)
        self.n = n
        self.writes_list = True
        self._speaker = speaker or name

    def speaker(self, state: Any) -> str:
        return sent_text(state, SPEAKER) or self._speaker

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
        """Return the `Send` of one instance, for a route to return.

        Args:
            state: The state, as the route has it.
            instruction: The instance's prompt; None: the worker's own.
            speaker: Its name in the header of its message.
            node: The worker's node, if it has another name than the worker.
            shared: Messages that it attends to, as for `send`; without them and `reencoded`, all that the graph lets it
                see.
            reencoded: Messages that it attends to in a fresh encoding.
        """
        if not isinstance(state, Mapping):
            raise InvalidRequestError(
                f"an instance of {self.name!r} takes its instruction with the state, which must be a mapping, not "
                f"{type(state).__name__}"
            )
        for option, text in (("instruction", instruction), ("speaker", speaker)):
            if not isinstance(text, str | None):
                raise InvalidRequestError(
                    f"the {option} of an instance of {self.name!r} must be a string, not {text!r:.80}"
                )
        # Always set both: the state may have those of an earlier instance.
        channels = {INSTRUCTION: instruction, SPEAKER: speaker}
        target = node or self.name
        if shared is None and reencoded is None:
            return Send(target, {**state, **channels})
        return send(target, state, shared=shared or (), reencoded=reencoded or (), **channels)


def instance_prompt(name: str, usual: Prompt | None) -> Prompt:
    """Return the prompt function of a worker's instances: the instruction that was sent, or the usual prompt."""

    async def prompt(state: Any, config: RunnableConfig) -> str | None:
        instruction = sent_text(state, INSTRUCTION)
        return instruction if instruction is not None else await prompt_text(name, "prompt", usual, state, config)

    return prompt
