"""What of FP8 with rowwise and blockwise scaling is measured by itself: quantizing."""

from __future__ import annotations

import functools

import torch
from run import Run

QUANTIZED = ((16384, 8192), (4096, 4096))


def quantize_block(run: Run) -> None:
    """The quantizing kernels by row, by blocks and of mxfp8, in turns with a copy of 2 GiB."""
    from narrowfloat import Cast, formats
    from narrowfloat.spec import Quantize, both

    kernels = {}  # kernel, bytes it must move, an element of bf16
    for scaling in formats.SCALED_FORMATS.values():
        how = Cast("e4m3", scaling.name)
        per_side = 1 + (scaling.dtype.itemsize / scaling.block if scaling.block else 0)
        # a row's amax is known only once it was read; a block lies in shared memory
        read = 2.0 if scaling.block else 4.0
        kernels[f"{scaling.format} rows"] = (both(how, None), read + per_side)
        kernels[f"{scaling.format} rows+columns"] = (both(how, how), read + 2 * per_side)
        if scaling.square:
            square = Cast("e4m3", scaling.name, square=True)
            kernels[f"{scaling.format} w of a layer: rows in 128x128"] = (
                both(square, None),
                read + 1,
            )
        if scaling.power_of_two:
            kernels[f"{scaling.format} x of a layer: bf16 operand rows+columns"] = (
                Quantize(how, how, True, True, rows_as_operand=True),
                read + 2 + per_side,
            )
    shapes = run.shapes(QUANTIZED)
    seconds = run.seconds(len(shapes) * len(kernels), 0.5)
    for rows, cols in shapes:
        elements = rows * cols
        sets = run.device.sets(2 * elements, 6 * elements)
        inputs = [run.randn(rows, cols) for _ in range(sets)]
        for kernel, (choices, moved) in kernels.items():
            with run.attempt(f"quantize_block {kernel} {rows}x{cols}"):
                op, spec = torch.ops.narrowfloat.quantize, choices.pack()
                calls = [functools.partial(op, x, spec) for x in inputs]
                run.take_quantize(kernel, (rows, cols), calls, sets * moved * elements, seconds)
                del calls
        del inputs
