"""`choreo serve --engines`: a server whose engines are actors says what one with an engine of its own does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import openai
import pytest
from support.ray_actors import alive, left
from support.served import serving
from support.serving import QUESTION

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}


def streamed(url: str) -> str:
    """What is said to a question, piece by piece."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "embedded", "messages": QUESTION, "stream": True}
        pieces = client.chat.completions.create(**asked, **SAMPLED)
        return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


@pytest.mark.slow
def test_it_says_the_same_and_ends_with_its_actors(alone: None, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = alive()
    with serving("embedded", "--kv-budget", "0.05") as one:
        expected = streamed(one.url)
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with serving("embedded", "--kv-budget", "0.05", "--engines", "2") as two:
        assert len(alive() - before) == 2
        assert streamed(two.url) == expected != ""
        assert two.metrics()["tokens_encoded"] > 0
    assert two.process.returncode == 0 and left(before) == before
