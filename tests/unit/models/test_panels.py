"""Products with laid-out weights: right, and a row's the same bit by bit in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from choreo_agents.models.weights import prepacked
from choreo_agents.models.weights.panels import Panels
from choreo_agents.native.library import Kernels, available_kernels, has_tiles
from choreo_agents.native.structs import BF16, BF16_PAIRS

KERNELS = available_kernels()
pytestmark = pytest.mark.skipif(isinstance(KERNELS, str), reason=f"there are no kernels: {KERNELS}")
VARIANTS: tuple[Kernels, ...] = () if isinstance(KERNELS, str) else KERNELS
PAIRED = [kernels for kernels in VARIANTS if kernels.pairs]


@pytest.fixture(params=VARIANTS, ids=lambda kernels: kernels.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = request.param
    return made


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(rows: int, inputs: int, outputs: int, seed: int, *, short: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and a bias; `short`: weights that were bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    return x, weight.bfloat16().float() if short else weight, torch.randn(outputs, generator=generator)


@pytest.mark.usefixtures("threads")
@settings(max_examples=60, deadline=None)
@given(
    rows=some.integers(1, 40),
    inputs=some.integers(1, 1200),
    outputs=some.integers(1, 300),
    seed=some.integers(0, 99),
    short=some.booleans(),
    biased=some.booleans(),
)
def test_products_are_right_to_fp32(rows: int, inputs: int, outputs: int, seed: int, short: bool, biased: bool) -> None:
    for kernels in VARIANTS:
        x, weight, bias = drawn(rows, inputs, outputs, seed, short=short)
        got = Panels.of(weight).multiply(x, bias if biased else None, kernels)
        wanted = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
        # A chain of n rounded additions is off by at most n units in the last place of the sum of magnitudes.
        magnitude = x.abs().double() @ weight.abs().double().T + 5.0
        longest = min(inputs, 512) + inputs // 512 + 2
        assert bool(((got - wanted).abs() <= longest * 2.0**-24 * magnitude).all())


@pytest.mark.usefixtures("threads")
@settings(max_examples=60, deadline=None)
@given(
    rows=some.integers(1, 150),
    inputs=some.integers(1, 1200),
    outputs=some.integers(1, 300),
    seed=some.integers(0, 99),
    biased=some.booleans(),
)
def test_products_of_bfloat16s_round_what_comes_and_nothing_else(
    rows: int, inputs: int, outputs: int, seed: int, biased: bool
) -> None:
    for kernels in PAIRED:
        x, weight, bias = drawn(rows, inputs, outputs, seed, short=True)
        got = Panels.of(weight.bfloat16(), pairs=True).multiply(x, bias if biased else None, kernels)
        x = x.bfloat16()
        wanted = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
        magnitude = x.abs().double() @ weight.abs().double().T + 5.0
        # Each product of tiles adds thirty-two numbers to a sum, in an order that is the processor's own.
        assert bool(((got - wanted).abs() <= (inputs + 34) * 2.0**-24 * magnitude).all())


@pytest.mark.parametrize("kind", ["fp32", "bfloat16", "pairs"])
def test_a_row_is_the_same_in_any_company(kernels: Kernels, kind: str) -> None:
    if kind == "pairs" and not kernels.pairs:
        pytest.skip(f"{kernels.name} multiplies no bfloat16s")
    x, weight, bias = drawn(67, 700, 200, 3, short=kind != "fp32")
    panels = Panels.of(weight.bfloat16(), pairs=True) if kind == "pairs" else Panels.of(weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([panels.multiply(row[None], bias, kernels) for row in x])
        for count in (*range(1, 36), 47, 48, 49, 64, 67):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(panels.multiply(x[:count], bias, kernels), alone[:count]), f"{count} rows"
    finally:
        torch.set_num_threads(before)


def test_weights_come_back_bit_by_bit_and_short_ones_take_half(kernels: Kernels) -> None:
    for short in (False, True):
        _, weight, _ = drawn(1, 130, 77, 5, short=short)
        panels = Panels.of(weight)
        assert torch.equal(panels.plain(), weight)
        assert panels.panels.nbytes == 80 * 130 * (2 if short else 4)
    one, odd = weight.clone(), weight.clone()
    odd[76, 129] = torch.nextafter(odd[76, 129], torch.tensor(9.0))
    assert Panels.of(one).panels.dtype == torch.bfloat16 and Panels.of(odd).panels.dtype == torch.float32


def test_pairs_come_back_bit_by_bit_and_are_of_bfloat16s_alone() -> None:
    _, weight, _ = drawn(1, 130, 77, 5, short=True)
    pairs = Panels.of(weight.bfloat16(), pairs=True)
    assert pairs.dtype == BF16_PAIRS and torch.equal(pairs.plain(), weight.bfloat16())
    assert pairs.panels.nbytes == 80 * 160 * 2, "inputs up to a whole tile"
    assert Panels.of(weight, pairs=True).dtype == BF16, "a model in fp32 has nothing rounded that comes"


def test_a_model_in_bfloat16_is_laid_out_in_pairs_where_the_kernels_multiply_them() -> None:
    layout = prepacked._make_layout(torch.randn(512, 256).bfloat16())
    if has_tiles():
        assert not isinstance(layout, Panels), "oneDNN multiplies tiles, too"
    else:
        assert isinstance(layout, Panels) and layout.dtype == (BF16_PAIRS if VARIANTS[0].pairs else BF16)


@pytest.mark.parametrize("paired", [False, True])
def test_layers_side_by_side_are_each_its_own(kernels: Kernels, paired: bool) -> None:
    if paired and not kernels.pairs:
        pytest.skip(f"{kernels.name} multiplies no bfloat16s")
    x, weight, bias = drawn(5, 90, 32 + 16 + 21, 7, short=paired)
    weight = weight.bfloat16() if paired else weight
    parts = weight.split([32, 16, 21])
    together = Panels.of(*parts, pairs=paired)
    whole = together.multiply(x, bias, kernels)
    assert torch.equal(whole, Panels.of(weight, pairs=paired).multiply(x, bias, kernels))
    for first, part, own in zip((0, 32, 48), parts, bias.split([32, 16, 21]), strict=True):
        view = together.part(first, len(part))
        assert view.panels.data_ptr() >= together.panels.data_ptr() and torch.equal(view.plain(), part)
        assert torch.equal(view.multiply(x, own, kernels), whole[:, first : first + len(part)])


def test_rows_may_lie_anywhere(kernels: Kernels) -> None:
    x, weight, _ = drawn(6, 40, 24, 9, short=False)
    panels = Panels.of(weight)
    wanted = panels.multiply(x, None, kernels)
    wide = torch.zeros(6, 100)
    wide[:, 30:70] = x
    assert torch.equal(panels.multiply(wide[:, 30:70], None, kernels), wanted)
    assert torch.equal(panels.multiply(x.T.contiguous().T, None, kernels), wanted)
    assert torch.equal(panels.multiply(x.view(2, 3, 40), None, kernels), wanted.view(2, 3, 24))
    assert panels.multiply(x[:0], None, kernels).shape == (0, 24)


def test_what_is_no_number_stays_in_its_row(kernels: Kernels) -> None:
    x, weight, _ = drawn(9, 64, 32, 11, short=True)
    panels = Panels.of(weight)
    wanted = panels.multiply(x, None, kernels)
    x[4, 7] = float("nan")
    got = panels.multiply(x, None, kernels)
    others = [row for row in range(9) if row != 4]
    assert got[4].isnan().all() and torch.equal(got[others], wanted[others])
