"""Decides what each narrow format is: its element, its largest value, its code in operators."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """One row of the table of formats (IEEE-like layouts of the OCP 8-bit specification, 2023)."""

    name: str
    code: int  # how operators and csrc name the element; quantize.h holds the same numbers
    dtype: torch.dtype
    max: float  # largest finite value; larger ones saturate to it
    nan: int  # the one byte that a NaN becomes, whatever its sign


E4M3 = Format("e4m3", 0, torch.float8_e4m3fn, 448.0, 0x7F)
E5M2 = Format("e5m2", 1, torch.float8_e5m2, 57344.0, 0x7F)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2)}
BY_CODE: dict[int, Format] = {f.code: f for f in FORMATS.values()}
BY_DTYPE: dict[torch.dtype, Format] = {f.dtype: f for f in FORMATS.values()}

# dtypes that are quantized, and that a GEMM writes; in the order of quantize.h's Real
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)

# cuBLASLt wants FP8 pointers, leading dimensions and contracted sizes on 16 bytes (its manual,
# "cublasLtMatmul: FP8"), so every quantized copy is padded with zeros to multiples of this.
PAD = 16


def padded(size: int) -> int:
    """The smallest multiple of PAD that holds `size`."""
    return -(-size // PAD) * PAD


def get(name: str, who: str = "quantize") -> Format:
    """The format called `name`; ValueError names `who` asked and what there is."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{who}: expected a format out of {sorted(FORMATS)}, got {name!r}")
    return found
