"""What of FP4 is measured by itself: quantizing, and packed weights with few tokens."""

from __future__ import annotations

import functools
import statistics

import measure
import record
import torch
from measure import Contender
from run import BF16, Run
from torch import nn

QUANTIZED = ((16384, 8192), (4096, 4096))
DECODED = ((4096, 4096), (8192, 28672))  # in, out
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
SIDE_BYTES = 0.5 + 1 / 16  # an element: a code, and a scale byte for sixteen


def quantize_fp4(run: Run) -> None:
    """The FP4 quantizing kernels, amax included, in turns with a copy of 2 GiB."""
    from narrowfloat import Cast
    from narrowfloat.spec import Quantize, both

    plain, rotated = Cast("e2m1", "nvfp4"), Cast("e2m1", "nvfp4", hadamard=True)
    of_dy = Cast("e2m1", "nvfp4", stochastic=True)
    dy_columns = Cast("e2m1", "nvfp4", stochastic=True, hadamard=True)
    two_sides = 4 + 2 * SIDE_BYTES
    kernels = {  # kernel, bytes it must move, an element of bf16: 2 for amax, 2 to quantize, sides
        "nvfp4 rows": (both(plain, None), 4 + SIDE_BYTES),
        "nvfp4 rows+rotated columns": (both(plain, rotated), two_sides),
        "nvfp4 rows+rotated stochastic columns": (both(plain, dy_columns), two_sides),
        "nvfp4 stochastic rows+rotated stochastic columns": (both(of_dy, dy_columns), two_sides),
        "nvfp4 x of a layer: bf16 operand rows+rotated columns": (
            Quantize(plain, rotated, True, True, rows_as_operand=True),
            6 + SIDE_BYTES,
        ),
        "nvfp4 dy of a layer: stochastic bf16 operands both ways": (
            Quantize(of_dy, dy_columns, True, True, True, True),
            8.0,
        ),
        "nvfp4 w of a layer: bf16 operand rows in 16x16": (
            Quantize(Cast("e2m1", "nvfp4", square=True), want_rows=True, rows_as_operand=True),
            6.0,
        ),
        "mxfp4 rows+rotated columns": (
            both(Cast("e2m1", "mxfp4"), Cast("e2m1", "mxfp4", hadamard=True)),
            two_sides,
        ),
    }
    shapes = run.shapes(QUANTIZED)
    seconds = run.seconds(len(shapes) * len(kernels), 0.5)
    seed = torch.randint(-(2**62), 2**62, (2,), device=run.device.torch)
    for rows, cols in shapes:
        elements = rows * cols
        sets = run.device.sets(2 * elements, 8 * elements)
        inputs = [run.randn(rows, cols) for _ in range(sets)]
        for kernel, (choices, moved) in kernels.items():
            with run.attempt(f"quantize_fp4 {kernel} {rows}x{cols}"):
                op, spec = torch.ops.narrowfloat.quantize, choices.pack()
                calls = [functools.partial(op, x, spec, None, seed) for x in inputs]
                run.take_quantize(kernel, (rows, cols), calls, sets * moved * elements, seconds)
                del calls
        del inputs


def decode(run: Run) -> None:
    """A layer with packed weights, forward, beside nn.Linear in bf16. Before each of either, half a
    gigabyte is read, which leaves L2 without them and clean."""
    from narrowfloat import PackedFP4Linear

    tokens_of = TOKENS if run.device.cuda else (1, 3)
    shapes = DECODED if run.device.cuda else ((64, 48),)
    seconds = run.seconds(len(shapes) * len(tokens_of), 0.4)
    flush = torch.ones(
        (1 << 28) if run.device.cuda else 16, dtype=torch.int16, device=run.device.torch
    )
    for inputs, outputs in shapes:
        plain = nn.Linear(inputs, outputs, bias=False, device=run.device.torch, dtype=BF16)
        packed = PackedFP4Linear.from_linear(plain, "nvfp4", overlap=True)
        for tokens in tokens_of:
            if tokens * outputs > 1 << 25:
                continue
            x = run.randn(tokens, inputs)
            with run.attempt(f"decode {tokens}x{inputs}x{outputs}"), torch.no_grad():
                pair = [
                    Contender(lambda _, m=m, x=x: m(x), lambda _: flush.max())  # type: ignore[misc]
                    for m in (packed, plain)
                ]
                times, base = measure.interleave(run.device, pair, seconds)
                run.out.add(
                    record.row(
                        "decode",
                        recipe="nvfp4",
                        tokens=tokens,
                        **{"in": inputs, "out": outputs},
                        us=statistics.median(times) * 1e3,
                        bf16_us=statistics.median(base) * 1e3,
                        ratio=measure.pairwise_ratio(times, base),
                    )
                )
        del plain, packed
