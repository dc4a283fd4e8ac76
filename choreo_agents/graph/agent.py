"""Nodes of LangGraph that read their view of the conversation and add to it.

Agent         adds one message
Worker        has many instances, one `Send` branch each, every one with its own instruction
Synthesizer   merges parallel branches, from their KV or from their text
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langgraph.types import Send

from choreo_agents.arguments import refuses_unknown, require_known
from choreo_agents.chat import Described, Thinks, Tool, ToolChoice, described_tools
from choreo_agents.engine import Engine
from choreo_agents.engine.branches import SHORTER
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.outputs import OWN_CHANNELS, output_of
from choreo_agents.graph.prompts import AnyPrompt, Prompt, prompt_text, require_prompt, required_arguments, split_prompt
from choreo_agents.graph.run_context import RunContext
from choreo_agents.graph.sending import INSTRUCTION, SPEAKER, Selected, send, sent_text
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.turn.turn import AgentTurn, with_update
from choreo_agents.graph.view.reader_rules import MergeSpec, ReaderRules, stock_rules
from choreo_agents.graph.view.view import HistoryLimit, required_history
from choreo_agents.graph.visibility import (
    REENCODED,
    SHARED,
    Mode,
    Positions,
    Reads,
    VisibilityMode,
    VisibilityRule,
    rules_of,
)
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import Strategy, require_strategy

Choices = Sequence[str] | Callable[[Any], Sequence[str]]
"""Answers that an agent may choose from: fixed, or a function of the graph's state."""
Update = Callable[..., Any]
"""Makes an update of the state, a `Command` or None from an agent's message (a list, if it writes several at a time),
and, if it takes them, the state with that message, `runtime` and `config`."""


