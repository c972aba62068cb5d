"""Decides which format, rounding and accumulation each of a linear layer's six operands gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import formats
from .formats import IN_BF16
from .mixed import HeldWeight, Layer, MixedLayer, PerTensor, held_weight, mix
from .reference_delayed import LONGEST
from .settings import GUARDED, Backward, BlockLayer, Forward, FP4Layer

ACCUMULATE = ("fast", "exact")
PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Gemm:
    """One product d [M,N] = a [M,K] b [N,K]^T.

    a, b: formats of the operands; None: the operand is left in bf16. accumulate: "fast" lets the
    tensor cores keep fewer bits of the running sum (cuBLASLt's FAST_ACCUM); "exact" carries it in
    fp32.

    With one None the other operand is quantized as it is without it, and bf16 tensor cores multiply
    its codes, which bf16 holds exactly, at bf16's speed at best: it tells which operand costs
    quality. fp32 and fp16 are rounded to bf16 for a None. Such a product has no "fast".
    """

    a: str | None = "e4m3"
    b: str | None = "e4m3"
    accumulate: str = "exact"

    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE:
            raise ValueError(
                f"Gemm: expected accumulate out of {ACCUMULATE}, got {self.accumulate!r}"
            )
        if self.fast and None in (self.a, self.b):
            raise ValueError(
                f"Gemm: expected accumulate='exact' of a product with an operand in bf16, got "
                f"'fast' with {self.a!r} and {self.b!r} (cuBLASLt has it for FP8 alone)"
            )
        for operand in (self.a, self.b):
            if operand is not None:
                formats.get(operand, "Gemm")
        if self.a == self.b == "e5m2":
            raise ValueError(
                "Gemm: expected at most one e5m2 operand, got two "
                "(no tensor core path multiplies e5m2 by e5m2; make one of them e4m3)"
            )

    @property
    def fast(self) -> bool:
        return self.accumulate == "fast"


@dataclass(frozen=True)
class Delayed:
    """Scales from the steps before, so that a tensor is read once.

    length: steps that a history holds, 1 to 1024. use: "max" of them or the "latest". margin: the
    scale covers 2^margin times that. guard: a tensor that outgrew its scale is quantized again in
    the same call, which the device decides, so that no step saturates; without it values beyond
    saturate for a step. A NaN or an Inf always surfaces.
    """

    length: int = 16
    use: str = "max"
    margin: int = 0
    guard: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.length <= LONGEST:
            raise ValueError(
                f"Delayed: expected a length from 1 to {LONGEST} steps, got {self.length}"
            )
        if self.use not in ("max", "latest"):
            raise ValueError(f"Delayed: expected use='max' or 'latest', got {self.use!r}")
        if not 0 <= self.margin <= 64:
            raise ValueError(f"Delayed: expected a margin from 0 to 64, got {self.margin}")


@dataclass(frozen=True)
class Recipe:
    """How a linear layer y = x w^T is computed in training.

    fprop: y = x w^T (a is x, b is w); dgrad: dx = dy w (a is dy, b is w);
    wgrad: dw = dy^T x (a is dy, b is x). Scales are per tensor, from the tensor at hand
    ("current scaling") or, with `delayed`, from the steps before, and with one scale a tensor dy
    needs the range of e5m2.

    Accumulation is exact everywhere. Fast keeps so few bits of the running sum that terms of one
    sign are lost on Hopper: 4096 ones sum to 4020, 16384 to 16093. In fprop it saves 0 to 2 % of a
    layer there (benchmarks/results/h200, "accumulation").

    An operand that takes part in two products has one format in both: it is quantized once. In
    either it may be left in bf16 instead: with a None anywhere the layer computes as a MixedRecipe.
    """

    name: str = "fp8"
    fprop: Gemm = Gemm("e4m3", "e4m3", "exact")
    dgrad: Gemm = Gemm("e5m2", "e4m3", "exact")
    wgrad: Gemm = Gemm("e5m2", "e4m3", "exact")
    delayed: Delayed | None = None

    # what the operators are told, found once: packed Forward and Backward, without what is wanted
    forward_settings: int = field(init=False, repr=False, compare=False)
    backward_settings: int = field(init=False, repr=False, compare=False)
    history_settings: int = field(init=False, repr=False, compare=False)
    # where an operand is in bf16
    mix: MixedLayer | None = field(init=False, repr=False, compare=False)
    # what reuse_weights() holds of w
    weight: HeldWeight | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, first, second in (
            ("x (fprop.a and wgrad.b)", self.fprop.a, self.wgrad.b),
            ("w (fprop.b and dgrad.b)", self.fprop.b, self.dgrad.b),
            ("dy (dgrad.a and wgrad.a)", self.dgrad.a, self.wgrad.a),
        ):
            if first != second and first is not None and second is not None:
                raise ValueError(
                    f"Recipe: expected one format for {what}, got {first!r} and {second!r} "
                    "(each operand is quantized once and used in both products)"
                )
        operands = (
            self.fprop.a or self.wgrad.b,
            self.fprop.b or self.dgrad.b,
            self.dgrad.a or self.wgrad.a,
        )
        x, w, dy = (formats.get(f or "e4m3").code for f in operands)  # or no product has it
        forward = Forward(x, w, self.fprop.fast)
        backward = Backward(dy, w, self.dgrad.fast, self.wgrad.fast)
        object.__setattr__(self, "forward_settings", forward.pack())
        object.__setattr__(self, "backward_settings", backward.pack())
        guarded = self.delayed is not None and self.delayed.guard
        object.__setattr__(self, "history_settings", GUARDED if guarded else 0)
        gemms = {product: getattr(self, product) for product in PRODUCTS}
        left = [product for product, gemm in gemms.items() if None in (gemm.a, gemm.b)]
        if left and self.delayed is not None:
            raise ValueError(
                f"Recipe: expected formats for all operands with scales from the steps before, got "
                f"None in {' and '.join(left)} (leave `delayed` out)"
            )
        layers = [_layer(self, product) for product in PRODUCTS]
        object.__setattr__(self, "mix", mix(*layers) if left else None)
        weight = None if self.delayed is not None else held_weight(*layers)
        object.__setattr__(self, "weight", weight)

    def __str__(self) -> str:
        return self.name


FOUR_OVER_SIX = ("none", "x", "w", "both")


@dataclass(frozen=True)
class FP4Recipe:
    """How a linear layer y = x w^T is computed in FP4, all three products of it.

    format: "nvfp4" (a scale each 16 elements and one a tensor) or "mxfp4" (a power of two each
    32). weights_2d: w in blocks of 16 x 16, so that fprop and dgrad see the same numbers (nvfp4
    alone; mxfp4 quantizes w along each contraction). rotate_wgrad: a 16-wide Hadamard transform
    with fixed signs on both operands of wgrad. stochastic_dy: dy is rounded stochastically, so
    that its error averages out; the random bits come from torch's generator. All on by default,
    as others train (arXiv 2509.25149).

    four_over_six: "none", "x", "w" or "both": of these, each block maps its largest value to 6 or
    to 4, whichever has the smaller squared error (nvfp4 alone; arXiv 2512.02010). scale_up_dy:
    block scales of dy are rounded up so that nothing saturates and stochastic rounding is unbiased
    (in mxfp4 they always are).
    """

    name: str = "nvfp4"
    format: str = "nvfp4"
    weights_2d: bool = True
    rotate_wgrad: bool = True
    stochastic_dy: bool = True
    four_over_six: str = "none"
    scale_up_dy: bool = False

    # what the operators are told, found once: a packed FP4Layer, without what is wanted
    settings: int = field(init=False, repr=False, compare=False)
    weight: HeldWeight | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.format not in formats.BLOCK_FORMATS:
            raise ValueError(
                f"FP4Recipe: expected a format out of {sorted(formats.BLOCK_FORMATS)}, got "
                f"{self.format!r}"
            )
        if self.four_over_six not in FOUR_OVER_SIX:
            raise ValueError(
                f"FP4Recipe: expected four_over_six out of {FOUR_OVER_SIX}, got "
                f"{self.four_over_six!r}"
            )
        mx = self.format == "mxfp4"
        if mx and self.four_over_six != "none":
            raise ValueError(
                f"FP4Recipe: expected four_over_six='none' in mxfp4, got {self.four_over_six!r} "
                "(its scales are powers of two: none lies between those of 6 and of 4)"
            )
        layer = FP4Layer(
            mx,
            self.weights_2d and not mx,
            self.rotate_wgrad,
            self.stochastic_dy,
            self.four_over_six in ("x", "both"),
            self.four_over_six in ("w", "both"),
            self.scale_up_dy,
        )
        object.__setattr__(self, "settings", layer.pack())

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class BlockRecipe:
    """How a linear layer y = x w^T is computed in FP8 with scales finer than a tensor's.

    fprop, dgrad, wgrad: how both operands of the product are scaled, each along its contraction:
    "row", one fp32 scale a row; "block", fp32 for each 128 elements, of w for each 128 x 128 in
    fprop and dgrad, which so see the same numbers (arXiv 2412.19437); "block_pow2", the same with
    powers of two; "mx", a power of two for each 32 (mxfp8; arXiv 2506.08027), rounded up; or
    "bf16": not quantized.

    Elements are E4M3. dy: "e5m2" gives dy more range, where its products are scaled by row. fast:
    the products whose sum the tensor cores may carry in fewer bits, where they are scaled by row;
    see Recipe.
    """

    name: str = "fp8_block"
    fprop: str = "block"
    dgrad: str = "block"
    wgrad: str = "block"
    dy: str = "e4m3"
    fast: tuple[str, ...] = ()

    # what the operators are told, found once: a packed BlockLayer, without what is wanted
    settings: int = field(init=False, repr=False, compare=False)
    weight: HeldWeight | None = field(init=False, repr=False, compare=False)
    # how it scales, each way once, in the table's order; bf16 only where there is nothing else
    scalings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            if getattr(self, product) not in formats.SCALINGS:
                raise ValueError(
                    f"BlockRecipe: expected {product} out of {sorted(formats.SCALINGS)}, got "
                    f"{getattr(self, product)!r}"
                )
        if self.dy not in formats.FORMATS:
            raise ValueError(
                f"BlockRecipe: expected dy out of {sorted(formats.FORMATS)}, got {self.dy!r}"
            )
        of_dy = {self.dgrad, self.wgrad} - {"bf16"}
        if self.dy == "e5m2" and of_dy != {"row"}:
            raise ValueError(
                f"BlockRecipe: expected dy='e4m3', got 'e5m2' with dgrad {self.dgrad!r} and wgrad "
                f"{self.wgrad!r} (blocks have the range in their scales; e5m2 is for products "
                "scaled by row)"
            )
        if not isinstance(self.fast, tuple) or not set(self.fast) <= set(PRODUCTS):
            raise ValueError(
                f"BlockRecipe: expected fast as a tuple of names out of {PRODUCTS}, got "
                f"{self.fast!r}"
            )
        for product in self.fast:
            if getattr(self, product) != "row":
                raise ValueError(
                    f"BlockRecipe: expected fast accumulation of products scaled by row, got "
                    f"{product} in {getattr(self, product)!r} (cuBLASLt has none for it)"
                )
        used = {self.fprop, self.dgrad, self.wgrad} - {"bf16"} or {"bf16"}
        object.__setattr__(self, "scalings", tuple(n for n in formats.SCALINGS if n in used))
        fprop, dgrad, wgrad = (formats.SCALINGS[getattr(self, p)].code for p in PRODUCTS)
        fast_fprop, fast_dgrad, fast_wgrad = (product in self.fast for product in PRODUCTS)
        layer = BlockLayer(
            fprop, dgrad, wgrad, self.dy == "e5m2", fast_fprop, fast_dgrad, fast_wgrad
        )
        object.__setattr__(self, "settings", layer.pack())
        object.__setattr__(self, "weight", held_weight(layer, layer, layer))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class MixedRecipe:
    """How a linear layer y = x w^T is computed with products of different kinds.

    fprop, dgrad, wgrad: each a recipe or its name, whose product of that name is taken as it is
    there: "nvfp4" as fprop is nvfp4's forward bit for bit, "mxfp8" as wgrad is mxfp8's dw; "bf16"
    leaves the product in bf16. x's columns for dw are quantized as wgrad's recipe has them.

    FP4Recipe's weights_2d is for fprop and dgrad of one such recipe; where the other is of another
    kind it only costs accuracy, so give weights_2d=False. Scales from the steps before (`delayed`)
    are refused.
    """

    name: str
    fprop: str | AnyRecipe
    dgrad: str | AnyRecipe
    wgrad: str | AnyRecipe

    # what the operators are told, found once
    mix: MixedLayer = field(init=False, repr=False, compare=False)
    weight: HeldWeight | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layers = []
        for product in PRODUCTS:
            recipe = _taken(getattr(self, product), product)
            object.__setattr__(self, product, recipe)
            layers.append(_layer(recipe, product))
        object.__setattr__(self, "mix", mix(*layers))
        object.__setattr__(self, "weight", held_weight(*layers))

    def __str__(self) -> str:
        return self.name


OneKind = Recipe | FP4Recipe | BlockRecipe
AnyRecipe = OneKind | MixedRecipe

BF16 = BlockRecipe("bf16", "bf16", "bf16", "bf16")


def _taken(recipe: str | AnyRecipe, product: str) -> OneKind:
    """The recipe that a MixedRecipe has for a product."""
    if recipe == "bf16":
        return BF16
    try:
        found = get(recipe)
    except ValueError:
        raise ValueError(
            f"MixedRecipe: expected {product} as a recipe, as 'bf16' or as a name out of "
            f"{sorted(RECIPES)}, got {recipe!r}"
        ) from None
    if isinstance(found, MixedRecipe):
        found = getattr(found, product)
    if isinstance(found, Recipe) and found.delayed is not None:
        raise ValueError(
            f"MixedRecipe: expected {product} with scales from the tensor at hand, got {found} "
            "('fp8' has them)"
        )
    return found


def _layer(recipe: OneKind, product: str) -> Layer:
    """What a recipe's own operators are told, of one of its products."""
    if not isinstance(recipe, Recipe):
        unpack = FP4Layer.unpack if isinstance(recipe, FP4Recipe) else BlockLayer.unpack
        return unpack(recipe.settings)
    gemm = getattr(recipe, product)
    if gemm.a is None and gemm.b is None:
        return BlockLayer()
    a, b = (IN_BF16 if f is None else formats.get(f).code for f in (gemm.a, gemm.b))
    return PerTensor(a, b, gemm.fast)


FP8, NVFP4 = Recipe(), FP4Recipe()
RECIPES: dict[str, AnyRecipe] = {
    recipe.name: recipe
    for recipe in (
        FP8,
        BlockRecipe("fp8_row", "row", "row", "row", "e5m2"),
        BlockRecipe("fp8_block"),
        BlockRecipe("fp8_block_row_wgrad", wgrad="row"),
        BlockRecipe("fp8_block_bf16_wgrad", wgrad="bf16"),
        BlockRecipe("fp8_block_pow2", "block_pow2", "block_pow2", "block_pow2"),
        BlockRecipe("mxfp8", "mx", "mx", "mx"),
        Recipe("fp8_delayed", delayed=Delayed()),
        NVFP4,
        FP4Recipe("mxfp4", "mxfp4"),
        FP4Recipe("nvfp4_four_over_six", four_over_six="both"),
        FP4Recipe("nvfp4_unbiased", scale_up_dy=True),
        Recipe("fp8_bf16_wgrad", wgrad=Gemm(None, None)),
    )
}


def get(recipe: str | AnyRecipe) -> AnyRecipe:
    """The recipe that `recipe` is or names; ValueError lists the names there are."""
    if isinstance(recipe, AnyRecipe):
        return recipe
    found = RECIPES.get(recipe) if isinstance(recipe, str) else None
    if found is None:
        raise ValueError(
            f"recipe: expected a Recipe or a name out of {sorted(RECIPES)}, got {recipe!r}"
        )
    return found


# of others that have a name
RECIPES |= {
    recipe.name: recipe
    for recipe in (
        MixedRecipe("fp8_block_backward", "fp8", "fp8_block", "fp8_block"),
        MixedRecipe("nvfp4_mxfp8_backward", FP4Recipe(weights_2d=False), "mxfp8", "mxfp8"),
    )
}


def forward_in_fp4(recipe: AnyRecipe | None) -> FP4Recipe | None:
    """The FP4Recipe that a recipe's forward is of; None where it is of none."""
    if isinstance(recipe, MixedRecipe):
        recipe = recipe.fprop  # type: ignore[assignment]
    return recipe if isinstance(recipe, FP4Recipe) else None
