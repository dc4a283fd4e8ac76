"""Compiles grammars over one model's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from choreo_agents.errors import GrammarError, InvalidRequestError
from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.constraints.calls import call_grammar
from choreo_agents.models.constraints.masks import ByteConstraint, GrammarConstraint, GrammarMasks
from choreo_agents.models.constraints.sources import limits, llguidance, source_of, with_answer
from choreo_agents.models.safe_tokenization import is_control_text
from choreo_agents.sampling import Grammar, TokenConstraint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MakeConstraint = Callable[[frozenset[int]], TokenConstraint]
"""Makes a constraint for one answer, from the tokens that may end it; text tokens among them do not."""

_CALLS = 64
"""Size of each model's cache of call grammars: an agent needs its own at each turn."""


class Grammars:
    """A compiler of constraints over the tokens of one model.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: Width of its logits, in tokens.
        ends: Its end tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> None:
        self._ends = frozenset(ends)
        self._bytes_of: Callable[[int], bytes] | None = getattr(tokenizer, "bytes_of", None)
        self._tokens: Any = _byte_tokens() if self._bytes_of else _make_tokens(tokenizer, vocabulary, self._ends)
        self._filler = None if self._bytes_of else GrammarMasks(self._tokens, vocabulary, self._ends)
        self._calls = lru_cache(_CALLS)(self._matcher)

    def compile(self, grammar: Grammar) -> MakeConstraint:
        """Compile a grammar of answers. Takes milliseconds; the result is not cached.

        Raises:
            GrammarError: It cannot constrain this model's answers; says why.
        """
        return partial(self._constraint, self._matcher(source_of(grammar), grammar.plain()))

    def compile_call(
        self,
        how: ToolsFormat,
        tools: Sequence[Mapping[str, Any]],
        controls: Mapping[int, str],
        answer: Grammar | None = None,
        *,
        several: bool = False,
    ) -> MakeConstraint:
        """Compile a grammar of one call of one of these tools. The result is cached.

        Args:
            how: The model's format of calls.
            tools: Descriptions of the tools.
            controls: The model's control tokens.
            answer: Grammar of an answer that may take the place of one or more calls; then nothing is cached.
            several: Whether several calls may be made; always, if there is `answer`.

        Raises:
            GrammarError: The schema of a tool cannot constrain its arguments; says why.
        """
        numbers = {text: number for number, text in controls.items()}
        description = "a call of " + ", ".join(function_of(tool)["name"] for tool in tools)
        answers = answer is not None
        grammar = call_grammar(how, tools, numbers, several=several or answers, answers=answers)
        # Control tokens of calls alone: an answer's own grammar never allows any.
        marks = frozenset(number for number in controls if f"<[{number}]>" in grammar)
        if answer is None:
            return partial(self._constraint, self._calls(grammar, description), marks=marks)
        matcher = self._matcher(with_answer(grammar, answer), f"{description} or {answer.plain()!r}")
        return partial(self._constraint, matcher, marks=marks)

    def _matcher(self, source: str, description: Any) -> Any:
        matcher = llguidance().LLMatcher(self._tokens, source, log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(f"cannot compile {description!r} for this model: {matcher.get_error().strip()}")
        return matcher

    def _constraint(self, compiled: Any, ends: frozenset[int], marks: frozenset[int] = frozenset()) -> TokenConstraint:
        matcher = compiled.deep_copy()
        if self._bytes_of is not None:
            return ByteConstraint(matcher, self._bytes_of, ends)
        assert self._filler is not None
        words = self._filler.with_marks(marks - ends)
        return GrammarConstraint(self._filler, matcher, self._filler.usable_ends(ends), words)


def _make_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> Any:
    """Return llguidance's view of a Hugging Face tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidRequestError(
            f"tokenizer {type(tokenizer).__name__} does not give the bytes of its tokens, so that answers cannot be "
            "constrained: save the model with a tokenizer.json"
        )
    settings = json.loads(backend.to_str())
    settings |= {"truncation": None, "padding": None}
    for token in settings["added_tokens"]:
        # Also control tokens that are not special, such as tags of thoughts and tool calls: plain text never has them.
        token["special"] = token["special"] or is_control_text(token["content"])
    added = max((token["id"] for token in settings["added_tokens"]), default=0) + 1
    size = max(vocabulary, added, len(tokenizer))
    # Only ids below `len(tokenizer)`, else llguidance chooses one: our constraints know the end tokens themselves.
    end = sorted(token for token in ends if token < len(tokenizer))
    try:
        return llguidance().LLTokenizer(json.dumps(settings), n_vocab=size, eos_token=end or None)
    except ValueError as error:
        raise InvalidRequestError(
            f"the tokens of {type(tokenizer).__name__} cannot be constrained: {error}; use a model with byte-level "
            "tokens"
        ) from error


def _byte_tokens() -> Any:
    """Return a vocabulary of all bytes and an end token."""
    library = llguidance()
    return library.LLTokenizer(library._tokenizer.TokenizerWrapper(_Bytes()))


class _Bytes:
    """A tokenizer of bytes, with the attributes that llguidance reads."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
