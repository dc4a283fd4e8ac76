"""What is added to `choreo`."""

from __future__ import annotations

from support.installed import all_commands

from choreo_agents.workflows.cases import CASES


def test_who_takes_a_model_says_how_it_is_loaded() -> None:
    for words, command in all_commands().items():
        options = {option.name: option.default for option in command.params}
        assert "loading" not in options, "the options stand in its place"
        if words[0] in ("eval", "bench", "train") and ("model" in options or "models" in options):
            assert {"device", "dtype", "prepacked"} <= options.keys(), words
            assert options["device"] == "auto" and options["prepacked"] is True


def test_every_workflow_is_scored_and_distilled() -> None:
    for above in (("eval",), ("train", "distill")):
        assert {(*above, name.replace("_", "-")) for name in CASES} <= all_commands().keys()
