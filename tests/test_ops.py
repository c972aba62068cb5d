"""Decides that the operators' schemas are what the compiled kernels take."""

from __future__ import annotations

import types

import pytest
import torch

import narrowfloat as nf
from narrowfloat import ops
from narrowfloat.history import fresh
from narrowfloat.settings import (
    Backward,
    BlockLayer,
    BlockOrientation,
    BlockQuantize,
    Forward,
    FP4Layer,
    FP4Quantize,
    Orientation,
)


def calls() -> dict[str, tuple]:
    x, w = torch.randn(16, 32), torch.randn(48, 32)
    q, columns, scale = ops.quantize_op(x, 0, True, True)
    w_rows, w_columns, w_scale = ops.quantize_op(w, 0, True, True)
    forward, backward = Forward(0, 0, False, True), Backward(1, 0, False, False, True, x.dtype)
    dy, seed = torch.randn(16, 48), torch.tensor([1, 2])
    random = Orientation(True, stochastic=True)
    fp4 = FP4Layer(two_d_w=True, rotate=True, stochastic_dy=True, wanted=True, dw_dtype=x.dtype)
    saved = ops.fp4_linear_forward(x, w, None, fp4.pack())[1:]
    by_row = BlockOrientation(1)
    block = BlockLayer(1, 1, 1, wanted=True, keep_w=True, dw_dtype=x.dtype)
    kept = ops.block_linear_forward(x, w, None, block.pack())[1:]
    held = ops.block_quantize_op(w, BlockQuantize(by_row, by_row).pack())
    return {
        "quantize": (ops.quantize_op, (x, 0, True, True, scale)),
        "scaled_mm": (ops.scaled_mm_op, (q, w_rows, scale, w_scale, None, torch.float32, False)),
        "scaled_mm_accumulate_": (
            ops.scaled_mm_accumulate_op,
            (torch.zeros(16, 48), q, w_rows, scale, w_scale, False),
        ),
        "linear_forward": (ops.linear_forward, (x, w, w[:, 0], w_rows, w_scale, forward.pack())),
        "linear_backward": (
            ops.linear_backward,
            (dy, columns, scale, w, w_columns, w_scale, 32, backward.pack()),
        ),
        "delayed_linear_forward": (
            ops.delayed_linear_forward,
            (x, w, w[:, 0], fresh(nf.Delayed(), x.device), forward.pack()),
        ),
        "delayed_linear_backward": (
            ops.delayed_linear_backward,
            (dy, columns, scale, w, fresh(nf.Delayed(), x.device), 32, backward.pack()),
        ),
        "fp4_quantize": (ops.fp4_quantize_op, (x, seed, FP4Quantize(random, random).pack())),
        "fp4_linear_forward": (ops.fp4_linear_forward, (x, w, w[:, 0], fp4.pack())),
        "fp4_linear_backward": (
            ops.fp4_linear_backward,
            (dy, *saved, w, seed, 32, fp4.pack()),
        ),
        "block_quantize": (ops.block_quantize_op, (x, BlockQuantize(by_row, by_row).pack())),
        "block_linear_forward": (
            ops.block_linear_forward,
            (x, w, w[:, 0], block.pack(), *held[:2]),
        ),
        "block_linear_backward": (
            ops.block_linear_backward,
            (dy, *kept[:2], w, kept[2], 32, block.pack(), *held[2:]),
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_the_compiled_kernel_takes_the_schema(name: str) -> None:
    """The CUDA kernel, called past the dispatcher with tensors of the CPU, unpacks its arguments,
    their number and types included, and refuses the device by name: no GPU is needed to see a
    schema in ops.py and a signature in csrc that have parted."""
    if nf._binary.module is None:
        pytest.skip(f"no binary: {nf._binary.problem}")
    op, arguments = calls()[name]
    op(*arguments)  # the CPU's own kernel takes them
    for given in (arguments, (torch.ones(3), *arguments[1:])):
        with pytest.raises(ValueError, match=r"expected .* on (the CUDA|cpu)"):
            on_cuda(op)(*given)


def on_cuda(op: ops.Operator) -> ops.Operator:
    """op, calling its CUDA kernel whatever the tensors' device."""
    key = torch._C.DispatchKey.CUDA
    return ops.Operator(lambda *arguments: op.overload._op_dk(key, *arguments))


def test_errors_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch makes of an exception, and never an older one's."""
    thrown: list[tuple[int, str]] = []

    def operator(error: Exception) -> ops.Operator:
        def fails() -> None:
            raise error

        return ops.Operator(fails)

    module = types.SimpleNamespace(take_error=lambda: thrown.pop() if thrown else (0, ""))
    monkeypatch.setattr(nf._binary, "module", module)
    for kind, expected in enumerate((RuntimeError, ValueError, TypeError, torch.OutOfMemoryError)):
        thrown[:] = [(kind, "what came")]
        with pytest.raises(expected, match="what came") as caught:
            operator(RuntimeError("torch says: what came"))()
        assert caught.type is expected
    thrown[:] = [(1, "what came before")]
    with pytest.raises(RuntimeError, match="something else") as other:
        operator(RuntimeError("something else"))()
    assert other.type is RuntimeError
    with pytest.raises(KeyError):
        operator(KeyError("as it is"))()