class Agent(Runnable[Any, dict[str, Any]]):
    """A LangGraph node that decodes one message over its view of the `handles` channel.

    In a `ChoreoGraph` edges say what it reads and `compile(engine=...)` gives it its engine. In a stock `StateGraph`
    over `ChoreoState` it takes both itself: `Agent("judge", engine=engine, reads={"pro": "shared"})`.

    Args:
        name: The speaker's name, in the header of its turns; also the node's name unless `add_node` gives another.
        system: Private system prompt, in its own views only: text, or a function of the graph's state.
        persona: Name of the speaker, if several nodes are one: each sees the others' messages and prompts as its own,
            and their system prompts are one private context, `<persona>.system`. By default the node is its own
            persona.
        prompt: Prompt for each call: a user's turn at the end of its view, or a function of the state that returns one.
            It stays in its persona's later views only. Or a prompt of a schema, which takes the place of a system
            prompt: its modules are encoded once for all agents of the engine, each without attending to the others;
            arguments and text of its own are the agent's alone.
        confidential: Whether its messages are a private context: a plan, a chain of thought.
        assistant_prefix: Text at the start of its messages, after the chat template's assistant header; by default its
            name.
        choices: The possible answers, or a function of the state that returns them: its message is, or ends with,
            exactly one of them, so that a vote or a stop can always be read. None or empty: any answer.
        answer_prefix: Text before the choice, after whatever else it says: "I vote for". Without it the choice is the
            whole message.
        response_format: Format of each message without tool calls: a pydantic model, or any type that pydantic knows; a
            JSON schema; a `re.compile(...)`; or `{"regex": ...}`, `{"grammar": ...}`. Needs the extra `guided`.
        output_key: Channel of the graph's state that also gets its answer: JSON as plain values, anything else as text;
            a list of these from a `Worker`.
        tools: Tools that it may call, as `bind_tools` takes them. Calls are `tool_calls` of its message, left to a
            `ToolNode`; its turns then start without its name, unless it has an `assistant_prefix`.
        tool_choice: `"auto"`: it decides; `"none"`: it does not see the tools; `"required"`, or a tool's name: its
            message is one such call, and nothing else. Needs the extra `guided`.
        adapter: Name of an adapter of its engine, which encodes its system prompt, its prompts, its messages, and text
            that is encoded again for it, but no modules. None: the engine's; `"base"`: the model alone.
        thinking: Whether it thinks before it answers, or for how many tokens at most; by default as its chat template
            has it. Thoughts are a private context, `<node>.thoughts`, a reasoning block of its message, and in no KV
            that others read: its answer is encoded again for them. `sampling` is of the answer.
        sampling: Sampling parameters. Without a seed, one is derived from the run's seed, the node, the superstep and
            the branch.
        on_output: Function of its message, and of the state with it, that returns an update of any channel, or a
            `Command`.
        history: Most messages that it sees, its own included, or a `HistoryLimit`; 0: none. By default all.
        tags: Tags of its runs in traces and streams, such as `nostream`.
        metadata: Metadata of its runs, beside the graph's.
        engine: Name of one of the graph's engines, if that has several; in a stock `StateGraph`, the engine itself.
        reads: Sources by name, in the order in which messages of one superstep are shown: a mode, or a `VisibilityRule`
            with a mode and a history. Input text is shared with it unless declared otherwise. `"*"`: everyone; as a
            source, all that are not named, without their confidential messages: `{"*": "reencoded", "critic":
            "private"}`.
        shared_system: Public root, for a stock `StateGraph`: a system prompt that all agents share.
        positions: `sequential`: the messages of its view follow each other; `parallel`: those of one superstep start at
            one position, and what follows starts after the longest of them. By default the graph's.

    Raises:
        InvalidRequestError: The prompt is no prompt, or a prompt of a schema beside a system prompt; a tool is invalid;
            or `choices` are given beside a `response_format` or tools.
        GrammarError: Its messages cannot be constrained to the response format; names the keyword of the schema in the
            way.
        PMLError: With an engine: the prompt's schema is longer than the model's context, or an argument than its slot.
    """

    @refuses_unknown()
    def __init__(
        self,
        name: str,
        *,
        system: Prompt | None = None,
        persona: str | None = None,
        prompt: AnyPrompt | None = None,
        confidential: bool = False,
        assistant_prefix: str | None = None,
        choices: Choices | None = None,
        answer_prefix: str = "",
        response_format: Any = None,
        output_key: str | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        adapter: str | None = None,
        thinking: Thinks = None,
        sampling: Sampling | None = None,
        on_output: Update | None = None,
        history: HistoryLimit | int | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        engine: Engine | str | None = None,
        reads: Reads | None = None,
        shared_system: str | None = None,
        positions: Positions | None = None,
    ) -> None:
        named = {"name": name, "persona": persona or name, "assistant_prefix": assistant_prefix or name}
        for option, text in named.items():
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"the {option} of an agent must be a non-empty string, not {text!r}")
        if positions not in (None, *get_args(Positions)):
            raise InvalidRequestError(f"positions must be 'sequential' or 'parallel', not {positions!r}")
        self.name: str = name
        self.__name__ = name  # as StateGraph.add_sequence asks for
        self.system = require_prompt(name, "system", system)
        self.persona = persona
        self.prompt, self.schema_prompt = split_prompt(name, prompt)
        _require_one_system(self)
        self.confidential = confidential
        self.assistant_prefix = assistant_prefix
        self.choices, self.answer_prefix = choices, answer_prefix
        self.adapter = adapter
        self.thinking = _required_thinking(name, thinking)
        self.sampling = _required_sampling(name, sampling)
        self.response_format, self.output_key = output_of(name, response_format), output_key
        self.writes_list = False
        self.tools: Described = described_tools(name, tools, tool_choice)
        _require_one_constraint(self)
        self.tool_choice = tool_choice
        self.on_output = _required_update(name, on_output)
        self.history = required_history(name, history)
        self.tags: Sequence[str] = [tags] if isinstance(tags, str) else list(tags)
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        if not isinstance(engine, Engine | str | None):
            raise InvalidRequestError(
                f"engine must be an Engine, such as Engine.load(), or the name of one: not {engine!r:.80}"
            )
        self.engine: Engine | None = None if isinstance(engine, str) else engine
        self.engine_name: str | None = engine if isinstance(engine, str) else None
        self.rules: Mapping[str, VisibilityRule] = rules_of(reads or {})
        self.shared_system = shared_system
        self.positions = positions
        self.n = 1
        """Number of messages that it writes per call."""
        self.merging: MergeSpec | None = None
        """The branches that it merges, if it is a synthesizer."""
        self._reader_rules: ReaderRules | None = None
        if self.engine is not None:
            stock_rules(self)  # raises if its prompt does not fit the engine's model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def bound(self, engine: Engine | None, rules: ReaderRules) -> Agent:
        """Return a copy that reads by these rules; an engine of its own stays."""
        agent = copy.copy(self)
        agent.engine = self.engine or engine
        agent.rules = rules.sources
        agent.shared_system = rules.shared_system
        agent._reader_rules = rules
        return agent

    def speaker(self, _: Any) -> str:
        """Return the name in the header of its turn, given the state."""
        return self.name

    def with_system(self, text: str) -> Agent:
        """Return a copy with another system prompt.

        Raises:
            InvalidRequestError: It has a prompt of a schema instead.
        """
        agent = copy.copy(self)
        agent.system = text
        _require_one_system(agent)
        return agent

    def reader_rules(self) -> ReaderRules:
        """Return the rules for its views: its graph's, or, in a stock `StateGraph`, its own."""
        return self._reader_rules or stock_rules(self)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:
        """Make one call: take the graph's state, return its update."""
        return run_coroutine(self.ainvoke(input, config, **options))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:
        """Make one call: take the graph's state, return its update."""
        require_known(f"invoke of {self!r}", options, ())
        config = ensure_config(config)
        update = await AgentTurn(self, serving_engine(self, config), input, config).speak()
        return await with_update(self, update, input, config)


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


