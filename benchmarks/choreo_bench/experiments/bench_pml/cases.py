"""What is timed: prompts of so many cached tokens, made of random words, and example schemas with their prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from choreo_agents.models import LoadedModel
from choreo_agents.pml import Prompt, Schema, compile_prompt, compile_schema, module_of
from choreo_agents.pml.building import ModulePart
from choreo_bench.language import vocabulary

MODULE_TOKENS = 1024
"""Of each module, the last one excepted."""
NEW_TOKENS = 50
"""That are encoded with the prompt: a question, and the header of the answer (Prompt Cache, section 5.4)."""
_SUFFIX, _PROMPT = ".pml", ".prompt.pml"


@dataclass(frozen=True)
class PromptCase:
    """A prompt of a schema."""

    name: str
    """In tables and journals."""
    schema: Schema
    prompt: Prompt
    length: int | None = None
    """The cached tokens that were asked for; None: an example."""

    def sizes(self, model: LoadedModel) -> tuple[int, int]:
        """Tokens of modules that the prompt imports, and tokens that are encoded with it, the answer's header too."""
        assembly = compile_prompt(compile_schema(self.schema, model), self.prompt, model)
        header = len(model.encode(model.chat.header(None)))
        return assembly.cached_tokens, assembly.fresh_tokens + header


def case_of_length(model: LoadedModel, length: int, new: int = NEW_TOKENS) -> PromptCase:
    """A prompt of so many cached tokens in modules, and so many new ones; exactly so where a word is one token.

    Raises:
        ValueError: `length` or `new` leaves no room for a word.
    """
    rng = random.Random(f"modules {length}")
    chat = model.chat
    word = vocabulary.PEOPLE[0]
    around = len(model.encode(chat.turn("user", word))) - len(model.encode(f" {word}"))
    around += len(model.encode(chat.header(None)))
    left, asked = length - len(model.encode(chat.bos)), new - around
    if left < 1 or asked < 1:
        raise ValueError(f"{length} cached and {new} new tokens leave no room for words: ask for more")
    modules: list[ModulePart] = []
    while left:
        tokens = min(left, MODULE_TOKENS)
        modules.append(module_of(f"part-{len(modules) + 1}", _words(model, tokens, rng)))
        left -= tokens
    schema = Schema.from_python(f"random-{length}", modules)
    imports = "".join(f"<{module.name}/>" for module in modules)
    prompt = schema.prompt(f"{imports}<user>{_words(model, asked, rng).strip()}</user>")
    return PromptCase(f"{length:,} tokens", schema, prompt, length)


def example_cases(folder: Path) -> list[PromptCase]:
    """The schemas of a folder, each with the prompt beside it: `NAME.pml` and `NAME.prompt.pml`.

    Raises:
        PMLError: With all that is wrong in one of them. OSError: It cannot be read.
    """
    found = []
    for path in sorted(folder.glob(f"*{_PROMPT}")):
        schema = Schema.from_file(path.with_name(path.name.removesuffix(_PROMPT) + _SUFFIX))
        found.append(PromptCase(schema.name, schema, schema.prompt_file(path)))
    return found


def _words(model: LoadedModel, tokens: int, rng: random.Random) -> str:
    """Random words, a blank before each, up to so many tokens."""
    words = list[str]()
    while tokens > 0:
        words.append(f" {rng.choice(vocabulary.words())}")
        tokens -= len(model.encode(words[-1]))
    return "".join(words)
