"""Delayed scaling, in plain PyTorch: an amax history's row and the scales it gives.
csrc/quantize/tensor.h says the same of a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import Format
from .tensor import FLT_MAX, SCALE, amax, check_tensor, scale_from_amax

# A layer's history is int32 [3, FIRST + steps], a row each for x, w and dy, of fp32 bits (a cast of
# the module does not touch integers): the amax that the scale covers (0: none yet), the amax of all
# calls since the last roll, MARK ^ the bits of the first, 0, then the amax of each step before, the
# newest first. A row without its mark says nothing: zeros, and memory that nobody wrote.
TRACKED = ("x", "w", "dy")
FIRST, LONGEST = 4, 1024
COVERED, OPEN, MARKED = 0, 1, 2
MARK = 0x6E666831


def check_history(history: Tensor, who: str) -> None:
    """TypeError or ValueError for what is no layer's history; the CUDA operators check the same."""
    check_tensor(history, who, "history")
    rows, longest = len(TRACKED), FIRST + LONGEST
    shape = tuple(history.shape)
    if history.dtype != torch.int32 or len(shape) != 2 or shape[0] != rows:
        fits = False
    else:
        fits = FIRST < shape[1] <= longest and history.is_contiguous()
    if not fits:
        raise ValueError(
            f"{who}: expected history as int32 [{rows}, {FIRST + 1} to {longest}], contiguous, got "
            f"{history.dtype} {shape}"
        )


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


def scale_by_history(
    x: Tensor, fmt: Format, row: Tensor, guarded: bool = False, joins: bool = False
) -> Tensor:
    """(scale, multiplier, 0, 0) for x: of the amax that its history covers, or of its own where
    there is none yet, where x holds a NaN or an Inf, and, if guarded, where x outgrew it. joins:
    x counts for the scales to come."""
    own = amax(x)
    before, now = covered(row), own.item()
    finite = bool(own.isfinite())
    keeps = before > 0 and finite and (not guarded or now <= before)
    if finite and joins:
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
            (largest * 2.0**margin).clamp(max=FLT_MAX)
        )
        row[MARKED] = MARK ^ int(row[COVERED])
