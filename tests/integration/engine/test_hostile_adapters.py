"""Cards of adapters that anybody has written: read in bounded time, or refused with the reason, and nothing else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.adapters import save_adapter
from support.tiny import save_tiny_llama

from choreo_agents import Engine, Memory
from choreo_agents.errors import AdapterError

SMALL = Memory(kv_budget_bytes=1 << 22)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


def changed(folder: Path, **options: Any) -> str:
    card = json.loads((folder / "adapter_config.json").read_text())
    return json.dumps(card | options)


CARDS: dict[str, Callable[[Path], str]] = {
    "a pattern that never ends": lambda folder: changed(folder, alpha_pattern={r"(.|..|...)*(?<!j)": 3}),
    "no pattern": lambda folder: changed(folder, alpha_pattern={"(": 3}),
    "patterns that are none": lambda folder: changed(folder, alpha_pattern=["q_proj"]),
    "a pattern's alpha is a word": lambda folder: changed(folder, alpha_pattern={"q_proj": "x"}),
    "alpha is a word": lambda folder: changed(folder, lora_alpha="x"),
    "alpha is nothing": lambda folder: changed(folder, lora_alpha=None),
    "alpha is no number": lambda folder: changed(folder, lora_alpha=math.nan),
    "alpha is endless": lambda folder: changed(folder, lora_alpha=math.inf),
    "nested": lambda _: nested(100_000),
    "nested inside": lambda folder: changed(folder, alpha_pattern="HERE").replace('"HERE"', nested(100_000)),
    "a list": lambda _: "[]",
    "a number": lambda _: "3",
    "nothing": lambda _: "",
    "half": lambda folder: changed(folder)[:40],
    "no text": lambda _: "\x00\x01",
    "a kind that is none": lambda folder: changed(folder, peft_type="HOSTILE"),
    "a kind that is a list": lambda folder: changed(folder, peft_type=["LORA"]),
}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_refused_in_time(llama: Path, tmp_path: Path, name: str) -> None:
    folder = save_adapter(tmp_path / "other", llama)
    good = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(CARDS[name](folder))
    began_s = time.monotonic()
    with Engine.load(llama, memory=SMALL) as engine:
        with pytest.raises(AdapterError, match="adapter_config"):
            engine.load_adapter(folder)
        assert time.monotonic() - began_s < 30, "a bound for a loaded machine: it is a second"
        (folder / "adapter_config.json").write_text(good)
        engine.load_adapter(folder)  # nothing of the wrong one is left
        engine.prefill([3, 4, 5])
