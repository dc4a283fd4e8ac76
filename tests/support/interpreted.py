"""Triton's interpreter, as far as bits are compared in it."""

from __future__ import annotations

from typing import Any

import pytest


def products_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each row of a product be worked out alike wherever it stands in its tile, as tensor cores do.

    The interpreter multiplies by NumPy, whose BLAS works the last rows of a matrix out in another order than the others
    on some processors (those with AVX2 alone): there a row's bits would depend on its place, in the interpreter only.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        product = (left[..., :, :, None] * right[..., None, :, :]).sum(-2)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
