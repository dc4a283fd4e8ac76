"""Answers to prompts over encoded modules have the logits of one dense forward pass under a mask of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.blocks import Block, block_logits, blocks_of
from support.exact import TOLERANCE
from support.families import FAMILIES, save_tiny
from support.oracle import Oracle

from choreo_agents import Engine, Memory, Sampling, Schema, SchemaLibrary

SHOWN = ["llama", "qwen3", "gemma2", "phi", "cohere2", "gpt_oss", "mistral"]

SCHEMA = """
<schema name="trip" scaffold="hotel tour">
  You plan trips.
  <module name="plan">
    Plan one of <parameter name="days" length="6"/> days.
    <union>
      <module name="miami">Go to Miami. <module name="beach">Swim there.</module> Come home.</module>
      <module name="paris">Go to Paris and see it all, from the tower to the river.</module>
    </union>
    Be short.
  </module>
  <module name="hotel">Sleep well.</module>
  <module name="tour">Walk a lot.</module>
  <module name="news" cache="false">It rains.</module>
</schema>
"""
PROMPTS = {
    "nothing": "<user>Where?</user>",
    "one": "<plan days='3'><miami/></plan><user>Where?</user>",
    "placeholders": "<plan><paris/></plan><user>Where?</user>",
    "inner": "<plan days='seven'><miami><beach/></miami></plan><hotel/><user>Where?</user>",
    "between": "<plan days='3'><miami/>Hm.</plan><hotel/>Ah.<news/><user>Where?</user>",
    "scaffold": "<plan days='3'/><tour/><hotel/><user>Where?</user>",
}


@pytest.fixture(scope="module", params=SHOWN)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param], seed=3)


def test_prompts_equal_a_dense_pass_under_a_mask_of_blocks(
    model_path: Path, tmp_path: Path, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    oracle, said = Oracle(model_path), (5, 6, 7, 8)
    schema = Schema.from_text(SCHEMA)
    for kind in ("encoded here", "read from files"):
        with (
            Engine.load(model_path, memory=Memory(kv_budget_bytes=1 << 24, persist_dir=tmp_path), salt="s") as engine,
            SchemaLibrary(engine) as library,
        ):
            library.register(schema, encode="eager")
            for number, (name, text) in enumerate(PROMPTS.items()):
                with library.assemble(schema.prompt(text)) as view:
                    blocks = blocks_of(engine, view.handles, view.offsets)
                    shown = {handle.id for handle in view.handles}
                    seen = [
                        i for i, record in enumerate(engine.inspect.records(view.handles)) if record.handle.id in shown
                    ]
                    seed = 100 * len(kind) + number
                    sampling = Sampling(forced_token_ids=said, seed=seed)
                    engine.decode([9], view.handles, view.offsets, view.end, sampling=sampling)
                wanted = block_logits(oracle, [*blocks, Block((9, *said[:-1]), view.end, tuple(seen))])
                error = (torch.stack(logits_by_seed[seed]) - wanted).abs().max().item()
                assert error <= TOLERANCE, f"{name}, {kind}: logits differ by {error}"
            if kind == "read from files":
                assert engine.stats().restored_from_disk > 8


def test_a_chain_of_modules_equals_an_ordinary_prompt(
    model_path: Path, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    oracle = Oracle(model_path)
    schema = Schema.from_text(
        "<schema name='chain'>All <module name='a'>of this <module name='b'>is one <module name='c'>text."
        "</module></module></module></schema>"
    )
    with Engine.load(model_path, memory=Memory(kv_budget_bytes=1 << 24)) as engine, SchemaLibrary(engine) as library:
        library.register(schema)
        with library.assemble(schema.prompt("<a><b><c/></b></a> So what? <user>Say it.</user>")) as view:
            tokens = tuple(token for handle in view.handles for token in engine.tokens(handle))
            assert view.end == len(tokens), "there are no gaps"
            engine.decode(
                [9], view.handles, view.offsets, view.end, sampling=Sampling(forced_token_ids=(5, 6, 7), seed=1)
            )
        assert engine.model.decode(list(tokens)).startswith(engine.chat.bos + "All of this is one text. So what?")
    wanted = block_logits(oracle, [Block((*tokens, 9, 5, 6), 0, ())])[-3:]
    error = (torch.stack(logits_by_seed[1]) - wanted).abs().max().item()
    assert error <= TOLERANCE, f"logits differ by {error}"