class Synthesizer(Agent):
    """An agent that reads branches in a given order and writes one message about all of them (Parallel-Synthesis).

    `sequential`, `parallel` and `summary` read the branches' own encodings, so that none is encoded again; `text` does
    what a graph of strings does. Branches of one source stand in the order of their sends.

    Args:
        name: As for `Agent`.
        merges: The nodes whose messages it merges, in the order in which those of one superstep are shown; a mapping
            gives a source another rule than the strategy's.
        strategy: How branches are placed and read (see `Strategy`).
        summary: Under `summary`, the prompt by which each branch's author makes its message shorter.
        **options: As for `Agent`; `reads` are further sources. The cache mapper of its `adapter`, if it has one, maps
            the branches: each once, however often it is merged.
    """

    @refuses_unknown(Agent)
    def __init__(
        self,
        name: str,
        *,
        merges: Sequence[str] | Mapping[str, Mode | VisibilityRule],
        strategy: Strategy = "sequential",
        summary: str = SHORTER,
        **options: Any,
    ) -> None:
        if isinstance(merges, str) or not merges:
            raise InvalidRequestError(f"merges must be the names of nodes whose messages are merged, not {merges!r}")
        sources = merges if isinstance(merges, Mapping) else dict.fromkeys(merges, mode_of_strategy(strategy))
        positions = _positions(strategy)
        if options.get("positions") not in (None, positions):
            raise InvalidRequestError(
                f"strategy {strategy!r} sets the positions itself: leave positions={options['positions']!r} out"
            )
        reads = {**sources, **rules_of(options.pop("reads", {}))}
        super().__init__(name, reads=reads, **{**options, "positions": positions})
        self._shorter, self.strategy = summary, strategy
        self.merging: MergeSpec = self._merging(strategy, sources)

    def _merging(self, strategy: Strategy, sources: Iterable[str]) -> MergeSpec:
        return MergeSpec(frozenset(sources), strategy != "text", self._shorter if strategy == "summary" else None)

    def merging_by(self, strategy: Strategy) -> Synthesizer:
        """Return a copy that merges by another strategy; the rules for its sources are left to its graph."""
        changed = copy.copy(self)
        changed.strategy, changed.positions = strategy, _positions(strategy)
        changed.merging = self._merging(strategy, self.merging.sources)
        return changed


