"""How one operand of a GEMM is quantized, and which operands a GEMM may pair: the one table."""

from __future__ import annotations

from dataclasses import dataclass

from . import formats
from .formats import BLOCK, BLOCK_POW2, FORMATS, MX, NONE, ROW, SCALINGS, TENSOR, VEC16, VEC32

E2M1 = "e2m1"

# What a scaling can be combined with: its elements and the options of Cast that it knows.
_ELEMENTS: dict[str, tuple[str, ...]] = {
    TENSOR.name: ("e4m3", "e5m2"),
    ROW.name: ("e4m3", "e5m2"),
    BLOCK.name: ("e4m3",),
    BLOCK_POW2.name: ("e4m3",),
    MX.name: ("e4m3",),
    VEC16.name: (E2M1,),
    VEC32.name: (E2M1,),
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    TENSOR.name: (),
    ROW.name: (),
    BLOCK.name: ("square",),
    BLOCK_POW2.name: ("square",),
    MX.name: (),
    VEC16.name: ("square", "stochastic", "hadamard", "four_over_six", "scale_up"),
    VEC32.name: ("stochastic", "hadamard", "scale_up"),  # scale_up: they always are
}
_EXCLUSIVE = (
    ("four_over_six", "stochastic", "the error that chooses the scale is that of nearest rounding"),
    ("square", "hadamard", "a rotated block has other elements in the other orientation"),
)


@dataclass(frozen=True)
class Cast:
    """How one operand [R, C] of a GEMM is quantized along its contraction C.

    element: "e4m3", "e5m2" or, in FP4, "e2m1". scaling: what shares a scale. "tensor": one fp32
    scale; "row": one fp32 scale a row; "block": fp32 a 128 elements; "block_pow2": the same with
    powers of two; "mx": a power of two a 32 (mxfp8, rounded up); "nvfp4": E4M3 a 16 and one fp32 a
    tensor; "mxfp4": a power of two a 32.

    square: blocks of 128 x 128 ("block", "block_pow2") or 16 x 16 ("nvfp4"), so that both
    orientations of a weight are the same numbers. stochastic: rounding by chance that keeps the
    mean of the bf16 that an operand is rounded to first, else to nearest even. hadamard: a 16-wide
    transform with fixed signs before. four_over_six: each block maps its largest value to 6 or to
    4, whichever has the smaller squared error; a tie is 6. scale_up: block scales are rounded up,
    so that nothing saturates. The last four are FP4's.

    ValueError for what there is not. In place of a Cast, None leaves an operand in bf16.
    """

    element: str = "e4m3"
    scaling: str = "tensor"
    square: bool = False
    stochastic: bool = False
    hadamard: bool = False
    four_over_six: bool = False
    scale_up: bool = False

    def __post_init__(self) -> None:
        elements = _ELEMENTS.get(self.scaling) if isinstance(self.scaling, str) else None
        if elements is None:
            raise ValueError(
                f"Cast: expected a scaling out of {sorted(_ELEMENTS)}, got {self.scaling!r}"
            )
        if self.element not in elements:
            raise ValueError(
                f"Cast: expected an element out of {list(elements)} with scaling "
                f"{self.scaling!r}, got {self.element!r}"
            )
        for option in ("square", "stochastic", "hadamard", "four_over_six", "scale_up"):
            if getattr(self, option) and option not in _OPTIONS[self.scaling]:
                raise ValueError(
                    f"Cast: expected {option}=False with scaling {self.scaling!r}, got True"
                )
        for first, second, why in _EXCLUSIVE:
            if getattr(self, first) and getattr(self, second):
                raise ValueError(f"Cast: expected {first} without {second}, got both ({why})")

    @property
    def of(self) -> formats.Scaling:
        """Its row of the table of scalings."""
        return SCALINGS[self.scaling]


def elements_of(scaling: formats.Scaling) -> tuple[str, ...]:
    """The elements that a scaling can be combined with, the usual one first."""
    return _ELEMENTS[scaling.name]


def scaling_of(cast: Cast | None) -> formats.Scaling:
    return NONE if cast is None else cast.of


# Kinds of GEMM, as support.py's table calls them, by the scalings of both operands.
_KINDS: dict[tuple[str, str], str] = {
    (NONE.name, NONE.name): "bf16",
    (TENSOR.name, TENSOR.name): "fp8",
    (TENSOR.name, NONE.name): "fp8_bf16",
    (NONE.name, TENSOR.name): "fp8_bf16",
    **{(s.name, s.name): s.name for s in (ROW, BLOCK, BLOCK_POW2, MX)},
    **{(s.name, s.name): "fp4" for s in (VEC16, VEC32)},
}
KINDS = ("fp8", "fp8_bf16", *(s.name for s in (NONE, ROW, BLOCK, BLOCK_POW2, MX)), "fp4")
_FAST = ("fp8", "row")  # kinds that have fast accumulation


def kind_of(a: Cast | None, b: Cast | None, who: str = "Gemm") -> str:
    """The kind of a GEMM of two operands; ValueError, with why, where no tensor core has it."""
    kind = _KINDS.get((scaling_of(a).name, scaling_of(b).name))
    if kind is None:
        raise ValueError(
            f"{who}: expected two operands of one scaling, or one scaled by tensor beside one in "
            f"bf16, got {scaling_of(a).name!r} and {scaling_of(b).name!r} (no tensor core "
            "multiplies the two)"
        )
    if a is None or b is None:
        return kind
    if a.element == b.element == "e5m2":
        raise ValueError(
            f"{who}: expected at most one e5m2 operand, got two "
            "(no tensor core path multiplies e5m2 by e5m2; make one of them e4m3)"
        )
    if a.square:
        raise ValueError(
            f"{who}: expected square blocks of the second operand alone, which is w in fprop and "
            "dgrad, got them of the first"
        )
    if kind != "fp4" and kind != "fp8" and b.element == "e5m2":
        raise ValueError(
            f"{who}: expected e5m2 by row of the first operand alone, which is dy in dgrad and "
            "wgrad, got it of the second"
        )
    if a.hadamard != b.hadamard:
        raise ValueError(
            f"{who}: expected hadamard of both operands or of none, got {a.hadamard} and "
            f"{b.hadamard} (only then does it cancel)"
        )
    return kind


def check_fast(kind: str, a: Cast | None, b: Cast | None, who: str = "Gemm") -> None:
    """ValueError where a kind of GEMM has no fast accumulation."""
    if kind in _FAST:
        return
    of = [None if cast is None else cast.element for cast in (a, b)]
    raise ValueError(
        f"{who}: expected accumulate='exact' of a GEMM of kind {kind!r}, got 'fast' with {of[0]!r} "
        f"and {of[1]!r} (cuBLASLt has it for FP8 scaled by tensor or by row alone)"
    )


def tensor_cast(element: str, who: str) -> Cast:
    """The cast with one scale a tensor that an element alone stands for."""
    if not isinstance(element, str) or element not in FORMATS:
        raise ValueError(f"{who}: expected a format out of {sorted(FORMATS)}, got {element!r}")
    return Cast(element)
