"""Tables in one buffer, as often as they are sent."""

from __future__ import annotations

import numpy
import torch

from choreo_agents.attention.packing import SentTables


def test_what_was_made_in_inference_mode_is_sent_again_outside() -> None:
    with torch.inference_mode():
        tables = SentTables(
            {"slots": numpy.array([3, 5]), "more": numpy.ones((2, 2), numpy.float32)}, torch.device("cpu")
        )
    tables.host["slots"] += 1
    tables.send()
    assert tables["slots"].tolist() == [4, 6] and tables["more"].shape == (2, 2)
