"""A recipe says what it says: casts, which of them a GEMM may pair, defaults, names, values."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from every import ALL_CASTS, BF16, EVERY, OPTIONS, ROW_BLOCKS, without

import narrowfloat as nf
from narrowfloat import recipe as recipes
from narrowfloat.cast import KINDS, kind_of
from narrowfloat.formats import SCALINGS
from narrowfloat.recipe import GEMMS
from narrowfloat.spec import Quantize

SCALES = ("tensor", "row", "block", "block_pow2", "mx", "nvfp4", "mxfp4")
FP8, FP4 = ("e4m3", "e5m2"), ("e2m1",)
# scaling -> its elements, the options that it knows
KNOWN = {
    "tensor": (FP8, set()),
    "row": (FP8, set()),
    "block": (("e4m3",), {"square"}),
    "block_pow2": (("e4m3",), {"square"}),
    "mx": (("e4m3",), set()),
    "nvfp4": (FP4, {"square", "stochastic", "hadamard", "four_over_six", "scale_up"}),
    "mxfp4": (FP4, {"stochastic", "hadamard", "scale_up"}),
}
EXCLUSIVE = ({"four_over_six", "stochastic"}, {"square", "hadamard"})

# ---- casts ----


def test_every_cast_is_made_or_refused_with_the_reason() -> None:
    made = 0
    for element, scaling in itertools.product((*FP8, *FP4), SCALES):
        elements, known = KNOWN[scaling]
        for flags in itertools.product((False, True), repeat=len(OPTIONS)):
            on = {name for name, flag in zip(OPTIONS, flags, strict=True) if flag}
            arguments = (element, scaling, *flags)
            if element not in elements:
                reason = rf"an element out of .* with scaling '{scaling}', got '{element}'"
            elif on - known:
                first = next(name for name in OPTIONS if name in on - known)
                reason = f"{first}=False with scaling '{scaling}', got True"
            elif any(pair <= on for pair in EXCLUSIVE):
                pair = next(pair for pair in EXCLUSIVE if pair <= on)
                reason = "|".join(f"expected {a} without {b}, got both" for a in pair for b in pair)
            else:
                cast = nf.Cast(*arguments)
                assert dataclasses.astuple(cast)[:7] == arguments and cast in ALL_CASTS
                assert cast.of is SCALINGS[scaling]
                made += 1
                continue
            with pytest.raises(ValueError, match=f"^Cast: .*({reason})"):
                nf.Cast(*arguments)
    assert made == len(ALL_CASTS) == 35
    assert nf.Cast() == nf.Cast("e4m3", "tensor")


@pytest.mark.parametrize("wrong", ["bf16", "", None, 5, "fp8_row", []])
def test_a_scaling_that_there_is_not(wrong: object) -> None:
    with pytest.raises(ValueError, match="^Cast: expected a scaling out of .*'block_pow2'") as e:
        nf.Cast("e4m3", wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(e.value)


# ---- which casts a GEMM may pair ----


def refusal(a: nf.Cast | None, b: nf.Cast | None) -> str | None:
    """Why no tensor core multiplies the two, by the rules in words; None where one does."""
    of_a, of_b = (None if cast is None else cast.scaling for cast in (a, b))
    if of_a != of_b and {of_a, of_b} != {None, "tensor"}:
        names = [name or "bf16" for name in (of_a, of_b)]
        return f"one scaling.*got '{names[0]}' and '{names[1]}' .no tensor core multiplies"
    if a is None or b is None:
        return None
    if a.element == b.element == "e5m2":
        return "at most one e5m2 operand, got two"
    if a.square:
        return "square blocks of the second operand alone"
    if of_b == "row" and b.element == "e5m2":
        return "e5m2 by row of the first operand alone"
    if a.hadamard != b.hadamard:
        return f"hadamard of both operands or of none, got {a.hadamard} and {b.hadamard}"
    return None


def kind(a: nf.Cast | None, b: nf.Cast | None) -> str:
    scaling = (a or b).scaling if a or b else "bf16"
    if scaling == "tensor":
        return "fp8_bf16" if None in (a, b) else "fp8"
    return "fp4" if scaling in ("nvfp4", "mxfp4") else scaling


def test_every_pair_is_taken_or_refused_with_the_reason() -> None:
    seen = set()
    for a, b in itertools.product([None, *ALL_CASTS], repeat=2):
        why = refusal(a, b)
        if why is None:
            gemm = nf.Gemm(a, b)
            assert gemm.casts == (a, b) and gemm.kind == kind_of(a, b) == kind(a, b)
            seen.add(gemm.kind)
            if gemm.kind in ("fp8", "row"):
                assert nf.Gemm(a, b, "fast").fast and not gemm.fast
            else:
                with pytest.raises(ValueError, match="^Gemm: expected accumulate='exact'.*fast"):
                    nf.Gemm(a, b, "fast")
            continue
        with pytest.raises(ValueError, match=f"^Gemm: expected .*{why}"):
            nf.Gemm(a, b)
        with pytest.raises(ValueError, match=f"^me: expected .*{why}"):
            kind_of(a, b, "me")
    assert seen == set(KINDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("e4m4",), "a format out of.*e4m4"),
        (("e4m3", "bf16"), "a format out of.*bf16"),
        ((None, "bf16"), "a format out of.*bf16"),
        ((None, "e3m4"), "a format out of.*'e3m4'"),
        (("e2m1", "e2m1"), "a format out of.*e2m1"),
        ((None, "e4m3", "fast"), "accumulate='exact'.*None and 'e4m3'"),
        (("e4m3", None, "fast"), "accumulate='exact'.*'e4m3' and None"),
        ((None, "e5m2", "fast"), "accumulate='exact'.*None and 'e5m2'"),
        ((None, None, "fast"), "accumulate='exact'.*None and None"),
        ((None, None, "some"), "accumulate out of.*some"),
        (("e4m3", "e4m3", "slow"), "accumulate out of.*slow"),
        (("e4m3", "e4m3", True), "accumulate out of.*True"),
        (("e5m2", "e5m2"), "at most one e5m2"),
    ],
)
def test_gemm_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=f"^Gemm: expected.*{words}"):
        nf.Gemm(*arguments)  # type: ignore[arg-type]


# ---- a recipe ----


def test_defaults() -> None:
    recipe = nf.Recipe()
    assert recipe.name == str(recipe) == "fp8"
    e4, e5 = nf.Cast("e4m3", "tensor"), nf.Cast("e5m2", "tensor")
    assert recipe.fprop == nf.Gemm(e4, e4, "exact") == nf.Gemm("e4m3", "e4m3") == nf.Gemm()
    assert recipe.dgrad == recipe.wgrad == nf.Gemm(e5, e4, "exact") == nf.Gemm("e5m2", "e4m3")
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        assert not gemm.fast
    assert nf.Gemm(accumulate="fast").fast and recipe.kinds == ("fp8",) and not recipe.mixed


def test_names() -> None:
    assert list(nf.RECIPES) == [
        "fp8",
        "fp8_row",
        "fp8_block",
        "fp8_block_row_wgrad",
        "fp8_block_bf16_wgrad",
        "fp8_block_pow2",
        "mxfp8",
        "fp8_delayed",
        "nvfp4",
        "mxfp4",
        "nvfp4_four_over_six",
        "nvfp4_unbiased",
        "fp8_bf16_wgrad",
        "fp8_block_backward",
        "nvfp4_mxfp8_backward",
    ]
    assert nf.RECIPES["fp8"] == nf.Recipe()
    for name, recipe in nf.RECIPES.items():
        assert name == recipe.name == str(recipe) and recipes.get(name) is recipe
        assert nf.Linear(16, 16, recipe=name).recipe is recipe
    mine = nf.Recipe("mine")
    assert recipes.get(mine) is mine


@pytest.mark.parametrize("wrong", ["fp4", "FP8", "", None, 8, [], {"fp8": 1}, nf.Gemm()])
def test_what_is_no_recipe_is_refused_with_the_names(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected a Recipe or a name out of .*'fp8'") as e:
        recipes.get(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(e.value)


def test_recipe_is_taken_everywhere() -> None:
    mine = nf.Recipe("mine")
    assert nf.Linear(16, 16, recipe=mine).recipe is mine
    assert nf.FP8Linear(16, 16, recipe=mine).recipe is mine
    assert nf.supported(mine, "cpu")
    with pytest.raises(ValueError, match="expected a Recipe or a name"):
        nf.Linear(16, 16, recipe="fp4")
    with pytest.raises(ValueError, match="expected a Recipe or a name"):
        nf.supported("fp4")
    assert nf.linear(torch.ones(2, 16), torch.ones(4, 16), None, mine).shape == (2, 4)


def test_an_operand_may_have_two_casts_but_one_history() -> None:
    """With current scaling x, w and dy may be quantized otherwise along each contraction."""
    for changed, operand, first, second in (
        ({"fprop": nf.Gemm("e5m2", "e4m3")}, "x", "e5m2", "e4m3"),
        (
            {"wgrad": nf.Gemm("e4m3", "e5m2"), "dgrad": nf.Gemm("e4m3", "e4m3")},
            "x",
            "e4m3",
            "e5m2",
        ),
        ({"fprop": nf.Gemm("e4m3", "e5m2")}, "w", "e5m2", "e4m3"),
        (
            {"dgrad": nf.Gemm("e4m3", "e5m2"), "wgrad": nf.Gemm("e4m3", "e4m3")},
            "w",
            "e4m3",
            "e5m2",
        ),
        ({"dgrad": nf.Gemm("e4m3", "e4m3")}, "dy", "e4m3", "e5m2"),
        ({"wgrad": nf.Gemm("e4m3", "e4m3")}, "dy", "e5m2", "e4m3"),
    ):
        assert nf.Recipe(**changed).kinds == ("fp8",)
        text = f"^Recipe: expected one format for {operand} with .*got '{first}' and '{second}'"
        with pytest.raises(ValueError, match=text):
            nf.Recipe(**changed, delayed=nf.Delayed())
    for gemms in (
        {"fprop": nf.Gemm("e5m2", None)},
        {"wgrad": nf.Gemm("e4m3", None)},
        {"fprop": nf.Gemm(None, "e5m2")},
        {"fprop": nf.Gemm("e5m2", None), "wgrad": nf.Gemm("e5m2", None)},
        dict.fromkeys(GEMMS, nf.Gemm(None, "e5m2")),
    ):
        assert "fp8_bf16" in nf.Recipe(**gemms).kinds
        with pytest.raises(ValueError, match="^Recipe: expected one .* with delayed scaling, got"):
            nf.Recipe(**gemms, delayed=nf.Delayed())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            lambda: nf.Recipe(wgrad=BF16, delayed=nf.Delayed()),
            "^Recipe: expected one scale a tensor for all operands .*'bf16'",
        ),
        (
            lambda: nf.Recipe(dgrad=nf.Gemm(None, "e4m3"), delayed=nf.Delayed()),
            "^Recipe: expected one scale a tensor for all operands .*'bf16'.* for dy",
        ),
        (
            lambda: dataclasses.replace(nf.RECIPES["mxfp8"], delayed=nf.Delayed()),
            "^Recipe: expected one scale a tensor for all operands .*'mx'.* for x",
        ),
        (lambda: nf.Recipe(fprop="fp8"), "^Recipe: expected fprop as a Gemm, got 'fp8'"),
        (lambda: nf.Recipe(wgrad=None), "^Recipe: expected wgrad as a Gemm, got None"),
    ],
)
def test_recipe_refused(made: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made()


@pytest.mark.parametrize("gemm, side", [("fprop", 0), ("fprop", 1), ("dgrad", 1), ("wgrad", 1)])
def test_stochastic_rounding_is_of_dy_alone(gemm: str, side: int) -> None:
    casts = [nf.Cast("e2m1", "nvfp4"), nf.Cast("e2m1", "nvfp4")]
    casts[side] = nf.Cast("e2m1", "nvfp4", stochastic=True)
    operand = {"fprop": "xw", "dgrad": " w", "wgrad": " x"}[gemm][side]
    with pytest.raises(ValueError, match=f"stochastic rounding of dy alone, got it of {operand}"):
        nf.Recipe("m", **{gemm: nf.Gemm(*casts)})


def test_what_reuse_weights_quantizes() -> None:
    """w as fprop and dgrad have it, in FP8 with scales of its own."""
    for recipe in EVERY + [nf.RECIPES["fp8_delayed"]]:
        rows, columns = recipe.fprop.casts[1], recipe.dgrad.casts[1]
        if recipe.delayed is not None:
            assert recipe.cached_spec == 0
            continue
        rows, columns = (
            None if cast is None or cast.element == "e2m1" else cast for cast in (rows, columns)
        )
        want = Quantize(rows, columns, rows is not None, columns is not None)
        assert Quantize.unpack(recipe.cached_spec) == want, recipe


def test_kinds() -> None:
    of = {name: recipe.kinds for name, recipe in nf.RECIPES.items()}
    assert of == {
        "fp8": ("fp8",),
        "fp8_row": ("row",),
        "fp8_block": ("block",),
        "fp8_block_row_wgrad": ("row", "block"),
        "fp8_block_bf16_wgrad": ("block",),
        "fp8_block_pow2": ("block_pow2",),
        "mxfp8": ("mx",),
        "fp8_delayed": ("fp8",),
        "nvfp4": ("fp4",),
        "mxfp4": ("fp4",),
        "nvfp4_four_over_six": ("fp4",),
        "nvfp4_unbiased": ("fp4",),
        "fp8_bf16_wgrad": ("fp8",),
        "fp8_block_backward": ("fp8", "block"),
        "nvfp4_mxfp8_backward": ("mx", "fp4"),
    }
    assert recipes.BF16.kinds == ("bf16",) and without("fprop.a").kinds == ("fp8", "fp8_bf16")
    assert nf.block_recipe("m", "mx", "row", "bf16").kinds == ("row", "mx")
    for recipe in EVERY:
        assert recipe.mixed == (len({getattr(recipe, gemm).kind for gemm in GEMMS}) > 1)


# ---- values ----


def test_frozen() -> None:
    recipe = nf.Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "mine"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fprop.a = "e5m2"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fprop.a.square = True  # type: ignore[misc,union-attr]


def derived(recipe: nf.Recipe) -> dict[str, object]:
    """What a recipe finds once, all that is no argument."""
    return {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if not f.init}


@pytest.mark.parametrize("recipe", [*EVERY, nf.RECIPES["fp8_delayed"]], ids=str)
def test_value_semantics(recipe: nf.Recipe) -> None:
    """A copy, a pickle, what its repr says and the same arguments are equal and hash alike; with
    all that is derived."""
    twins = [
        copy.copy(recipe),
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        eval(repr(recipe), vars(nf).copy()),
        nf.Recipe(recipe.name, recipe.fprop, recipe.dgrad, recipe.wgrad, recipe.delayed),
        dataclasses.replace(recipe),
    ]
    for twin in twins:
        assert twin == recipe and hash(twin) == hash(recipe) and derived(twin) == derived(recipe)
    other = dataclasses.replace(recipe, name="other")
    assert other != recipe and derived(other) == derived(recipe) and len({recipe, other}) == 2
    for gemm in GEMMS:
        cast = getattr(recipe, gemm).a
        assert cast is None or eval(repr(cast), vars(nf).copy()) == pickle.loads(pickle.dumps(cast))
    assert len({*EVERY}) == len(EVERY) and not any(n in repr(recipe) for n in derived(recipe))


def test_replace_finds_the_rest_anew() -> None:
    fast = nf.Recipe(fprop=nf.Gemm(accumulate="fast"))
    assert nf.Recipe() == nf.Recipe() and hash(nf.Recipe()) == hash(nf.Recipe())
    assert len({nf.Recipe(), nf.Recipe(), nf.Recipe("mine"), fast}) == 3
    replaced = dataclasses.replace(nf.Recipe(), fprop=nf.Gemm(accumulate="fast"))
    assert replaced == fast and derived(replaced) == derived(fast) != derived(nf.Recipe())
    mixed = nf.mixed_recipe("m", "nvfp4", "mxfp8", "bf16")
    changed = dataclasses.replace(mixed, wgrad=nf.RECIPES["mxfp8"].wgrad)
    assert derived(changed) == derived(nf.mixed_recipe("m", "nvfp4", "mxfp8", "mxfp8"))


# ---- recipes by shorter words: FP4 ----


def cast4(scaling: str = "nvfp4", **options: bool) -> nf.Cast:
    return nf.Cast("e2m1", scaling, **options)


def test_fp4_recipes() -> None:
    recipe, w = nf.fp4_recipe(), cast4(square=True)
    assert recipe.name == str(recipe) == "nvfp4"
    assert recipe.fprop == nf.Gemm(cast4(), w)
    assert recipe.dgrad == nf.Gemm(cast4(stochastic=True), w)
    assert recipe.wgrad == nf.Gemm(cast4(stochastic=True, hadamard=True), cast4(hadamard=True))
    assert nf.RECIPES["nvfp4"] == recipe and nf.FP4Recipe is nf.fp4_recipe
    assert nf.RECIPES["mxfp4"] == nf.fp4_recipe("mxfp4", "mxfp4")
    assert nf.RECIPES["nvfp4_four_over_six"] == nf.fp4_recipe(
        "nvfp4_four_over_six", four_over_six="both"
    )
    assert nf.RECIPES["nvfp4_unbiased"] == nf.fp4_recipe("nvfp4_unbiased", scale_up_dy=True)
    fp4 = {name for name, r in nf.RECIPES.items() if r.kinds == ("fp4",)}
    assert fp4 == {"nvfp4", "mxfp4", "nvfp4_four_over_six", "nvfp4_unbiased"}


def test_what_each_of_fp4s_words_changes() -> None:
    def casts(**changed: object) -> list[nf.Cast | None]:
        made = nf.fp4_recipe("other", **changed)  # type: ignore[arg-type]
        return [cast for gemm in GEMMS for cast in getattr(made, gemm).casts]

    base = casts()
    x, w, dy, w_columns, dy_columns, x_columns = range(6)
    for changed, where, how in (
        ({"weights_2d": False}, (w, w_columns), {"square": False}),
        ({"rotate_wgrad": False}, (dy_columns, x_columns), {"hadamard": False}),
        ({"stochastic_dy": False}, (dy, dy_columns), {"stochastic": False}),
        ({"four_over_six": "x"}, (x, x_columns), {"four_over_six": True}),
        ({"four_over_six": "w"}, (w, w_columns), {"four_over_six": True}),
        ({"four_over_six": "both"}, (x, x_columns, w, w_columns), {"four_over_six": True}),
        ({"scale_up_dy": True}, (dy, dy_columns), {"scale_up": True}),
    ):
        want = [dataclasses.replace(c, **how) if i in where else c for i, c in enumerate(base)]
        assert casts(**changed) == want, changed
    want = [dataclasses.replace(c, scaling="mxfp4", square=False) for c in base]
    assert casts(format="mxfp4") == want  # w along each contraction


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": "fp8"}, "fp8"),
        ({"format": "e4m3"}, "e4m3"),
        ({"four_over_six": True}, "True"),
        ({"four_over_six": "y"}, "y"),
        ({"format": "mxfp4", "four_over_six": "x"}, "powers of two"),
    ],
)
def test_fp4_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="^FP4Recipe: expected") as e:
        nf.FP4Recipe(**changed)  # type: ignore[arg-type]
    assert words in str(e.value)


# ---- rowwise and blockwise scaling ----


def test_block_recipes() -> None:
    e4, e5 = nf.Cast("e4m3", "row"), nf.Cast("e5m2", "row")
    block, square = nf.Cast("e4m3", "block"), nf.Cast("e4m3", "block", square=True)
    pow2 = nf.Cast("e4m3", "block_pow2")
    pow2_square, mx = dataclasses.replace(pow2, square=True), nf.Cast("e4m3", "mx")
    by_block = nf.Gemm(block, square)
    assert {n: tuple(getattr(nf.RECIPES[n], g) for g in GEMMS) for n in (
        "fp8_row", "fp8_block", "fp8_block_row_wgrad", "fp8_block_bf16_wgrad", "fp8_block_pow2",
        "mxfp8",
    )} == {
        "fp8_row": (nf.Gemm(e4, e4), nf.Gemm(e5, e4), nf.Gemm(e5, e4)),
        "fp8_block": (by_block, by_block, nf.Gemm(block, block)),
        "fp8_block_row_wgrad": (by_block, by_block, nf.Gemm(e4, e4)),
        "fp8_block_bf16_wgrad": (by_block, by_block, BF16),
        "fp8_block_pow2": (
            nf.Gemm(pow2, pow2_square), nf.Gemm(pow2, pow2_square), nf.Gemm(pow2, pow2),
        ),
        "mxfp8": (nf.Gemm(mx, mx),) * 3,
    }  # fmt: skip
    assert nf.block_recipe() == nf.RECIPES["fp8_block"] and nf.BlockRecipe is nf.block_recipe
    mixed = nf.block_recipe("mixed", "mx", "row", "bf16", "e5m2", ("dgrad",))
    assert mixed.fprop == nf.Gemm(mx, mx) and mixed.dgrad == nf.Gemm(e5, e4, "fast")
    assert mixed.wgrad == BF16
    row = nf.block_recipe("r", "row", "row", "row", fast=("fprop", "wgrad"))
    assert [getattr(row, gemm).fast for gemm in GEMMS] == [True, False, True]
    plain = nf.block_recipe("plain", "bf16", "bf16", "bf16")
    assert plain.kinds == ("bf16",) and plain.forward_spec == plain.backward_spec == 0


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"fprop": "tensor"}, "expected fprop out of .*'block_pow2', 'mx', 'row'.*got 'tensor'"),
        ({"wgrad": "fp8_row"}, "expected wgrad out of"),
        ({"dy": "e3m4"}, "expected dy out of"),
        ({"dy": "e5m2"}, "expected dy='e4m3', got 'e5m2' with dgrad 'block'"),
        ({"dgrad": "row", "dy": "e5m2"}, "expected dy='e4m3', got 'e5m2'"),
        ({"dgrad": "bf16", "wgrad": "bf16", "dy": "e5m2"}, "expected dy='e4m3', got 'e5m2'"),
        ({"fast": ("fprop",)}, "fast accumulation of GEMMs scaled by row, got fprop in 'block'"),
        ({"wgrad": "bf16", "fast": ("wgrad",)}, "got wgrad in 'bf16'"),
        ({"fast": ("all",)}, "expected fast as a tuple"),
        ({"fast": "fprop"}, "expected fast as a tuple"),
    ],
)
def test_block_refusals(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^BlockRecipe: .*{text}"):
        nf.BlockRecipe("refused", **changed)  # type: ignore[arg-type]


# ---- mixed ----


def test_mixed_recipes() -> None:
    """Each GEMM as the recipe that is named has it."""
    mxfp8 = nf.RECIPES["mxfp8"]
    mixed = nf.mixed_recipe("m", "nvfp4", mxfp8, "bf16")
    assert mixed.name == str(mixed) == "m" and nf.MixedRecipe is nf.mixed_recipe
    assert (mixed.fprop, mixed.dgrad) == (nf.RECIPES["nvfp4"].fprop, mxfp8.dgrad)
    assert mixed.wgrad == BF16 and mixed == nf.mixed_recipe("m", nf.fp4_recipe(), "mxfp8", "bf16")
    assert mixed != nf.mixed_recipe("m", "nvfp4", "mxfp8", "fp8")
    of_mixed = nf.mixed_recipe("of mixed", "nvfp4_mxfp8_backward", mixed, mixed)
    assert of_mixed.fprop == nf.fp4_recipe(weights_2d=False).fprop == nf.Gemm(cast4(), cast4())
    assert of_mixed.dgrad == mxfp8.dgrad and of_mixed.wgrad == BF16
    assert nf.mixed_recipe("fp8", *["fp8"] * 3) == nf.RECIPES["fp8"]
    assert nf.RECIPES["fp8_bf16_wgrad"] == nf.Recipe("fp8_bf16_wgrad", wgrad=BF16)
    assert nf.RECIPES["fp8_block_backward"] == nf.Recipe(
        "fp8_block_backward", dgrad=nf.block_recipe().dgrad, wgrad=nf.block_recipe().wgrad
    )
    assert nf.RECIPES["nvfp4_mxfp8_backward"] == nf.mixed_recipe(
        "nvfp4_mxfp8_backward", nf.fp4_recipe(weights_2d=False), "mxfp8", "mxfp8"
    )
    assert nf.mixed_recipe("six", "fp8", ROW_BLOCKS, "fp8").dgrad == ROW_BLOCKS.dgrad


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("fp4", "fp8", "fp8"), "fprop.*'bf16'.*'fp4'"),
        (("fp8", None, "fp8"), "dgrad.*None"),
        (("fp8", "fp8", []), r"wgrad.*\[\]"),
        (("fp8", nf.Gemm(), "fp8"), "dgrad.*Gemm"),
        (("fp8_delayed", "fp8", "fp8"), "fprop with current scaling, got fp8_delayed"),
    ],
)
def test_mixed_refused(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(ValueError, match=f"^MixedRecipe: expected {text}") as e:
        nf.mixed_recipe("m", *arguments)  # type: ignore[arg-type]
    assert "fp8" in str(e.value)


# ---- delayed scaling ----


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"length": 0}, "a length from 1 to 1024 steps, got 0"),
        ({"length": 1025}, "got 1025"),
        ({"use": "min"}, "use='max' or 'latest', got 'min'"),
        ({"margin": -1}, "a margin from 0 to 64, got -1"),
        ({"margin": 65}, "got 65"),
    ],
)
def test_delayed_refused(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^Delayed: expected .*{re.escape(text)}"):
        nf.Delayed(**changed)  # type: ignore[arg-type]
