"""Tokens become text as they come, characters whole."""

from __future__ import annotations

import pytest

from choreo_agents.engine.detokenizer import Detokenizer
from choreo_agents.models import LoadedModel


@pytest.mark.parametrize("text", [" Ann has 3 red kites.", " Zoë — 你好 🙂!", " a\n b", "no space", " Bob🙂"])
def test_pieces_add_up_to_the_text(tiny: LoadedModel, text: str) -> None:
    detokenizer = Detokenizer(tiny)
    pieces = [detokenizer.add(token) for token in tiny.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_add_nothing(tiny: LoadedModel) -> None:
    detokenizer = Detokenizer(tiny)
    pieces = [detokenizer.add(token) for token in tiny.encode(" Ann<|end|> has")]
    assert pieces == [" Ann", "", " has"]
