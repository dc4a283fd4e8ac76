"""`choreo models check`: what it says of checkpoints as people host them, of which only the small files are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import FAMILIES, save_small_files
from support.families import save_tiny, tiny_config
from transformers import AutoConfig
from typer.testing import CliRunner

from choreo_agents.cli import app

WIDE = {"COLUMNS": "1000"}


def checked(*words: Any) -> tuple[int, dict[str, Any]]:
    """The exit code, and the JSON that is printed."""
    result = CliRunner().invoke(app, ["models", "check", *map(str, words), "--json"], env=WIDE)
    assert "Traceback" not in result.output
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_small_files_of_a_family_tell_how_it_is_served(name: str, tmp_path: Path) -> None:
    folder = save_small_files(tmp_path, name)
    assert not [*folder.glob("*.safetensors")]
    code, found = checked(folder, "--chat", "date=2026-11-23")
    assert code == 0 and found["served"] and found["measured"] is None
    assert len(found["views"]) == 12 and all(view["template_tokens"] for view in found["views"])
    family = FAMILIES[name]
    assert {"text": family.eos, "id": family.specials[family.eos], "said_by": ["tokenizer"]}.items() <= (
        found["stop_tokens"][0].items()
    )
    assert found["dtype"]["checkpoint"] == "bfloat16"
    assert found["memory"]["weights_bytes"] > 2 * 32 * family.vocabulary and not found["memory"]["weights_measured"]
    width = 2 if found["dtype"]["served"] == "bfloat16" else 4
    assert found["memory"]["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * width
    windows = {far for far in found["layers"] if far != "all"}
    assert windows <= {"9 tokens"} and sum(found["layers"].values()) == 4


def test_it_is_readable_for_people(tmp_path: Path) -> None:
    folder = save_small_files(tmp_path, "Qwen 3")
    result = CliRunner().invoke(app, ["models", "check", str(folder)], env=WIDE)
    assert result.exit_code == 0
    for words in (
        "can be served, according to its small files: its weights are not downloaded",
        "40,960 tokens; layers: 4 see all",
        "<|im_end|> (151645, tokenizer): part of what closes a turn",
        "Ann speaks again, over shared edges",
        "<|im_start|>assistant⏎Bob: Half a coin: the bat costs ten and a half.<|im_end|>⏎",
        "The template's own",
        "Reencoded edges show the same tokens",
        "Beside the chat template",
    ):
        assert words in result.output, words


def test_variables_of_the_template_may_be_set(tmp_path: Path) -> None:
    folder = save_small_files(tmp_path, "Qwen 3")
    _, found = checked(folder, "--chat", "enable_thinking=false")
    assert found["views"][0]["messages"][-1]["text"].endswith("<think>\n\n</think>\n\nAnn:")
    _, found = checked(save_small_files(tmp_path / "small", "Mistral Small 3"), "--chat", "date=2001-02-03")
    assert "Today is 2001-02-03." in found["views"][5]["messages"][0]["text"]
    code, found = checked(folder, "--chat", "enable_thinking")
    assert code == 2 and "NAME=VALUE" in found["why"]
    code, found = checked(folder, "--chat", "messages=1")
    assert code == 2 and "not a variable of the chat template" in found["why"]


def test_generation_settings_name_more_stop_tokens(tmp_path: Path) -> None:
    folder = save_small_files(tmp_path, "Llama 3.1")
    said = {"eos_token_id": [128001, 128008, 128009]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    _, found = checked(folder)
    closes = {token["text"]: token["closes"] for token in found["stop_tokens"]}
    assert closes == {"<|end_of_text|>": False, "<|eom_id|>": False, "<|eot_id|>": True}


def test_with_weights_a_model_is_measured_unless_it_is_not_to_be(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", {})
    code, found = checked(folder, "--dtype", "fp32")
    assert code == 0 and found["measured"]["error"] < found["measured"]["rounding"]
    assert found["memory"]["weights_measured"] and found["memory"]["holds_context"]
    _, found = checked(folder, "--no-measure", "--dtype", "bf16")
    assert found["measured"] is None and found["dtype"] == {
        "checkpoint": "float32",
        "served": "bfloat16",
        "why": "asked for",
        "quantised": None,
    }


def test_weights_that_do_not_fit_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, "llama", {})
    monkeypatch.setattr("choreo_agents.models.checking.needs.free_bytes", lambda device: 1 << 10)
    result = CliRunner().invoke(app, ["models", "check", str(folder)], env=WIDE)
    assert (
        result.exit_code == 2
        and "cannot be served here: its weights do not fit into the free memory of cpu" in result.output
    )
    code, found = checked(folder)
    assert code == 2 and not found["served"] and not found["memory"]["holds_weights"] and found["measured"] is None


def refused(folder: Path, *words: str) -> None:
    """It cannot be served, for a reason in one line, for people and for machines."""
    result = CliRunner().invoke(app, ["models", "check", str(folder)], env=WIDE)
    [line] = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2 and all(word in line for word in words), result.output
    code, found = checked(folder)
    assert code == 2 and found == {"model": str(folder), "served": False, "why": line.removeprefix("error: ")}


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "there is no config.json")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_config("llama", {}).save_pretrained(tmp_path)
    refused(tmp_path, "the tokenizer of", "there is no tokenizer.json")


def test_a_template_that_fails_is_refused(tmp_path: Path) -> None:
    folder = save_small_files(tmp_path, "Qwen 2.5")
    (folder / "chat_template.jinja").write_text("{{ messages[0].nothing.at_all }}")
    refused(folder, "cannot render a single question", "UndefinedError")


@pytest.mark.parametrize("family", ["deepseek_v3", "ministral3", "qwen3_next", "qwen3_vl"])
def test_an_architecture_that_is_not_served_is_refused_by_its_name(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    refused(tmp_path, "model type", "is not supported")


def test_what_no_weights_are_read_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "GGUF")
    (tmp_path / "model.gguf").unlink()
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, "custom code")


def test_a_quantisation_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    folder = save_small_files(tmp_path, "Qwen 2.5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "magic"}}))
    refused(folder, "quantised with 'magic'")


def test_the_groups_help_teaches() -> None:
    result = CliRunner().invoke(app, ["models", "--help"], env={"COLUMNS": "200"})
    assert "choreo models check PATH" in result.output and "no weights" in result.output
