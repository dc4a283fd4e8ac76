"""A real checkpoint that says what a script says, as its family writes it: at its own logits, token by token."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from choreo_agents import Engine, Memory
from choreo_agents.models import load_model
from choreo_agents.sampling import Sampler, SamplerCall, ThinkingConstraint
from choreo_agents.testing.model import generated
from support.checkpoints import save_checkpoint
from support.speaking import OutputStream
from support.tool_templates import TOOL_CHECKPOINTS

JOKE = {"setup": "Why do cats purr?", "punchline": "Nobody else would."}
ANSWER = "Hello, I am a model, and I answer whatever you ask."
THOUGHTS = "Let me see."
_CALLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "magic_function(3)": ("magic_function", {"input": 3}),
    "magic_function_no_args()": ("magic_function_no_args", {}),
    "generate a Pirate greeting": ("greeting_generator", {"answer_style": "pirate"}),
    "Hello!": ("magic_function", {"input": 3}),
    "What is 3 + 4": ("my_adder_tool", {"a": 3, "b": 4}),
    "weather in San Francisco": ("get_weather", {"location": "San Francisco, CA"}),
    "\u4f60\u597d\u554a\u96c6\u56e2": (
        "unicode_customer",
        {"customer_name": "\u4f60\u597d\u554a\u96c6\u56e2", "description": "a Chinese technology company"},
    ),
    "\u3053\u3093\u306b\u3061\u306f\u682a\u5f0f\u4f1a\u793e": (
        "unicode_customer",
        {
            "customer_name": "\u3053\u3093\u306b\u3061\u306f\u682a\u5f0f\u4f1a\u793e",
            "description": "a Japanese company",
        },
    ),
}
"""What is called when this is asked."""
_DONE = ("It's sunny.",)
"""Results behind which nothing more is called."""


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    said = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call><|im_end|>'


def _listed(name: str, arguments: Mapping[str, Any]) -> str:
    said = json.dumps(arguments, ensure_ascii=False)
    return f'<|tool_call_start|>[{{"name": "{name}", "arguments": {said}}}]<|tool_call_end|><|im_end|>'


def _harmony(name: str, arguments: Mapping[str, Any]) -> str:
    said = json.dumps(arguments, ensure_ascii=False)
    return f" to=functions.{name}<|channel|>commentary json<|message|>{said}<|call|>"


CALLS: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {
    "Qwen 3": _hermes,
    "listed": _listed,
    "gpt-oss": _harmony,
}
"""How a call is written, by family."""


class FamilyScript:
    """What a model of one family says.

    Args:
        family: See `CALLS`.
    """

    def __init__(self, family: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="choreo-family-"))
        self.family, self.folder = family, save_checkpoint(folder, TOOL_CHECKPOINTS[family])
        self.model = load_model(self.folder)
        self.engine = Engine.load(replace(self.model, sampler=self._sampler), memory=Memory(kv_budget_bytes=1 << 26))
        self.prompts: list[str] = []
        """What each decode has read."""

    def _sampler(self, call: SamplerCall) -> Sampler:
        read = [token for _, tokens in call.view for token in tokens] + [*call.header]
        prompt = self.model.decode(read)
        self.prompts.append(prompt)
        constraint = None if call.constraint is None else call.constraint()
        thinks = isinstance(constraint, ThinkingConstraint)
        for text in self._texts(prompt, is_led=constraint is not None and not thinks):
            tokens = self.model.encode(self._thought(text) if thinks else text)
            if thinks or constraint is None or generated(call, tokens) is not None:
                return OutputStream(call, tokens)
        raise AssertionError(f"nothing that the script says is allowed behind {prompt[-200:]!r}")

    def _thought(self, text: str) -> str:
        thoughts = self.model.chat.thoughts
        assert thoughts is not None
        return f"{THOUGHTS}{thoughts.close}{text}"

    def _texts(self, prompt: str, *, is_led: bool) -> Iterator[str]:
        """What may be said, the likeliest first."""
        write = CALLS[self.family]
        asked = max(_CALLS, key=prompt.rfind)
        if prompt.rfind(asked) > max(map(prompt.rfind, _DONE)) and (is_led or self._tells_of(prompt, asked)):
            yield write(*_CALLS[asked])
        if is_led:
            for joke in (JOKE, {"setup": JOKE["setup"]}, {"setup": JOKE["setup"], "punchline": None}):
                yield json.dumps(joke) + self._end
                for name in ("Joke", "JokeDict"):
                    yield write(name, joke)
        is_open = self.family == "gpt-oss" and not prompt.endswith("<|message|>")
        yield ("<|channel|>final<|message|>" if is_open else "") + ANSWER + self._end

    @property
    def _end(self) -> str:
        return "<|return|>" if self.family == "gpt-oss" else "<|im_end|>"

    def _tells_of(self, prompt: str, asked: str) -> bool:
        """Whether the model is told of the tool that it would call, and asked for it."""
        return asked in prompt and _CALLS[asked][0] in prompt.replace(asked, "")


@lru_cache
def family_script(family: str) -> FamilyScript:
    """Of one family, made once."""
    return FamilyScript(family)
