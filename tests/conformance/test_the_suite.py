"""The suite for backends finds backends that are wrong, and needs no more than a subclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.nested import run
from torch import Tensor

from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.testing.conformance import CASES, KINDS, TELLING, BackendConformance


class Spoilt:
    """The reference, but for what is spoilt."""

    def __init__(
        self,
        layout: Callable[[Layout], Layout] = lambda layout: layout,
        kind: Callable[[AttentionKind], AttentionKind] = lambda kind: kind,
        attend: Callable[[Any, Tensor, Tensor, Tensor, float, Tensor | None], Tensor] | None = None,
    ) -> None:
        self.spoilt = layout, kind, attend

    def prepare(self, layout: Layout, kind: AttentionKind) -> Any:
        spoil_layout, spoil_kind, attend = self.spoilt
        right = ReferenceBackend().prepare(spoil_layout(layout), spoil_kind(kind))

        class Prepared:
            def __init__(self) -> None:
                self.layout = right.layout

            def attend(self, query, keys, values, scale, sinks=None):
                if attend is None:
                    return right.attend(query, keys, values, scale, sinks)
                return attend(right, query, keys, values, scale, sinks)

        return Prepared()


def without_shifts(layout: Layout) -> Layout:
    reads = [
        replace(read, spans=tuple(replace(span, shift=0) for span in read.spans)) if not read.causal else read
        for read in layout.reads
    ]
    return replace(layout, reads=tuple(reads))


def suite(backend: Any) -> BackendConformance:
    made = BackendConformance()
    made.backend = lambda dtype: backend  # type: ignore[method-assign]
    made.skips_hidden = False
    return made


def test_a_right_one_conforms() -> None:
    checks = suite(Spoilt())
    checks.test_every_layout("no tree", torch.bfloat16)
    checks.test_every_kind_of_layer("no tree", "window of 64", True)
    checks.test_a_single_row(2, torch.float32)
    checks.test_what_nobody_sees_is_not_read()
    checks.test_the_pool_is_left_as_it_was()


def test_shifts_that_are_forgotten_are_found() -> None:
    wrong = suite(Spoilt(layout=without_shifts))
    with pytest.raises(AssertionError, match="off"):
        wrong.test_every_layout("no tree", torch.float32)


@pytest.mark.parametrize("field", ["rotation", "window", "softcap"])
def test_kinds_that_are_taken_for_plain_are_found(field: str) -> None:
    wrong = suite(Spoilt(kind=lambda kind: replace(kind, **{field: None})))
    told = {"rotation": "plain", "window": "window of 64", "softcap": "soft-capped"}[field]
    with pytest.raises(AssertionError, match="off"):
        wrong.test_every_kind_of_layer("no tree", told, False)


def test_sinks_that_are_forgotten_are_found() -> None:
    wrong = suite(Spoilt(attend=lambda right, q, k, v, scale, sinks: right.attend(q, k, v, scale)))
    wrong.test_every_kind_of_layer("no tree", "plain", False)
    with pytest.raises(AssertionError, match="off"):
        wrong.test_every_kind_of_layer("no tree", "plain", True)


def test_what_only_the_first_layer_is_computed_from_is_found() -> None:
    first: list[Tensor] = []

    def attend(right: Any, *given: Any) -> Tensor:
        first.append(right.attend(*given))
        return first[0]

    with pytest.raises(AssertionError, match="off"):
        suite(Spoilt(attend=attend)).test_every_layout("no tree", torch.float32)


def test_half_precision_of_both_kinds_can_be_asked_for() -> None:
    suite(Spoilt()).test_every_layout("no tree", torch.float16)


def test_another_type_is_found() -> None:
    wrong = suite(Spoilt(attend=lambda right, *given: right.attend(*given).double()))
    with pytest.raises(AssertionError, match="float64"):
        wrong.test_a_single_row(1, torch.float32)


def test_what_is_written_into_the_pool_is_found() -> None:
    def attend(right: Any, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        out = right.attend(query, keys, values, *rest)
        keys[0, 0, 0] += 1
        return out

    with pytest.raises(AssertionError, match=r"\[True, False, True\]"):
        suite(Spoilt(attend=attend)).test_the_pool_is_left_as_it_was()


def test_reading_what_nobody_sees_is_found() -> None:
    wrong = suite(Spoilt())
    wrong.skips_hidden = True
    with pytest.raises(AssertionError, match="117 slots are read, of which 67 can be seen"):
        wrong.test_what_nobody_sees_is_not_read()
    wrong = suite(Spoilt(kind=lambda kind: replace(kind, window=None)))
    with pytest.raises(AssertionError, match="have changed what rows read"):
        wrong.test_what_nobody_sees_is_not_read()


def test_who_says_no_backend_is_told() -> None:
    with pytest.raises(NotImplementedError, match="must say which backend it is about"):
        BackendConformance().test_the_pool_is_left_as_it_was()


def test_a_subclass_is_collected_case_by_case(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import torch
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.testing.conformance import BackendConformance

class TestMine(BackendConformance):
    dtypes = (torch.float32,)
    skips_hidden = False
    def backend(self, dtype):
        return ReferenceBackend()
"""
    )
    listed = [line for line in run(pytester, "--collect-only").outlines if "::" in line]
    layers = len(TELLING) * len(KINDS) * 2
    assert len(listed) == len(CASES) + layers + 3 + 2
    assert any(line.endswith("test_every_kind_of_layer[no tree-interleaved-True]") for line in listed), listed
    assert run(pytester, "-k", "single_row or the_pool").parseoutcomes()["passed"] == 4
