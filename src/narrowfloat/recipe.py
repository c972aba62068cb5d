"""What a user asks for: how the six operands of a linear layer's three GEMMs are quantized."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import formats, spec
from .cast import KINDS, Cast, check_fast, kind_of, scaling_of, tensor_cast
from .formats import NONE, SCALINGS
from .reference.delayed import LONGEST
from .spec import bit, bits_of

ACCUMULATE = ("fast", "exact")
GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Gemm:
    """One GEMM d [M,N] = a [M,K] b [N,K]^T.

    a, b: how its operands are quantized, a Cast each; the name of an element ("e4m3", "e5m2") is
    one with a scale for the whole tensor; None: the operand is left in bf16. accumulate: "fast"
    lets the tensor cores keep fewer bits of the running sum (cuBLASLt's FAST_ACCUM); "exact"
    carries it in fp32. ValueError for what no tensor core multiplies (cast.py has the table).

    With one None the other operand is quantized as it is without it, and bf16 tensor cores multiply
    its codes, which bf16 holds exactly, at bf16's speed at best: it tells which operand costs
    quality. fp32 and fp16 are rounded to bf16 for a None.
    """

    a: Cast | str | None = "e4m3"
    b: Cast | str | None = "e4m3"
    accumulate: str = "exact"

    # as the support table calls it
    kind: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE:
            raise ValueError(
                f"Gemm: expected accumulate out of {ACCUMULATE}, got {self.accumulate!r}"
            )
        for name in ("a", "b"):
            operand = getattr(self, name)
            if operand is not None and not isinstance(operand, Cast):
                object.__setattr__(self, name, tensor_cast(operand, "Gemm"))
        a, b = self.casts
        object.__setattr__(self, "kind", kind_of(a, b))
        if self.fast:
            check_fast(self.kind, a, b)

    @property
    def casts(self) -> tuple[Cast | None, Cast | None]:
        """Of both operands; None: bf16."""
        return self.a, self.b  # type: ignore[return-value]

    @property
    def fast(self) -> bool:
        """Whether accumulation is fast."""
        return self.accumulate == "fast"


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: scales from the amax history of a tensor, so that it is read once.

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


_OPERANDS = (
    ("x", ("fprop", "a"), ("wgrad", "b")),
    ("w", ("fprop", "b"), ("dgrad", "b")),
    ("dy", ("dgrad", "a"), ("wgrad", "a")),
)


def _side(cast: Cast | None) -> tuple[bool, bool, bool]:
    """Of an orientation: is it quantized, with scales of rows or blocks, with one of the tensor?"""
    if cast is None:
        return False, False, False
    return True, cast.scaling != "tensor", cast.of.tensor_scale


@dataclass(frozen=True)
class Recipe:
    """How a linear layer y = x w^T is computed in training: three GEMMs of two operands each.

    fprop: y = x w^T (a is x, b is w); dgrad: dx = dy w (a is dy, b is w); wgrad: dw = dy^T x (a is
    dy, b is x). delayed: scales by amax history instead of the tensor at hand ("current scaling"),
    for operands that all have one scale a tensor.

    The default is "fp8": with one scale a tensor dy needs the range of e5m2. Accumulation is exact
    everywhere. Fast keeps so few bits of the running sum that terms of one sign are lost on Hopper:
    4096 ones sum to 4020, 16384 to 16093. In fprop it saves 0 to 2 % of a layer there
    (benchmarks/results/h200, "accumulation").

    An operand that takes part in two GEMMs is quantized along both contractions, each as its GEMM
    has it: at once where both are alike. block_recipe(), fp4_recipe() and mixed_recipe() make
    recipes by shorter words.
    """

    name: str = "fp8"
    fprop: Gemm = Gemm("e4m3", "e4m3", "exact")
    dgrad: Gemm = Gemm("e5m2", "e4m3", "exact")
    wgrad: Gemm = Gemm("e5m2", "e4m3", "exact")
    delayed: Delayed | None = None

    # The operators' specs, found once, without what a call asks for (spec.py).
    forward_spec: int = field(init=False, repr=False, compare=False)
    backward_spec: int = field(init=False, repr=False, compare=False)
    # what a call adds to them: x's columns, what the forward measured of w for dgrad
    save_x: int = field(init=False, repr=False, compare=False)
    keep_w: int = field(init=False, repr=False, compare=False)
    # which of the forward's results a backward can need
    saves_x_scales: bool = field(init=False, repr=False, compare=False)
    saves_x_scale: bool = field(init=False, repr=False, compare=False)
    # how reuse_weights() quantizes w, for the quantize operator; 0 where it does not
    cached_spec: int = field(init=False, repr=False, compare=False)
    # how an x that several layers read is quantized once; 0 where each layer does it
    x_spec: int = field(init=False, repr=False, compare=False)
    x_rows_spec: int = field(init=False, repr=False, compare=False)  # for y alone
    # of x's rows and columns: are they quantized, by row or block, with a scale of the tensor
    x_sides: tuple[tuple[bool, bool, bool], ...] = field(init=False, repr=False, compare=False)
    reads_x: bool = field(init=False, repr=False, compare=False)  # a GEMM has it in bf16
    draws_dx: bool = field(init=False, repr=False, compare=False)  # stochastic rounding
    draws_dw: bool = field(init=False, repr=False, compare=False)
    # of GEMM in the support table; "bf16" only where there is no other
    kinds: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in GEMMS:
            if not isinstance(getattr(self, name), Gemm):
                raise ValueError(
                    f"Recipe: expected {name} as a Gemm, got {getattr(self, name)!r} "
                    "(mixed_recipe() takes recipes)"
                )
        (x, w), (dy, w_columns), (dy_columns, x_columns) = (
            getattr(self, name).casts for name in GEMMS
        )
        for name, cast in (("x", x), ("w", w), ("w", w_columns), ("x", x_columns)):
            if cast is not None and cast.stochastic:
                raise ValueError(
                    f"Recipe: expected stochastic rounding of dy alone, got it of {name} (a "
                    "gradient's error averages out over steps, a forward's does not)"
                )
        if self.delayed is not None:
            self._check_delayed()
        guard = self.delayed is not None and self.delayed.guard
        forward = bit("forward.fprop_a", bits_of(x)) | bit("forward.fprop_b", bits_of(w))
        forward |= bit("forward.wgrad_b", bits_of(x_columns)) | bit("forward.fast", self.fprop.fast)
        backward = bit("backward.dgrad_a", bits_of(dy)) | bit(
            "backward.dgrad_b", bits_of(w_columns)
        )
        backward |= bit("backward.wgrad_a", bits_of(dy_columns))
        backward |= bit("backward.wgrad_b", bits_of(x_columns))
        backward |= bit("backward.fast_dgrad", self.dgrad.fast)
        backward |= bit("backward.fast_wgrad", self.wgrad.fast)
        used = {getattr(self, name).kind for name in GEMMS} - {NONE.name} or {NONE.name}
        # The forward measures w by tensor, or by row, for itself; dgrad's cast then takes it over.
        measured = w is not None and w == w_columns and w.scaling in ("tensor", "row")
        found = {
            "forward_spec": forward | bit("forward.guarded", guard),
            "backward_spec": backward | bit("backward.guarded", guard),
            "save_x": spec.SAVE_X if x_columns is not None else 0,
            "keep_w": spec.KEEP_W if measured else 0,
            "saves_x_scales": x_columns is not None and x_columns.scaling != "tensor",
            "saves_x_scale": x_columns is not None and x_columns.of.tensor_scale,
            "cached_spec": self._cached(w, w_columns),
            # with delayed scaling each layer has an amax history of its own
            "reads_x": x is None or x_columns is None,
            "x_rows_spec": 0 if self.delayed is not None else spec.both(x, None).pack(),
            "x_sides": tuple(map(_side, (x, x_columns))),
            "x_spec": 0 if self.delayed is not None else spec.both(x, x_columns).pack(),
            "draws_dx": dy is not None and dy.stochastic,
            "draws_dw": dy_columns is not None and dy_columns.stochastic,
            "kinds": tuple(kind for kind in KINDS if kind in used),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _check_delayed(self) -> None:
        for name, *places in _OPERANDS:
            casts = [getattr(getattr(self, gemm), side) for gemm, side in places]
            if any(cast is None or cast.scaling != "tensor" for cast in casts):
                raise ValueError(
                    f"Recipe: expected one scale a tensor for all operands with delayed scaling, "
                    f"got {[scaling_of(c).name for c in casts]} for {name} (leave `delayed` out)"
                )
            if casts[0] != casts[1]:
                raise ValueError(
                    f"Recipe: expected one format for {name} with delayed scaling, got "
                    f"{casts[0].element!r} and {casts[1].element!r} (a tensor has one history)"
                )

    def _cached(self, w: Cast | None, w_columns: Cast | None) -> int:
        """FP4 weights, and those with delayed scaling, are quantized in each call."""
        if self.delayed is not None:
            return 0
        rows, columns = (
            None if cast is None or cast.of.family == "fp4" else cast for cast in (w, w_columns)
        )
        return spec.both(rows, columns).pack()

    @property
    def mixed(self) -> bool:
        """Whether its GEMMs are of several kinds."""
        return len({getattr(self, name).kind for name in GEMMS}) > 1

    def __str__(self) -> str:
        return self.name


# ---- recipes by shorter words ----

FOUR_OVER_SIX = ("none", "x", "w", "both")


def fp4_recipe(
    name: str = "nvfp4",
    format: str = "nvfp4",
    weights_2d: bool = True,
    rotate_wgrad: bool = True,
    stochastic_dy: bool = True,
    four_over_six: str = "none",
    scale_up_dy: bool = False,
) -> Recipe:
    """All three GEMMs in FP4.

    format: "nvfp4" (a scale each 16 elements and one a tensor) or "mxfp4" (a power of two each
    32). weights_2d: w in blocks of 16 x 16, so that fprop and dgrad see the same numbers (nvfp4
    alone; mxfp4 quantizes w along each contraction). rotate_wgrad: a 16-wide Hadamard transform
    with fixed signs on both operands of wgrad. stochastic_dy: dy is rounded stochastically, so
    that its error averages out, up to that of rounding an fp32 dy to bf16 before; the random bits
    come from torch's generator. All on by default, as others train (arXiv 2509.25149).

    four_over_six: "none", "x", "w" or "both": of these, each block maps its largest value to 6 or
    to 4, whichever has the smaller squared error (nvfp4 alone; arXiv 2512.02010). scale_up_dy:
    block scales of dy are rounded up so that nothing saturates and stochastic rounding is unbiased
    (in mxfp4 they always are). ValueError for other words.
    """
    if format not in formats.BLOCK_FORMATS:
        raise ValueError(
            f"FP4Recipe: expected a format out of {sorted(formats.BLOCK_FORMATS)}, got {format!r}"
        )
    if four_over_six not in FOUR_OVER_SIX:
        raise ValueError(
            f"FP4Recipe: expected four_over_six out of {FOUR_OVER_SIX}, got {four_over_six!r}"
        )
    mx = format == "mxfp4"
    if mx and four_over_six != "none":
        raise ValueError(
            f"FP4Recipe: expected four_over_six='none' in mxfp4, got {four_over_six!r} "
            "(its scales are powers of two: none lies between those of 6 and of 4)"
        )
    six_x, six_w = four_over_six in ("x", "both"), four_over_six in ("w", "both")

    def cast(
        square: bool = False, six: bool = False, hadamard: bool = False, of_dy: bool = False
    ) -> Cast:
        return Cast(
            "e2m1", format, square, of_dy and stochastic_dy, hadamard, six, of_dy and scale_up_dy
        )

    w = cast(weights_2d and not mx, six_w)
    return Recipe(
        name,
        Gemm(cast(six=six_x), w),
        Gemm(cast(of_dy=True), w),
        Gemm(cast(hadamard=rotate_wgrad, of_dy=True), cast(six=six_x, hadamard=rotate_wgrad)),
    )


BLOCK_SCALINGS = ("bf16", "row", "block", "block_pow2", "mx")


def block_recipe(
    name: str = "fp8_block",
    fprop: str = "block",
    dgrad: str = "block",
    wgrad: str = "block",
    dy: str = "e4m3",
    fast: tuple[str, ...] = (),
) -> Recipe:
    """FP8 with rowwise or blockwise scaling.

    fprop, dgrad, wgrad: how both operands of the GEMM are scaled, each along its contraction:
    "row", one fp32 scale a row; "block", fp32 for each 128 elements, of w for each 128 x 128 in
    fprop and dgrad, which so see the same numbers (arXiv 2412.19437); "block_pow2", the same with
    powers of two; "mx", a power of two for each 32 (mxfp8; arXiv 2506.08027), rounded up; or
    "bf16": not quantized.

    Elements are E4M3. dy: "e5m2" gives dy more range, where its GEMMs are scaled by row. fast: the
    GEMMs whose sum the tensor cores may carry in fewer bits, where they are scaled by row; see
    Recipe. ValueError for other words.
    """
    scalings = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    for gemm, scaling in scalings.items():
        if scaling not in BLOCK_SCALINGS:
            raise ValueError(
                f"BlockRecipe: expected {gemm} out of {sorted(BLOCK_SCALINGS)}, got {scaling!r}"
            )
    if dy not in formats.FORMATS:
        raise ValueError(f"BlockRecipe: expected dy out of {sorted(formats.FORMATS)}, got {dy!r}")
    if dy == "e5m2" and {dgrad, wgrad} - {"bf16"} != {"row"}:
        raise ValueError(
            f"BlockRecipe: expected dy='e4m3', got 'e5m2' with dgrad {dgrad!r} and wgrad {wgrad!r} "
            "(blocks have the range in their scales; e5m2 is for GEMMs scaled by row)"
        )
    if not isinstance(fast, tuple) or not set(fast) <= set(GEMMS):
        raise ValueError(
            f"BlockRecipe: expected fast as a tuple of names out of {GEMMS}, got {fast!r}"
        )
    for gemm in fast:
        if scalings[gemm] != "row":
            raise ValueError(
                f"BlockRecipe: expected fast accumulation of GEMMs scaled by row, got {gemm} in "
                f"{scalings[gemm]!r} (cuBLASLt has none for it)"
            )

    def gemm_of(gemm: str, element: str, weight: bool) -> Gemm:
        scaling = scalings[gemm]
        if scaling == NONE.name:
            return Gemm(None, None)
        b = Cast("e4m3", scaling, square=weight and SCALINGS[scaling].square)
        return Gemm(Cast(element, scaling), b, "fast" if gemm in fast else "exact")

    return Recipe(
        name,
        gemm_of("fprop", "e4m3", True),
        gemm_of("dgrad", dy, True),
        gemm_of("wgrad", dy, False),
    )


def mixed_recipe(
    name: str, fprop: str | Recipe, dgrad: str | Recipe, wgrad: str | Recipe
) -> Recipe:
    """Each GEMM as another recipe has it.

    fprop, dgrad, wgrad: each a recipe or its name, whose GEMM of that name is taken as it is there:
    "nvfp4" as fprop is nvfp4's forward bit for bit, "mxfp8" as wgrad is mxfp8's dw; "bf16" leaves
    the GEMM in bf16.

    fp4_recipe's weights_2d is for fprop and dgrad of one such recipe; where the other is of another
    kind it only costs accuracy, so give weights_2d=False. ValueError for a recipe with
    delayed scaling, and for a name that there is not.
    """
    taken = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    gemms = [getattr(_taken(recipe, gemm), gemm) for gemm, recipe in taken.items()]
    return Recipe(name, *gemms)


def _taken(recipe: str | Recipe, gemm: str) -> Recipe:
    """The recipe that mixed_recipe() takes a GEMM of."""
    if isinstance(recipe, str) and recipe == "bf16":
        return BF16
    try:
        found = get(recipe)
    except ValueError:
        raise ValueError(
            f"MixedRecipe: expected {gemm} as a recipe, as 'bf16' or as a name out of "
            f"{sorted(RECIPES)}, got {recipe!r}"
        ) from None
    if found.delayed is not None:
        raise ValueError(
            f"MixedRecipe: expected {gemm} with current scaling, got {found} ('fp8' has it)"
        )
    return found


# What recipes were called when each of these was a class of its own.
BlockRecipe, FP4Recipe, MixedRecipe = block_recipe, fp4_recipe, mixed_recipe

BF16 = Recipe("bf16", Gemm(None, None), Gemm(None, None), Gemm(None, None))
FP8, NVFP4 = Recipe(), fp4_recipe()
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        FP8,
        block_recipe("fp8_row", "row", "row", "row", "e5m2"),
        block_recipe("fp8_block"),
        block_recipe("fp8_block_row_wgrad", wgrad="row"),
        block_recipe("fp8_block_bf16_wgrad", wgrad="bf16"),
        block_recipe("fp8_block_pow2", "block_pow2", "block_pow2", "block_pow2"),
        block_recipe("mxfp8", "mx", "mx", "mx"),
        Recipe("fp8_delayed", delayed=Delayed()),
        NVFP4,
        fp4_recipe("mxfp4", "mxfp4"),
        fp4_recipe("nvfp4_four_over_six", four_over_six="both"),
        fp4_recipe("nvfp4_unbiased", scale_up_dy=True),
        Recipe("fp8_bf16_wgrad", wgrad=Gemm(None, None)),
    )
}


def get(recipe: str | Recipe) -> Recipe:
    """The recipe that `recipe` is or names; ValueError lists the names there are."""
    if isinstance(recipe, Recipe):
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
        mixed_recipe("fp8_block_backward", "fp8", "fp8_block", "fp8_block"),
        mixed_recipe("nvfp4_mxfp8_backward", fp4_recipe(weights_2d=False), "mxfp8", "mxfp8"),
    )
}