def mode_of_strategy(strategy: Strategy) -> VisibilityMode:
    """Return the visibility mode of the branches under a strategy; raise `InvalidRequestError` if there is no such
    strategy."""
    require_strategy(strategy)
    return REENCODED if strategy == "text" else SHARED


def _positions(strategy: Strategy) -> Positions:
    return "parallel" if strategy == "parallel" else "sequential"


def serving_engine(agent: Agent, config: RunnableConfig) -> Engine:
    """Return an agent's engine for a run: the run's tenant's engine, where there are several tenants.

    Raises:
        InvalidRequestError: It has no engine, or the run's tenant is not known.
    """
    if agent.engine is None:
        raise InvalidRequestError(
            f"agent {agent.name!r} has no engine: compile the ChoreoGraph with engine=..., or pass the agent an "
            f"engine{'' if agent.engine_name is None else f' instead of the name {agent.engine_name!r}'}"
        )
    context = RunContext.of(config)
    engine = context.twin(agent.engine)
    if agent.reader_rules().by_tenant:
        if context.tenant is None:
            raise InvalidRequestError(
                f"agent {agent.name!r} serves several tenants, but runs outside of its graph: run the graph that "
                "compile(tenant=...) returned"
            )
        engine = engine.tenant(context.tenant.salt)
    return engine


def _require_one_system(agent: Agent) -> None:
    """Raise `InvalidRequestError` if an agent has a prompt of a schema and a system prompt."""
    if agent.schema_prompt is not None and agent.system is not None:
        raise InvalidRequestError(
            f"agent {agent.name!r} has a prompt of schema {agent.schema_prompt.schema.name!r} and a system prompt, "
            "which take the same place: write the system prompt into the prompt, as <system>...</system>"
        )


def _require_one_constraint(agent: Agent) -> None:
    """Raise `InvalidRequestError` if an agent has two constraints, or writes a channel that it may not."""
    sources = {
        "choices": agent.choices is not None,
        "response_format": agent.response_format is not None,
        "a constraint of its sampling": agent.sampling.constraint is not None,
        "choices of its sampling": bool(agent.sampling.choices),
    }
    twice = [source for source, is_set in sources.items() if is_set]
    if agent.tools and (agent.choices is not None or agent.sampling.choices):
        raise InvalidRequestError(
            f"{agent.name!r} has tools and choices, but choices exclude calls: use "
            "response_format={'regex': 'yes|no'}, which works with tools, or leave one of them out"
        )
    if len(twice) > 1:
        raise InvalidRequestError(
            f"{agent.name!r} has several constraints of its answer: leave out {' or '.join(twice)}"
        )
    if (key := agent.output_key) is not None and (not isinstance(key, str) or key in ("", *OWN_CHANNELS)):
        raise InvalidRequestError(
            f"{agent.name!r} cannot write {key!r}: name another channel of the graph's state, one of your own"
        )


def _required_thinking(name: str, thinking: Any) -> Thinks:
    if thinking is not None and (not isinstance(thinking, int) or thinking < 0):
        raise InvalidRequestError(f"thinking of {name!r} must be True, False or a number of tokens, not {thinking!r}")
    return False if thinking == 0 else thinking


def _required_sampling(name: str, sampling: Any) -> Sampling:
    if isinstance(sampling, Mapping):
        try:
            sampling = Sampling(**sampling)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"the sampling of {name!r} is invalid: {error}") from error
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(f"the sampling of {name!r} must be a Sampling, not {type(sampling).__name__}")
    if sampling is not None and sampling.n != 1:
        raise InvalidRequestError(
            f"the sampling of {name!r} asks for {sampling.n} answers, but an agent gives one: use Worker({name!r}, "
            f"n={sampling.n})"
        )
    return Sampling() if sampling is None else sampling


def _required_update(name: str, update: Update | None) -> Update | None:
    if update is not None:
        if not callable(update):
            raise InvalidRequestError(f"on_output of {name!r} must be a function, not {type(update).__name__}")
        required_arguments(name, "on_output", update, ["said", "state"])
    return update
