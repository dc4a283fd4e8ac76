"""How a model speaks, ends, thinks and samples, as its small files have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from choreo_agents.models.adapter import max_positions
from choreo_agents.models.chat.telling import tools_format
from choreo_agents.models.chat.template import DATE, Template
from choreo_agents.models.chat.thinking import switched
from choreo_agents.models.chat.tools import ToolCall
from choreo_agents.sampling.defaults import checkpoint_sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from choreo_agents.models.chat import ChatFormat
    from choreo_agents.models.checkpoint import Checkpoint

_ONE_DAY, _OTHER_DAY = "1999-12-31", "2031-01-02"
_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class StopToken:
    """A token that ends an answer."""

    text: str
    id: int
    said_by: Sequence[str]
    """The files that name it."""
    closes: bool
    """Whether it is part of what closes a turn; else no message has it."""


@dataclass(frozen=True)
class ThoughtFacts:
    """How a model thinks before it answers."""

    begins: str
    ends: str
    usual: bool
    """Whether it does if nothing is said about it."""
    switch: str | None
    """The variable of the template that turns it on and off; or the words of instructions that turn it off."""
    unthinking: str
    """The header of an answer without thoughts."""
    kept: bool
    """Whether the template shows earlier thoughts again."""
    elsewhere: bool
    """Whether it also writes into other turns whether the model is to think."""


@dataclass(frozen=True)
class ToolFacts:
    """How a model is told of tools, and calls them."""

    own_words: bool
    """Whether the template knows nothing of tools: instructions tell of them in our words."""
    call: str
    """How a call is written."""
    result: str
    """How a result is; empty: as what a user says."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model's small files tell of it."""

    model_type: str
    context: int
    """Tokens."""
    layers: Mapping[str, int]
    """How many there are, by how far they see."""
    stop_tokens: Sequence[StopToken]
    turn_end: str
    """What closes an answer."""
    thinking: ThoughtFacts | None
    tools: ToolFacts
    default_instructions: str
    """What stands where nobody gives any."""
    writes_date: bool
    """Whether the template writes what day it is."""
    takes_turns: bool
    """Whether what several others say becomes one user's turn."""
    trims: Sequence[str]
    """Whose words the template leaves blanks around out of."""
    sampling: Mapping[str, Any]
    """What the checkpoint says about it."""

    def as_object(self) -> dict[str, Any]:
        """JSON-plain."""
        return asdict(self)


def facts_of(checkpoint: Checkpoint, template: Template, chat: ChatFormat) -> ModelFacts:
    """What the small files of a model tell."""
    tokenizer, config = template.tokenizer, checkpoint.config
    text = config.get_text_config()
    generation = checkpoint.generation()
    roles = {"instructions": chat.system, "users": chat.user, "answers": chat.assistant}
    return ModelFacts(
        model_type=config.model_type,
        context=max_positions(text),
        layers=_layers(text),
        stop_tokens=_stop_tokens(tokenizer, text, generation, chat),
        turn_end=chat.turn_end,
        thinking=_thinking(template, chat),
        tools=_tools(chat),
        default_instructions=chat.default_system.strip(),
        writes_date=_writes_date(template),
        takes_turns=chat.merges is not None,
        trims=[role for role, turn in roles.items() if turn.trims],
        sampling=checkpoint_sampling(generation).model_dump(exclude_unset=True),
    )


def _stop_tokens(
    tokenizer: PreTrainedTokenizerBase, text: PreTrainedConfig, generation: Mapping[str, Any], chat: ChatFormat
) -> list[StopToken]:
    """Those of the generation settings and of the tokenizer; where neither says, of the configuration."""
    told = {
        "generation_config.json": _listed(generation.get("eos_token_id")),
        "tokenizer": _listed(tokenizer.eos_token_id),
    }
    if not any(told.values()):
        told = {"config.json": _listed(getattr(text, "eos_token_id", None))}
    closing = tokenizer.encode(chat.turn_end, add_special_tokens=False)
    numbers = dict.fromkeys(number for numbers in told.values() for number in numbers)
    return [
        StopToken(
            str(tokenizer.convert_ids_to_tokens(number)),
            number,
            [file for file, said in told.items() if number in said],
            closes=number in closing,
        )
        for number in numbers
    ]


def _listed(said: Any) -> list[int]:
    return [] if said is None else [int(each) for each in said] if isinstance(said, list | tuple) else [int(said)]


def _thinking(template: Template, chat: ChatFormat) -> ThoughtFacts | None:
    how = chat.thoughts
    if how is None:
        return None
    switch, _, _ = switched(template)
    return ThoughtFacts(how.header, how.close, how.usual, switch, how.unthinking, how.kept, how.elsewhere)


def _tools(chat: ChatFormat) -> ToolFacts:
    how = tools_format(chat)
    call = how.grammar.write([ToolCall("find", {"thing": "kites"}, "abcdefgh1")]).text + how.call_end
    result = "" if how.result is None else how.result.around("In box 12.", "find", "abcdefgh1").text
    return ToolFacts(how.is_own, call, result)


def _writes_date(template: Template) -> bool:
    if template.tokenizer.chat_template is None:
        return False
    other = Template(template.tokenizer, template.options | {DATE: _OTHER_DAY})
    today = Template(template.tokenizer, template.options | {DATE: _ONE_DAY})
    return other.render([_QUESTION]) != today.render([_QUESTION])


def _layers(text: PreTrainedConfig) -> dict[str, int]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(kinds, list) or not kinds:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * text.num_hidden_layers
    seen = Counter(f"{window} tokens" if kind == "sliding_attention" and window else "all" for kind in kinds)
    return dict(seen)
