"""Decides which operators compute a layer whose products are of different kinds, and what they are
told."""

from __future__ import annotations

from typing import NamedTuple

from .formats import BY_SCALING, IN_BF16, NONE, ROW, SCALINGS
from .settings import (
    Backward,
    BlockLayer,
    BlockOrientation,
    BlockQuantize,
    Forward,
    FP4Layer,
    FP4Quantize,
    Orientation,
)


class PerTensor(NamedTuple):
    """A product a b^T with one scale an operand: codes of their formats, IN_BF16 for one that has
    none."""

    a: int
    b: int
    fast: bool = False


# A product alone, or what the two calls of a layer of one kind are told: of it one is taken.
Layer = PerTensor | BlockLayer | FP4Layer


class HeldWeight(NamedTuple):
    """How w is quantized beforehand, where it is reused: for each orientation the family of
    operators (as MixedLayer's) and what its quantizing operator is told, a format's code or a
    packed BlockOrientation. None where the product reads w itself."""

    rows: tuple[str, int] | None  # for y
    columns: tuple[str, int] | None  # for dx


class MixedLayer(NamedTuple):
    """The choices of a layer of several kinds. A kind names a family of operators: "fp8" (one scale
    a tensor), "block" or "fp4"; a product in bf16 is "block"'s."""

    fprop: str  # kinds
    dgrad: str
    wgrad: str
    forward: int  # packed Forward, BlockLayer or FP4Layer, without what is wanted
    dx: int  # packed Backward, BlockLayer or FP4Layer, likewise
    dw: int
    joint: bool  # one backward call makes both: it is told `dx`, which is `dw`
    columns: str  # what makes x's columns for dw: "forward", "quantize"; "x" is x itself
    quantize: int  # the latter: a packed BlockQuantize or FP4Quantize, or the format's code
    keeps_w: bool  # what the forward measured of w serves dx
    draws_dx: bool  # from torch's generator, for stochastic rounding
    draws_dw: bool
    products: tuple[str, ...]  # kinds in the support table; bf16 only where there is no other


def mix(fprop: Layer, dgrad: Layer, wgrad: Layer) -> MixedLayer:
    """How three products, each as a layer of its kind has it, are computed together."""
    both = _both(dgrad, wgrad)
    forward, made = _forward(fprop, dgrad, wgrad)
    of_dw = _product(wgrad, "wgrad")
    if of_dw == NONE.name or (isinstance(wgrad, PerTensor) and wgrad.b == IN_BF16):
        columns = "x"
    else:
        columns = "forward" if made else "quantize"
    used = {_product(fprop, "fprop"), _product(dgrad, "dgrad"), of_dw} - {NONE.name} or {NONE.name}
    return MixedLayer(
        _kind(fprop),
        _kind(dgrad),
        _kind(wgrad),
        forward,
        _alone(dgrad, "dgrad") if both is None else both,
        _alone(wgrad, "wgrad") if both is None else both,
        both is not None,
        columns,
        _quantize(wgrad),
        _keeps_w(fprop, dgrad),
        isinstance(dgrad, FP4Layer) and dgrad.stochastic_dy,
        isinstance(wgrad, FP4Layer) and wgrad.stochastic_dy,
        tuple(name for name in ("fp8", "fp8_bf16", *SCALINGS, "fp4") if name in used),
    )


def held_weight(fprop: Layer, dgrad: Layer, wgrad: Layer) -> HeldWeight | None:
    """What can be held of a weight; None where nothing can: FP4, and products with an operand in
    bf16, quantize it in their own calls."""

    def of(layer: Layer, product: str) -> tuple[str, int] | None:
        if isinstance(layer, BlockLayer):
            scaling = BY_SCALING[getattr(layer, product)]
            how = BlockOrientation(scaling.code, square=scaling.square)
            return None if scaling is NONE else ("block", how.pack())
        if isinstance(layer, FP4Layer) or _product(layer, product) != "fp8":
            return None
        return "fp8", layer.b

    columns = of(dgrad, "dgrad")
    if columns and columns[0] == "fp8" and _product(wgrad, "wgrad") == "fp8_bf16":
        columns = None  # one call makes both
    found = HeldWeight(of(fprop, "fprop"), columns)
    return found if any(found) else None


def _kind(layer: Layer) -> str:
    if isinstance(layer, FP4Layer):
        return "fp4"
    return "block" if isinstance(layer, BlockLayer) else "fp8"


