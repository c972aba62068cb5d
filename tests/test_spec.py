"""The integers that tell an operator what to do: spec.py reads what it writes, and as C++ does."""

from __future__ import annotations

import itertools
import pathlib
import re
from typing import Any

import pytest
import torch
from every import ALL_CASTS

import narrowfloat as nf
from narrowfloat import formats, spec
from narrowfloat.formats import HIGH_PRECISION
from narrowfloat.spec import CAST_BITS, LAYOUT, Backward, Forward, Quantize

CSRC = pathlib.Path(__file__).parents[1] / "csrc"
GROUPS = {name.split(".")[0] for name in LAYOUT}
CASTS = [None, *ALL_CASTS]
DTYPES = (None, *HIGH_PRECISION)
FLAGS = (False, True)


def packed(kind: type[Any], values: tuple[Any, ...]) -> int:
    """The integer of a call's choices, by LAYOUT alone."""
    group = {Forward: "forward", Backward: "backward", Quantize: "quantize"}[kind]
    bits = 0
    for name, value in zip(kind._fields, values, strict=True):
        if isinstance(value, torch.dtype) or name.endswith("dtype"):
            value = DTYPES.index(value)
        elif value is None or isinstance(value, nf.Cast):
            value = spec.bits_of(value)
        bits |= spec.bit(f"{group}.{name}", int(value))
    return bits


def test_fields_of_one_call_do_not_overlap() -> None:
    assert {"cast", "forward", "backward", "quantize"} == GROUPS
    for group in GROUPS:
        taken = 0
        for name, (shift, width) in LAYOUT.items():
            if name.split(".")[0] == group:
                mask = (1 << width) - 1 << shift
                assert width > 0 and not taken & mask, name
                taken |= mask
        assert taken == (1 << taken.bit_length()) - 1, f"a gap in {group}"
        assert taken.bit_length() <= 63  # the dispatcher's int is signed
    assert sum(w for name, (_, w) in LAYOUT.items() if name.startswith("cast.")) == CAST_BITS


def test_a_call_has_the_fields_that_its_class_reads() -> None:
    for group, kind in (("forward", Forward), ("backward", Backward), ("quantize", Quantize)):
        stated = {name for name in LAYOUT if name.startswith(f"{group}.")}
        assert stated == {f"{group}.{name}" for name in kind._fields}


def test_every_cast_comes_back() -> None:
    assert len({spec.bits_of(cast) for cast in ALL_CASTS}) == len(ALL_CASTS)
    assert spec.bits_of(None) == 0 and spec.cast_of(0, "x") is None
    known = {spec.bits_of(cast): cast for cast in ALL_CASTS}
    for bits in range(1, 1 << CAST_BITS):
        if bits in known:
            assert spec.cast_of(bits, "x") == known[bits]
        else:
            with pytest.raises(ValueError, match="^x: "):
                spec.cast_of(bits, "x")


def test_every_choice_comes_back() -> None:
    casts = itertools.cycle(CASTS)  # unlike neighbours: one read from another's place shows
    seen: set[Any] = set()
    for flags in itertools.product(FLAGS, repeat=5):
        for dtype in DTYPES:
            choice = Forward(next(casts), next(casts), next(casts), *flags, dtype)
            assert Forward.unpack(packed(Forward, choice)) == choice
            seen |= {choice.fprop_a, choice.fprop_b, choice.wgrad_b}
    assert seen == set(CASTS)
    for flags in itertools.product(FLAGS, repeat=6):
        for dtypes in itertools.product(DTYPES, repeat=2):
            choice = Backward(*(next(casts) for _ in range(4)), *flags, *dtypes)
            assert Backward.unpack(packed(Backward, choice)) == choice
    for rows, columns in itertools.product(CASTS, repeat=2):
        for flags in ((True, False, False, True), (False, True, True, False), (True,) * 4):
            choice = Quantize(rows, columns, *flags)
            assert choice.pack() == packed(Quantize, choice)
            assert Quantize.unpack(choice.pack()) == choice
    assert spec.both(CASTS[1], None) == Quantize(CASTS[1], None, True, False)


