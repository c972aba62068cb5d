"""Decides that what Python packs into one integer is what it and C++ read from it."""

from __future__ import annotations

import itertools
import pathlib
import re

import torch

from narrowfloat import formats, settings
from narrowfloat.formats import HIGH_PRECISION
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

HEADER = pathlib.Path(__file__).parents[1] / "csrc" / "settings.h"


def test_every_choice_comes_back() -> None:
    flags = (False, True)
    for choice in itertools.product((0, 1), (0, 1), flags, flags):
        assert Forward.unpack(Forward(*choice).pack()) == Forward(*choice)
    dtypes = (None, torch.float32, torch.bfloat16, torch.float16)
    choices = itertools.product((0, 1), (0, 1), flags, flags, flags, dtypes, dtypes)
    packed = {Backward(*choice).pack(): Backward(*choice) for choice in choices}
    assert len(packed) == 4 * 8 * 16
    assert all(Backward.unpack(bits) == choice for bits, choice in packed.items())


def test_a_packed_choice_is_the_sum_of_its_bits() -> None:
    """What autograd.py adds to a recipe's bits is what pack() would have put there."""
    base = Backward(1, 0, True, False)
    whole = base._replace(need_dx=True, dw_dtype=torch.float32, db_dtype=torch.float16)
    added = settings.NEED_DX | settings.DW[torch.float32] | settings.DB[torch.float16]
    assert base.pack() | added == whole.pack()
    assert Forward(0, 1).pack() | settings.SAVE_X == Forward(0, 1, save_x=True).pack()


def test_the_header_has_the_same_bits() -> None:
    text = HEADER.read_text()

    def constant(name: str) -> int:
        found = re.search(rf"\b{name} = (\d+)( << (\d+))?[,;]", text)
        assert found, name
        return int(found[1]) << int(found[3] or 0)

    assert constant("kFast") == settings.FAST and constant("kFastWgrad") == settings.FAST_WGRAD
    assert constant("kSaveX") == settings.SAVE_X and constant("kNeedDx") == settings.NEED_DX
    assert constant("kDwShift") == settings.DW_SHIFT and constant("kDbShift") == settings.DB_SHIFT
    assert constant("kFormatBits") == constant("kTypeBits") == 15
    assert constant("kWFormatShift") == 4
    reals = re.search(
        r"enum class Real : int \{ (.*?) \}", (HEADER.parent / "quantize.h").read_text()
    )
    assert reals and reals[1] == "f32 = 0, bf16 = 1, f16 = 2"
    assert HIGH_PRECISION == (torch.float32, torch.bfloat16, torch.float16)


def test_every_fp4_choice_comes_back() -> None:
    flags = (False, True)
    for six in itertools.product(flags, repeat=6):
        for mx, two_d in itertools.product(flags, repeat=2):
            choice = FP4Quantize(Orientation(*six), Orientation(*reversed(six)), mx, two_d)
            assert FP4Quantize.unpack(choice.pack()) == choice
    dtypes = (None, torch.float32, torch.bfloat16, torch.float16)
    packed = {}
    for choice in itertools.product(*[flags] * 8, dtypes, dtypes):
        packed[FP4Layer(*choice).pack()] = FP4Layer(*choice)
    assert len(packed) == 2**8 * 16
    assert all(FP4Layer.unpack(bits) == choice for bits, choice in packed.items())


def test_fp4_bits_are_the_contracts() -> None:
    """csrc/fp4_linear.cpp names the same."""
    for at, bit in enumerate((1, 2, 4, 8, 16, 32)):
        one = Orientation(*(i == at for i in range(6)))
        assert FP4Quantize(rows=one).pack() == bit and FP4Quantize(columns=one).pack() == bit << 8
    assert FP4Quantize(mx=True).pack() == 1 << 16 and FP4Quantize(two_d=True).pack() == 1 << 17
    for at, bit in enumerate((1, 2, 4, 8, 16, 32, 64, settings.NEED_DX)):
        assert FP4Layer(*(i == at for i in range(8))).pack() == bit  # type: ignore[arg-type]
    assert FP4Layer(wanted=True).pack() == settings.SAVE_X
    layer = FP4Layer(dw_dtype=torch.float32, db_dtype=torch.float16)
    assert layer.pack() == settings.DW[torch.float32] | settings.DB[torch.float16]


def test_every_block_choice_comes_back() -> None:
    flags = (False, True)
    for how in itertools.product(range(5), flags, flags, flags):
        choice = BlockQuantize(BlockOrientation(*how), BlockOrientation(4 - how[0], *how[3:0:-1]))
        assert BlockQuantize.unpack(choice.pack()) == choice
    dtypes = (None, torch.float32, torch.bfloat16, torch.float16)
    packed = {}
    for choice in itertools.product((0, 4), (1, 3), (2, 4), *[flags] * 6, dtypes, dtypes):
        packed[BlockLayer(*choice).pack()] = BlockLayer(*choice)
    assert len(packed) == 2**9 * 16
    assert all(BlockLayer.unpack(bits) == choice for bits, choice in packed.items())


def test_block_bits_are_the_contracts() -> None:
    """csrc/block_linear.cpp and block_quantize.h name the same."""
    for code in range(5):
        assert BlockLayer(code).pack() == code and BlockLayer(0, code).pack() == code << 3
        assert BlockLayer(0, 0, code).pack() == code << 6
    for bit, field in (
        (9, "e5m2_dy"),
        (10, "wanted"),
        (11, "fast_fprop"),
        (20, "fast_dgrad"),
        (21, "fast_wgrad"),
        (22, "keep_w"),
    ):
        assert BlockLayer(**{field: True}).pack() == 1 << bit  # type: ignore[arg-type]
    both = BlockLayer(dw_dtype=torch.float32, db_dtype=torch.float16)
    assert both.pack() == settings.DW[torch.float32] | settings.DB[torch.float16]
    for bit, field in ((3, "operand"), (4, "e5m2"), (5, "square")):
        one = BlockOrientation(**{field: True})  # type: ignore[arg-type]
        assert BlockQuantize(one).pack() == 1 << bit
        assert BlockQuantize(columns=one).pack() == 1 << bit + 8
    header = (HEADER.parent / "block_quantize.h").read_text()
    found = re.search(r"enum class Scaling : int \{ (.*?) \}", header)
    codes = {"none": 0, "row": 1, "block": 2, "pow2": 3, "mx": 4}
    assert found and found[1] == ", ".join(f"{name} = {code}" for name, code in codes.items())
    assert [s.code for s in formats.SCALINGS.values()] == list(codes.values())
