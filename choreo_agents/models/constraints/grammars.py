"""Grammars over one model's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from choreo_agents.errors import GrammarError, InvalidRequestError
from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.constraints.calls import call_grammar
from choreo_agents.models.constraints.masks import ByteConstraint, GrammarConstraint, GrammarMasks
from choreo_agents.models.constraints.sources import LENIENT, beside, limits, llguidance, log_unenforced, source_of
from choreo_agents.models.safe_tokenization import is_control_text
from choreo_agents.sampling import Grammar, TokenConstraint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MakeConstraint = Callable[[frozenset[int]], TokenConstraint]
"""A new constraint to one answer, which these tokens may end; those of them that are words are the grammar's."""

_CALLS = 64
"""Grammars of calls that are remembered, for each model: an agent makes its own at each turn."""


class Grammars:
    """Makes constraints over the tokens of one model.

    Args:
        tokenizer: The model's.
        vocabulary: Words of its logits.
        ends: Its end tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> None:
        self._ends = frozenset(ends)
        self._bytes_of: Callable[[int], bytes] | None = getattr(tokenizer, "bytes_of", None)
        self._tokens: Any = _byte_tokens() if self._bytes_of else _tokens_of(tokenizer, vocabulary, self._ends)
        self._filler = None if self._bytes_of else GrammarMasks(self._tokens, vocabulary, self._ends)
        self._calls = lru_cache(_CALLS)(self._call_matcher)

    def compile(self, grammar: Grammar) -> MakeConstraint:
        """What makes constraints to answers of this form. Takes milliseconds, and is not remembered here.

        Raises:
            GrammarError: No answer of this model can be led by it; says why.
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
        """What makes constraints to one call of one of these tools, whose frame has control tokens. Is remembered.

        Args:
            how: How calls are written.
            tools: Their descriptions.
            controls: The model's control tokens.
            answer: To calls of them, or to an answer of this form, whichever begins. Is not remembered.
            several: To one call or more, if there is no answer.

        Raises:
            GrammarError: The arguments of one cannot be led by their schema; says why.
        """
        numbers = {text: number for number, text in controls.items()}
        said = "a call of " + ", ".join(function_of(tool)["name"] for tool in tools)
        options: tuple[Mapping[str, Any], ...] = ({}, LENIENT)
        is_led = answer is not None
        strict, lenient = (
            call_grammar(how, tools, numbers, each, several=several or is_led, answers=is_led) for each in options
        )
        # Of an answer's own grammar no control token is ever allowed.
        marks = frozenset(number for number in controls if f"<[{number}]>" in strict)
        if answer is None:
            return partial(self._constraint, self._calls(strict, lenient, said), marks=marks)
        said = f"{said} or {answer.plain()!r}"
        matcher = self._call_matcher(beside(strict, answer), beside(lenient, answer), said)
        return partial(self._constraint, matcher, marks=marks)

    def _call_matcher(self, strict: str, lenient: str, said: str) -> Any:
        # Whoever makes the call checks it, as all calls that nobody demands.
        return self._matcher(lenient if log_unenforced(strict, said) else strict, said)

    def _matcher(self, source: str, said: Any) -> Any:
        made = llguidance().LLMatcher(self._tokens, source, log_level=0, limits=limits())
        if made.is_error():
            raise GrammarError(f"no answer of this model can be led by {said!r}: {made.get_error().strip()}")
        return made

    def _constraint(self, compiled: Any, ends: frozenset[int], marks: frozenset[int] = frozenset()) -> TokenConstraint:
        matcher = compiled.deep_copy()
        if self._bytes_of is not None:
            return ByteConstraint(matcher, self._bytes_of, ends)
        assert self._filler is not None
        words = self._filler.with_marks(marks - ends)
        return GrammarConstraint(self._filler, matcher, self._filler.that_end(ends), words)


def _tokens_of(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int]) -> Any:
    """The library's view of a Hugging Face tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidRequestError(
            f"tokenizer {type(tokenizer).__name__} does not say of which bytes its tokens are, so that nothing can be "
            "guided: save the model with a tokenizer.json"
        )
    written = json.loads(backend.to_str())
    written |= {"truncation": None, "padding": None}
    for token in written["added_tokens"]:
        # Also those that a template calls no special ones, as tags of thoughts and tool calls: text never says them.
        token["special"] = token["special"] or is_control_text(token["content"])
    known = max((token["id"] for token in written["added_tokens"]), default=0) + 1
    size = max(vocabulary, known, len(tokenizer))
    # It wants one of the ids without gaps, or finds one itself: constraints know the ends of their model.
    end = sorted(token for token in ends if token < len(tokenizer))
    try:
        return llguidance().LLTokenizer(json.dumps(written), n_vocab=size, eos_token=end or None)
    except ValueError as error:
        raise InvalidRequestError(
            f"the tokens of {type(tokenizer).__name__} cannot be guided: {error}; take a model whose tokens are bytes"
        ) from error


def _byte_tokens() -> Any:
    """A vocabulary of all bytes, and an end."""
    library = llguidance()
    return library.LLTokenizer(library._tokenizer.TokenizerWrapper(_Bytes()))


class _Bytes:
    """As the library asks of a tokenizer."""

    eos_token_id, bos_token_id = 256, None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
