"""States what scales from the steps before mean, in plain PyTorch; these functions are the CPU's
kernels too. csrc/quantize.h says the same of a history's row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import reference
from .formats import BY_CODE, Format
from .reference import SCALE, amax, as_rows, scale_from_amax
from .settings import GUARDED, JOINS, Backward, Forward

# A layer's history is int32 [3, FIRST + steps], a row each for x, w and dy, of fp32 bits (a cast of
# the module does not touch integers): the amax that the scale covers (0: none yet), the amax of all
# calls since the last roll, MARK ^ the bits of the first, 0, then the amax of each step before, the
# newest first. A row without its mark says nothing: zeros, and memory that nobody wrote.
TRACKED = ("x", "w", "dy")
FIRST, LONGEST = 4, 1024
COVERED, OPEN, MARKED = 0, 1, 2
MARK = 0x6E666831


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _valid(row: Tensor) -> bool:
    return int(row[MARKED]) == MARK ^ int(row[COVERED])


def covered(row: Tensor) -> float:
    """The amax that a row's scale covers; 0 where it says nothing."""
    return row[COVERED : COVERED + 1].view(torch.float32).item() if _valid(row) else 0.0


def join(row: Tensor, value: float) -> None:
    """Count a call's amax, finite, for the scales to come; a fresh row begins."""
    if _valid(row):
        row[OPEN] = max(int(row[OPEN]), _bits(value))  # magnitudes order as their bits do
        return
    row.zero_()
    row[OPEN], row[MARKED] = _bits(value), MARK


def scale_by_history(x: Tensor, fmt: Format, row: Tensor, settings: int) -> Tensor:
    """(scale, multiplier, 0, 0) for x: of the amax that its history covers, or of its own where
    there is none yet, where x holds a NaN or an Inf, and, with GUARDED, where x outgrew it."""
    own = amax(x)
    before, now = covered(row), own.item()
    finite = bool(own.isfinite())
    keeps = before > 0 and finite and (not settings & GUARDED or now <= before)
    if finite and settings & JOINS:
        join(row, now)
    of = torch.full_like(own, before) if keeps else own
    return pad(torch.stack(scale_from_amax(of, fmt)), (0, SCALE - 2))


def roll(history: Tensor, latest: bool, margin: int) -> None:
    """New scales for a layer, [3, FIRST + steps]: what the calls since the last roll joined becomes
    the newest step. A row that took part in none stays as it is."""
    for row in history:
        if not _valid(row) or row[OPEN] == 0:
            continue
        row[FIRST + 1 :] = row[FIRST:-1].clone()
        row[FIRST], row[OPEN] = row[OPEN].clone(), 0
        steps = row[FIRST:].view(torch.float32)
        largest = steps[0] if latest else steps.max()
        row[COVERED : COVERED + 1].view(torch.float32).copy_(
            (largest * 2.0**margin).clamp(max=reference.FLT_MAX)
        )
        row[MARKED] = MARK ^ int(row[COVERED])


def delayed_linear_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, history: Tensor, settings: int
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.linear_forward with scales by history. settings: a packed Forward with GUARDED and
    JOINS, which changes history."""
    reference.check_linear(x, w, bias, "linear")
    x_format, w_format, fast, save_x = Forward.unpack(settings)
    (m, k), n = as_rows(x).shape, w.shape[0]
    x_scale = scale_by_history(as_rows(x), BY_CODE[x_format], history[0], settings)
    w_scale = scale_by_history(w, BY_CODE[w_format], history[1], settings)
    x_rows, x_columns, _ = reference.quantize(x, x_format, True, save_x, x_scale)
    w_rows, _, _ = reference.quantize(w, w_format, True, False, w_scale)
    y = reference.scaled_mm(x_rows[:m, :k], w_rows[:n, :k], x_scale, w_scale, bias, x.dtype, fast)
    return y.view(*x.shape[:-1], n), x_columns, torch.cat([x_scale, w_scale])


def delayed_linear_backward(
    dy: Tensor,
    x_columns: Tensor | None,
    scales: Tensor | None,
    w: Tensor | None,
    history: Tensor,
    in_features: int,
    settings: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.linear_backward with dy's scale by history."""
    dy_format, *_, need_dx, dw_dtype, _ = Backward.unpack(settings)
    scale = None
    if need_dx or dw_dtype is not None:
        scale = scale_by_history(as_rows(dy), BY_CODE[dy_format], history[2], settings)
    return reference.linear_backward(
        dy, x_columns, scales, w, None, None, in_features, settings, scale
    )