def _product(layer: Layer, product: str) -> str:
    """Its row in the support table."""
    if isinstance(layer, BlockLayer):
        return BY_SCALING[getattr(layer, product)].name
    if isinstance(layer, PerTensor) and IN_BF16 in (layer.a, layer.b):
        return "fp8_bf16"
    return _kind(layer)


def _forward(fprop: Layer, dgrad: Layer, wgrad: Layer) -> tuple[int, bool]:
    """What the forward is told, and whether it can return x's columns as wgrad has them."""
    if isinstance(fprop, FP4Layer):
        if not isinstance(wgrad, FP4Layer):
            return fprop.pack(), False
        same = (fprop.mx, fprop.four_over_six_x) == (wgrad.mx, wgrad.four_over_six_x)
        return fprop._replace(rotate=wgrad.rotate).pack(), same  # of the columns alone
    if isinstance(fprop, BlockLayer):
        return _blocks(fprop, dgrad, wgrad).pack(), isinstance(wgrad, BlockLayer)
    same = isinstance(wgrad, PerTensor) and wgrad.b == fprop.a
    return Forward(*fprop).pack(), same


def _quantize(wgrad: Layer) -> int:
    """What wgrad's quantizing operator is told to make x's columns alone."""
    if isinstance(wgrad, FP4Layer):
        how = Orientation(True, rotated=wgrad.rotate, four_over_six=wgrad.four_over_six_x)
        return FP4Quantize(columns=how, mx=wgrad.mx).pack()
    if isinstance(wgrad, BlockLayer):
        return BlockQuantize(columns=BlockOrientation(wgrad.wgrad)).pack()
    return wgrad.b


def _keeps_w(fprop: Layer, dgrad: Layer) -> bool:
    """Whether dx quantizes w by what the forward measured: one scale a tensor, or by row."""
    if isinstance(fprop, FP4Layer) or isinstance(dgrad, FP4Layer):
        return False
    if isinstance(fprop, BlockLayer) or isinstance(dgrad, BlockLayer):
        return _product(fprop, "fprop") == _product(dgrad, "dgrad") == ROW.name
    return fprop.b == dgrad.b != IN_BF16


def _blocks(fprop: Layer | None, dgrad: Layer | None, wgrad: Layer | None) -> BlockLayer:
    """A layer with those products that are BlockLayers'."""
    made = BlockLayer()
    if isinstance(fprop, BlockLayer):
        made = made._replace(fprop=fprop.fprop, fast_fprop=fprop.fast_fprop)
    if isinstance(dgrad, BlockLayer):
        e5m2 = dgrad.e5m2_dy and dgrad.dgrad == ROW.code
        made = made._replace(dgrad=dgrad.dgrad, fast_dgrad=dgrad.fast_dgrad, e5m2_dy=e5m2)
    if isinstance(wgrad, BlockLayer):
        e5m2 = wgrad.e5m2_dy and wgrad.wgrad == ROW.code
        made = made._replace(wgrad=wgrad.wgrad, fast_wgrad=wgrad.fast_wgrad)
        made = made._replace(e5m2_dy=made.e5m2_dy or e5m2)
    return made


def _alone(layer: Layer, product: str) -> int:
    """What the backward call is told that makes dx or dw alone."""
    if isinstance(layer, FP4Layer):
        return layer.pack()
    if isinstance(layer, BlockLayer):
        of_dx = product == "dgrad"
        return _blocks(None, layer if of_dx else None, None if of_dx else layer).pack()
    if product == "dgrad":
        return Backward(layer.a, layer.b, layer.fast).pack()
    return Backward(layer.a, 0, fast_wgrad=layer.fast).pack()


def _both(dgrad: Layer, wgrad: Layer) -> int | None:
    """What one backward call is told that makes dx and dw; None where there is none: they are of
    different kinds or take dy in different ways."""
    if isinstance(dgrad, FP4Layer) and isinstance(wgrad, FP4Layer):
        fields = "mx", "stochastic_dy", "scale_up_dy"
        if any(getattr(dgrad, f) != getattr(wgrad, f) for f in fields):
            return None
        return dgrad._replace(rotate=wgrad.rotate).pack()
    if isinstance(dgrad, BlockLayer) and isinstance(wgrad, BlockLayer):
        if dgrad.dgrad == wgrad.wgrad == ROW.code and dgrad.e5m2_dy != wgrad.e5m2_dy:
            return None
        return _blocks(None, dgrad, wgrad).pack()
    if isinstance(dgrad, PerTensor) and isinstance(wgrad, PerTensor) and dgrad.a == wgrad.a:
        return Backward(dgrad.a, dgrad.b, dgrad.fast, wgrad.fast).pack()
    return None