def test_what_a_call_adds_is_in_its_place() -> None:
    """What autograd.py adds to a recipe's bits is what the layout says."""
    nothing = (None, None, None)
    assert packed(Forward, Forward(*nothing, False, True, False, False, False, None)) == spec.SAVE_X
    assert packed(Forward, Forward(*nothing, False, False, True, False, False, None)) == spec.KEEP_W
    for dtype in HIGH_PRECISION:
        of = Forward(*nothing, False, False, False, True, True, dtype)
        added = spec.FORWARD_GUARDED | spec.FORWARD_JOINS | spec.Y_DTYPE[dtype]
        assert packed(Forward, of) == added
        back = Backward(None, *nothing, False, False, True, True, True, True, dtype, None)
        added = spec.NEED_DX | spec.W_MEASURED | spec.BACKWARD_GUARDED | spec.BACKWARD_JOINS
        assert packed(Backward, back) == added | spec.DW[dtype]
        assert (
            packed(Backward, back._replace(dw_dtype=None, db_dtype=dtype)) == added | spec.DB[dtype]
        )
    with pytest.raises(ValueError, match="forward.fast in 1 bits, got 2"):
        spec.bit("forward.fast", 2)


@pytest.mark.parametrize("recipe", nf.RECIPES)
def test_what_a_recipe_tells_the_operators(recipe: str) -> None:
    """Its casts in their places, and nothing that a call would ask for."""
    made = nf.RECIPES[recipe]
    guard = made.delayed is not None and made.delayed.guard
    (x, w), (dy, w_columns), (dy_columns, x_columns) = (
        getattr(made, gemm).casts for gemm in ("fprop", "dgrad", "wgrad")
    )
    nothing = (False, False)
    assert Forward.unpack(made.forward_spec) == Forward(
        x, w, x_columns, made.fprop.fast, *nothing, guard, False, None
    )
    assert Backward.unpack(made.backward_spec) == Backward(
        dy, w_columns, dy_columns, x_columns, made.dgrad.fast, made.wgrad.fast,
        *nothing, guard, False, None, None,
    )  # fmt: skip
    assert made.save_x == (spec.SAVE_X if x_columns is not None else 0)
    measured = w is not None and w == w_columns and w.scaling in ("tensor", "row")
    assert made.keep_w == (spec.KEEP_W if measured else 0)


def test_gradients_asks_for_what_is_needed() -> None:
    bias = torch.ones(1, dtype=torch.float16)
    for needs in itertools.product(FLAGS, repeat=3):
        found, bits = spec.gradients((*needs, False), torch.bfloat16, bias)
        choice = Backward.unpack(bits)
        assert found == needs
        assert (choice.need_dx, choice.dw_dtype, choice.db_dtype) == (
            needs[0],
            torch.bfloat16 if needs[1] else None,
            torch.float16 if needs[2] else None,
        )
        found, bits = spec.gradients(needs, torch.bfloat16, None)
        assert found == (*needs[:2], False) and Backward.unpack(bits).db_dtype is None


# ---- the compiled part ----


def header() -> str:
    """spec.h without its comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", (CSRC / "linear" / "spec.h").read_text())


def test_the_header_has_the_same_bits() -> None:
    text = header()
    width = re.search(r"kCastBits = (\d+);", text)
    assert width and int(width[1]) == CAST_BITS
    fields = re.findall(r"\bFIELD\((\w+), (\w+), (\d+), (\w+)\)", text)
    stated = {
        f"{group}.{name}": (int(shift), CAST_BITS if bits == "kCastBits" else int(bits))
        for group, name, shift, bits in fields
    }
    assert len(stated) == len(fields) and stated == LAYOUT


def test_the_binary_has_the_same_bits() -> None:
    module = nf._binary.module
    if module is None:
        pytest.skip(f"no binary: {nf._binary.problem}")
    assert {name: (shift, width) for name, shift, width in module.spec_layout()} == LAYOUT


def constants(file: str, enum: str) -> dict[str, int]:
    found = re.search(rf"enum class {enum} : \w+ \{{(.*?)\}}", (CSRC / file).read_text(), re.S)
    assert found, enum
    body = re.sub(r"//[^\n]*", "", found[1])
    return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", body)}


def test_the_headers_count_scalings_and_types_as_python_does() -> None:
    scalings = constants("quantize/cast.h", "Scaling")
    python = {s.name: s.code for s in formats.SCALINGS.values()}
    python["none"], python["pow2"] = python.pop("bf16"), python.pop("block_pow2")
    assert scalings == python
    reals = constants("quantize/tensor.h", "Real")
    assert reals == {"f32": 0, "bf16": 1, "f16": 2}
    assert HIGH_PRECISION == (torch.float32, torch.bfloat16, torch.float16)
