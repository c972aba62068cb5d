"""Records, as hashes, what every recipe computes, so that two builds can be compared bit for bit.

    python tests/bits.py record --device cpu --out FILE [--exact]   run the cases, write the hashes
    python tests/bits.py compare FILE FILE                          status 1 if a case differs
    python tests/bits.py shuffle                                    is "exact" true? (CPU, below)

It uses the public API alone, so it runs unchanged against another version: set PYTHONPATH.

The cases are in two groups. Those of "exact" have inputs, small integers times powers of two, for
which every fp32 sum is exact whatever its order: their hashes hold for every BLAS and thread count,
and tests/bits_cpu.json has them. `shuffle` tests that: it runs them again with the contraction of
every matmul permuted. Those of "general" have noise for inputs and hold on one machine. Inputs are
drawn as integers on the CPU (torch.randn depends on the vector unit), so that every device sees the
same numbers. Stochastic rounding draws from the device's own generator: its results, and those of
"exact" that no CPU sum decides, are the same only on one kind of device.

NaNs are hashed as one NaN; in "exact" -0 is hashed as 0, since a sum may start from either.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import narrowfloat as nf

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
GROUPS = ("exact", "general")
MAGNITUDES = (0, 1, 2, 3, 5, 7, 7)  # 7 * 2^6 is the largest E4M3, 7 * 2^13 the largest E5M2

# What differs from the recorded results on purpose, and why it is better now.
CHANGED = {
    "refused two formats of x": "each GEMM has casts of its own: x is quantized along each "
    "contraction as that GEMM has it (only delayed scaling, one history a tensor, refuses it)",
}

# The same of what was recorded before d303b73 (tests/bits_h200.json was), by patterns of names;
# those of tests/bits_cpu.json were recorded anew. Empty it when the other is.
CHANGED_SINCE = {
    r"\bsubnormal$": "R-27: scale and multiplier fit each other where max / amax overflows",
    r"nvfp4_(four_over_six|46)|packed": "R-30: of four over six a block that 6 and 4 give the same "
    "values is 6, where rounding in fp32 decided",
}

Results = dict[str, Any]  # tensors, or text, by name


class Case(NamedTuple):
    group: str
    name: str
    run: Callable[[], Results]


# ---- recipes ----


def recipes() -> dict[str, Any]:
    """Every recipe by its name here: those of nf.RECIPES and others made by hand."""
    g, block, fp4 = nf.Gemm, nf.BlockRecipe, nf.FP4Recipe
    one_d = fp4("one_d", weights_2d=False)
    row_e5m2 = block("row_e5m2", "row", "row", "row", "e5m2")
    made = [
        nf.Recipe("fprop.a_bf16", fprop=g(None, "e4m3")),
        nf.Recipe("fprop.b_bf16", fprop=g("e4m3", None)),
        nf.Recipe("dgrad.a_bf16", dgrad=g(None, "e4m3")),
        nf.Recipe("dgrad.b_bf16", dgrad=g("e5m2", None)),
        nf.Recipe("wgrad.a_bf16", wgrad=g(None, "e4m3")),
        nf.Recipe("wgrad.b_bf16", wgrad=g("e5m2", None)),
        nf.Recipe("x_bf16", fprop=g(None, "e4m3"), wgrad=g("e5m2", None)),
        nf.Recipe("w_bf16", fprop=g("e4m3", None), dgrad=g("e5m2", None)),
        nf.Recipe("dy_bf16", dgrad=g(None, "e4m3"), wgrad=g(None, "e4m3")),
        nf.Recipe("fprop_bf16", fprop=g(None, None)),
        nf.Recipe("all_bf16", g(None, None), g(None, None), g(None, None)),
        nf.Recipe("fast_fprop", fprop=g("e4m3", "e4m3", accumulate="fast")),
        nf.Recipe(
            "fast",
            fprop=g("e4m3", "e4m3", "fast"),
            dgrad=g("e5m2", "e4m3", "fast"),
            wgrad=g("e5m2", "e4m3", "fast"),
        ),
        nf.Recipe("e4m3_dy", dgrad=g("e4m3", "e4m3"), wgrad=g("e4m3", "e4m3")),
        nf.Recipe(
            "e5m2_w",
            fprop=g("e4m3", "e5m2"),
            dgrad=g("e4m3", "e5m2"),
            wgrad=g("e4m3", "e4m3"),
        ),
        block("row_pow2_mx", "row", "block_pow2", "mx"),
        block("mx_row_block", "mx", "row", "block"),
        block("block_bf16_dgrad", dgrad="bf16"),
        block("block_bf16_fprop", fprop="bf16"),
        block("row_bf16_dgrad", "row", "bf16", "row", "e5m2"),
        block("row_e4m3", "row", "row", "row"),
        block("row_fast_fprop", "row", "row", "row", "e5m2", ("fprop",)),
        block("row_fast", "row", "row", "row", fast=("fprop", "dgrad", "wgrad")),
        block("mx_e5m2_row_wgrad", "mx", "bf16", "row", "e5m2"),
        block("block_all_bf16", "bf16", "bf16", "bf16"),
        fp4("nvfp4_1d", weights_2d=False),
        fp4("nvfp4_no_rotation", rotate_wgrad=False),
        fp4("nvfp4_nearest", stochastic_dy=False),
        fp4("nvfp4_plain", weights_2d=False, rotate_wgrad=False, stochastic_dy=False),
        fp4("nvfp4_46x", four_over_six="x"),
        fp4("nvfp4_46w_1d", four_over_six="w", weights_2d=False),
        fp4("nvfp4_46_up_nearest", four_over_six="both", scale_up_dy=True, stochastic_dy=False),
        fp4("mxfp4_plain", "mxfp4", rotate_wgrad=False, stochastic_dy=False),
        nf.MixedRecipe("m_fp8_fp8_bf16", "fp8", "fp8", "bf16"),
        nf.MixedRecipe("m_bf16_fp8_nvfp4", "bf16", "fp8", "nvfp4"),
        nf.MixedRecipe("m_nvfp4_bf16_fp8", one_d, "bf16", "fp8"),
        nf.MixedRecipe("m_fp8_block_nvfp4_mxfp8", "fp8_block", one_d, "mxfp8"),
        nf.MixedRecipe("m_mxfp8_fp8_block_fp8_row", "mxfp8", "fp8_block", row_e5m2),
        nf.MixedRecipe("m_fp8_row_fp8_fp8_row", "fp8_row", "fp8", "fp8_row"),
        nf.MixedRecipe("m_fp8_row_rows", "fp8_row", block("e4", "row", "row", "row"), "fp8_row"),
        nf.MixedRecipe("m_nvfp4_wgrad", "fp8", "fp8", "nvfp4"),
        nf.MixedRecipe("m_nvfp4_wgrad_only", "bf16", "bf16", "nvfp4"),
        nf.MixedRecipe("m_fp8_wgrad", "nvfp4", "nvfp4", "fp8"),
        nf.MixedRecipe("m_bf16_wgrad", "nvfp4", "nvfp4", "bf16"),
        nf.MixedRecipe("m_nvfp4_46_dgrad", "nvfp4_four_over_six", "nvfp4_unbiased", "nvfp4"),
        nf.MixedRecipe("m_mxfp4_nvfp4", "mxfp4", one_d, "mxfp4"),
        nf.MixedRecipe("m_one_operand", nf.Recipe("o", fprop=g(None, "e4m3")), "mxfp8", "fp8"),
        nf.MixedRecipe("m_bf16", "bf16", "bf16", "bf16"),
        nf.Recipe("delayed_no_guard", delayed=nf.Delayed(guard=False)),
        nf.Recipe("delayed_latest", delayed=nf.Delayed(use="latest")),
        nf.Recipe("delayed_margin", delayed=nf.Delayed(length=2, margin=1)),
        nf.Recipe(
            "delayed_fast_no_guard",
            fprop=g("e4m3", "e4m3", "fast"),
            delayed=nf.Delayed(1, "latest", 2, False),
        ),
    ]
    named = {name: nf.RECIPES[name] for name in sorted(nf.RECIPES)}
    return named | {recipe.name: recipe for recipe in made}


# ---- inputs ----


@functools.cache
def integers(shape: tuple[int, ...], salt: int) -> Tensor:
    """fp32, 0 or +-1, 2, 3, 5, 7. The first row and the first column are all 7, so that scales of
    tensors, rows and columns are powers of two; in blocks a 7 is likely."""
    generator = torch.Generator().manual_seed(1000 + salt)
    table = torch.tensor(MAGNITUDES, dtype=FP32)
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    drawn = table[torch.randint(len(table), shape, generator=generator)]
    drawn[:1] = drawn[..., :1] = 7
    return drawn * sign


@functools.cache
def noise(shape: tuple[int, ...], salt: int) -> Tensor:
    """fp32, close to a Gaussian of unit variance: sums of twelve uniform integers."""
    generator = torch.Generator().manual_seed(2000 + salt)
    drawn = torch.randint(-(2**18), 2**18, (12, *shape), generator=generator)
    return drawn.sum(0).to(FP32) / 2**19


@functools.cache
def tensor(
    group: str, shape: tuple[int, ...], salt: int, power: int, dtype: torch.dtype, device: str
) -> Tensor:
    """2^power times the numbers of a group, on the device."""
    drawn = (integers if group == "exact" else noise)(shape, salt)
    return (drawn * 2.0**power).to(dtype).to(device)


# ---- hashes ----


def digest(value: Any, exact: bool = False) -> str:
    """16 hex digits of a tensor's dtype, shape and bytes, or of a text."""
    if not isinstance(value, Tensor):
        return hashlib.sha256(str(value).encode()).hexdigest()[:16]
    t = value.detach().cpu()
    if t.is_floating_point() and t.element_size() > 1:
        t = torch.where(t.isnan(), float("nan"), t)
        if exact:
            t = torch.where(t == 0, torch.zeros_like(t), t)
    t = t.contiguous()
    made = hashlib.sha256(f"{t.dtype} {tuple(t.shape)} ".encode())
    made.update(ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b"")
    return made.hexdigest()[:16]


def outcome(case: Case) -> dict[str, str]:
    """A case's hashes by name, or its error."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    exact = case.group == "exact"
    return {name: "-" if t is None else digest(t, exact) for name, t in found.items()}


# ---- layers ----


def train(
    recipe: Any,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    dy: Tensor | None,
    wants: str = "xwb",
    around: Any = None,
) -> Results:
    """nf.linear forward and backward; dy None sums y. wants: who requires a gradient."""
    x = x.detach().requires_grad_("x" in wants)
    w = w.detach().requires_grad_("w" in wants)
    bias = None if bias is None else bias.detach().requires_grad_("b" in wants)
    with around or contextlib.nullcontext():
        y = nf.linear(x, w, bias, recipe)
    torch.manual_seed(1)
    if dy is None:
        y.float().sum().backward()
    else:
        y.backward(dy.to(y.dtype).view(y.shape))
    return {"y": y, "dx": x.grad, "dw": w.grad, "db": None if bias is None else bias.grad}


class Operands(NamedTuple):
    x: Tensor
    w: Tensor
    bias: Tensor
    dy: Tensor


def operands(
    group: str, shape: tuple[int, int, int], device: str, x: str = "bf16", w: str | None = None
) -> Operands:
    m, k, n = shape
    of_x, of_w = DTYPES[x], DTYPES[w or x]
    return Operands(
        tensor(group, (m, k), 1, -2, of_x, device),
        tensor(group, (n, k), 2, -4, of_w, device),
        tensor(group, (n,), 3, -2, of_w, device),
        tensor(group, (m, n), 4, -5, of_x, device),
    )


CORE = (  # group, (M, K, N), dtype of x, of w, bias
    ("exact", (64, 128, 96), "bf16", "bf16", True),
    ("exact", (64, 128, 96), "fp32", "fp32", False),
    ("exact", (33, 100, 72), "bf16", "bf16", True),
    ("exact", (33, 100, 72), "fp16", "fp16", False),
    ("exact", (40, 300, 144), "bf16", "fp32", True),
    ("exact", (1, 17, 5), "fp32", "fp32", True),
    ("exact", (7, 16, 24), "fp16", "bf16", True),
    ("exact", (0, 32, 16), "bf16", "bf16", True),
    ("exact", (5, 0, 16), "fp32", "fp32", True),
    ("exact", (5, 16, 0), "bf16", "bf16", False),
    ("general", (64, 128, 96), "bf16", "bf16", True),
    ("general", (33, 100, 72), "fp32", "bf16", False),
    ("general", (150, 260, 136), "bf16", "fp32", True),
)
CORE_GPU = (
    ("general", (1024, 512, 768), "bf16", "bf16", False),
    ("general", (515, 1000, 2056), "bf16", "bf16", True),
    ("general", (515, 1000, 2056), "fp32", "fp32", False),
    ("general", (300, 2056, 1032), "fp16", "fp16", True),
)
SPECIAL = (24, 160, 48)
VALUES: dict[str, Callable[[Operands], Operands]] = {
    "x nan": lambda o: o._replace(x=with_value(o.x, float("nan"))),
    "x inf": lambda o: o._replace(x=with_value(o.x, float("inf"))),
    "w -inf": lambda o: o._replace(w=with_value(o.w, -float("inf"))),
    "dy nan": lambda o: o._replace(dy=with_value(o.dy, float("nan"))),
    "dy inf": lambda o: o._replace(dy=with_value(o.dy, float("inf"))),
    "x zero": lambda o: o._replace(x=o.x * 0),
    "w zero": lambda o: o._replace(w=o.w * 0),
    "dy zero": lambda o: o._replace(dy=o.dy * 0),
    "x subnormal": lambda o: o._replace(x=o.x * 2.0**-129),
    "dy huge": lambda o: o._replace(dy=o.dy * 2.0**110),
    "x outlier": lambda o: o._replace(x=with_value(o.x, 7 * 2.0**60)),
}


def with_value(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    t[3, 5] = value
    return t


def layer_cases(name: str, recipe: Any, device: str) -> Iterator[Case]:
    for group, shape, x, w, bias in CORE + (CORE_GPU if device == "cuda" else ()):

        def run(group: Any = group, shape: Any = shape, x: Any = x, w: Any = w, bias: Any = bias):
            o = operands(group, shape, device, x, w)
            return train(recipe, o.x, o.w, o.bias if bias else None, o.dy)

        sizes = "x".join(map(str, shape))
        dtypes = x if x == w else f"{x} w {w}"
        noisy = "" if group == "exact" else " noise"
        yield Case(group, f"layer {name} {sizes} {dtypes}{' bias' * bias}{noisy}", run)

    for what, run in special_cases(recipe, device).items():
        yield Case("exact", f"layer {name} {what}", run)
    for what, change in VALUES.items():

        def run(change: Any = change) -> Results:
            o = change(operands("exact", SPECIAL, device))
            return train(recipe, o.x, o.w, o.bias, o.dy)

        yield Case("exact", f"layer {name} {what}", run)


def special_cases(recipe: Any, device: str) -> dict[str, Callable[[], Results]]:
    """One call each of what a layer may also be asked."""
    m, k, n = SPECIAL

    def given(x: str = "bf16", w: str | None = None) -> Operands:
        return operands("exact", SPECIAL, device, x, w)

    def plain(**changes: Any) -> Callable[[], Results]:
        def run() -> Results:
            o = given()
            arguments = {**dict(zip(("x", "w", "bias", "dy"), o, strict=True)), **changes}
            return train(recipe, **arguments)

        return run

    def transposed() -> Results:
        o = given()
        x, w, dy = (t.t().contiguous().t() for t in (o.x, o.w, o.dy))
        return train(recipe, x, w, o.bias, dy)

    def strided() -> Results:
        o = operands("exact", (m, 2 * k, 2 * n), device)
        return train(recipe, o.x[:, ::2], o.w[::2, 1::2], o.bias[::2], o.dy[:, ::2])

    def batched() -> Results:
        o = given()
        return train(recipe, o.x.view(2, 3, m // 6, k), o.w, o.bias, o.dy)

    def autocast(low: torch.dtype) -> Results:
        o = given("fp32")
        return train(recipe, *o, around=torch.autocast(device, dtype=low))

    def without_gradient(mode: Any) -> Results:
        o = given()
        with mode():
            return {"y": nf.linear(o.x, o.w, o.bias, recipe)}

    def matmul() -> Results:
        o = given("fp32")
        a, b = o.x.detach().requires_grad_(), o.w.t().detach().requires_grad_()
        y = nf.matmul(a, b, recipe)
        torch.manual_seed(1)
        y.backward(o.dy)
        return {"y": y, "dx": a.grad, "dw": b.grad}

    def module(o: Operands, dtype: torch.dtype = BF16) -> nf.Linear:
        layer = nf.Linear(k, n, device=device, dtype=dtype, recipe=recipe)
        with torch.no_grad():
            layer.weight.copy_(o.w)
            layer.bias.copy_(o.bias)
        return layer

    def reused() -> Results:
        o = given()
        model = nn.Sequential(module(o))
        found: Results = {}
        with nf.reuse_weights(model):
            for i in range(2):
                x = (o.x * 2.0**i).requires_grad_()
                y = model(x)
                torch.manual_seed(1 + i)
                y.backward(o.dy)
                found |= {f"y{i}": y, f"dx{i}": x.grad}
            with torch.no_grad():
                found["y2"] = model(o.x)
        return {**found, "dw": model[0].weight.grad, "db": model[0].bias.grad}

    def steps() -> Results:
        o = given()
        layer = module(o)
        found: Results = {}
        for i, (of_x, of_dy) in enumerate(((1, 1), (4, 0.5), (0.5, 16), (float("nan"), 1), (2, 2))):
            x = (o.x * of_x).requires_grad_()
            layer.zero_grad()
            y = layer(x)
            torch.manual_seed(1)
            y.backward(o.dy * of_dy)
            results = {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}
            with torch.no_grad():
                results["eval"] = layer(o.x * 8)
            nf.step(layer)
            results["history"] = layer.scale_history
            found |= {f"{what}{i}": None if t is None else t.clone() for what, t in results.items()}
        return found

    def converted() -> Results:
        o = given("fp32")
        model = nn.Sequential(nn.Linear(k, n), nn.Linear(n, k)).to(device)
        with torch.no_grad():
            model[0].weight.copy_(o.w)
            model[0].bias.copy_(o.bias)
            model[1].weight.copy_(o.w.t())
            model[1].bias.zero_()
        nf.convert(model, recipe, filter="0", keep_last=0)
        y = model[0](o.x)
        return {"y": y, "classes": ", ".join(type(layer).__name__ for layer in model)}

    def packed() -> Results:
        o = operands("exact", (200, k, n), device)
        model = nn.Sequential(nn.Linear(k, n, device=device, dtype=BF16))
        with torch.no_grad():
            model[0].weight.copy_(o.w)
            model[0].bias.copy_(o.bias)
        nf.convert(model, recipe, head=True, keep_last=0, inference=True)
        found: Results = {"packed": model[0].packed, "weight": model[0].dequantize()}
        for tokens in (0, 1, 3, 16, 40, 200):
            found[f"y{tokens}"] = model(o.x[:tokens])
        found["fp32"] = model(o.x[:5].float())
        return found

    calls: dict[str, Callable[[], Results]] = {
        "sum of y": plain(dy=None),
        "transposed": transposed,
        "strided": strided,
        "batched": batched,
        "autocast bf16": functools.partial(autocast, BF16),
        "autocast fp16": functools.partial(autocast, FP16),
        "dx alone": plain(wants="x"),
        "dw alone": plain(wants="w"),
        "db alone": plain(wants="b"),
        "dx dw": plain(wants="xw", bias=None),
        "no_grad": functools.partial(without_gradient, torch.no_grad),
        "inference_mode": functools.partial(without_gradient, torch.inference_mode),
        "matmul fp32": matmul,
        "reuse_weights": reused,
        "steps": steps,
        "convert": converted,
        "packed": packed,
    }
    return calls


# ---- quantize and the functions without a layer ----

QUANTIZE: dict[str, tuple[str, dict[str, bool]]] = {
    "e4m3": ("e4m3", {}),
    "e5m2": ("e5m2", {}),
    "fp8_row": ("fp8_row", {}),
    "fp8_block": ("fp8_block", {}),
    "fp8_block two_d": ("fp8_block", {"two_d": True}),
    "fp8_block_pow2": ("fp8_block_pow2", {}),
    "fp8_block_pow2 two_d": ("fp8_block_pow2", {"two_d": True}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4 two_d": ("nvfp4", {"two_d": True}),
    "nvfp4 four_over_six": ("nvfp4", {"four_over_six": True}),
    "nvfp4 two_d four_over_six": ("nvfp4", {"two_d": True, "four_over_six": True}),
    "nvfp4 stochastic": ("nvfp4", {"stochastic": True}),
    "nvfp4 stochastic four_over_six": ("nvfp4", {"stochastic": True, "four_over_six": True}),
    "mxfp4": ("mxfp4", {}),
    "mxfp4 stochastic": ("mxfp4", {"stochastic": True}),
    "e4m3 refused": ("e4m3", {"two_d": True}),
    "mxfp4 refused": ("mxfp4", {"four_over_six": True}),
    "fp8_row refused": ("fp8_row", {"two_d": True}),
}


def spread(t: Tensor) -> Tensor:
    """Magnitudes from 2^-40 to 2^40 along the last dimension but one."""
    powers = torch.arange(t.shape[0], device=t.device) * 80.0 / max(t.shape[0] - 1, 1) - 40
    return t * torch.exp2(powers.round()).to(t.dtype)[:, None]


def to_quantize(device: str) -> dict[str, Callable[[], Tensor]]:
    """What is quantized, by name."""

    def drawn(*shape: int, dtype: str = "bf16") -> Callable[[], Tensor]:
        return lambda: tensor("general", shape, 5, 0, DTYPES[dtype], device)

    def of(change: Callable[[Tensor], Tensor], dtype: str = "bf16") -> Callable[[], Tensor]:
        return lambda: change(tensor("general", (40, 200), 5, 0, DTYPES[dtype], device))

    inputs = {
        "64x128 bf16": drawn(64, 128),
        "64x128 fp32": drawn(64, 128, dtype="fp32"),
        "33x100 fp16": drawn(33, 100, dtype="fp16"),
        "200x300 bf16": drawn(200, 300),
        "1x17 fp32": drawn(1, 17, dtype="fp32"),
        "0x32 bf16": drawn(0, 32),
        "5x0 bf16": drawn(5, 0),
        "2x3x50 bf16": drawn(2, 3, 50),
        "17 bf16": drawn(17),
        "transposed": of(lambda t: t.t()),
        "every second": of(lambda t: t[::2, ::2]),
        "nan": of(lambda t: with_value(t, float("nan"))),
        "inf": of(lambda t: with_value(t, -float("inf"))),
        "zero": of(lambda t: t * 0),
        "subnormal": of(lambda t: t * 2.0**-128, "fp32"),
        "huge": of(lambda t: t * 2.0**124),
        "spread": of(spread),
        "spread fp32": of(spread, "fp32"),
        "integers": lambda: tensor("exact", (40, 200), 6, 0, BF16, device),
    }
    if device == "cuda":
        inputs |= {
            "1024x4096 bf16": drawn(1024, 4096),
            "515x1000 fp32": drawn(515, 1000, dtype="fp32"),
        }
    return inputs


def quantize_cases(name: str, device: str) -> Iterator[Case]:
    fmt, options = QUANTIZE[name]
    for what, make in to_quantize(device).items():

        def run(make: Any = make) -> Results:
            q = nf.quantize(make(), fmt, **options)
            found: Results = {"data": q.data}
            found |= {part: getattr(q, part) for part in ("scale", "scales") if hasattr(q, part)}
            return {**found, "real": q.dequantize(), "fp32": q.dequantize(FP32)}

        yield Case("exact", f"quantize {name} {what}", run)


def function_cases(device: str) -> Iterator[Case]:
    """The functions that need no layer."""
    e4m3 = torch.float8_e4m3fn

    def calls(group: str, shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
        o = operands(group, shape, device, dtype)
        m, k, n = shape

        def codes() -> tuple[Tensor, Tensor]:
            return (o.x * 2).to(e4m3), (o.w * 8).to(e4m3)

        def backward(masks: tuple[bool, bool, bool]) -> Results:
            found = nf.fp8_linear_backward(o.dy, o.x, o.w, masks)
            return dict(zip(("dx", "dw", "db"), found, strict=True))

        def applied() -> Results:
            a, b = o.x.detach().requires_grad_(), o.w.t().detach().requires_grad_()
            y = nf.FP4MatMulFunction.apply(a, b)
            y.backward(o.dy)
            return {"y": y, "da": a.grad, "db": b.grad}

        def rounded() -> Results:
            a = o.x.detach().requires_grad_()
            values, scales = nf.FP4QuantizeFunction.apply(a)
            real = nf.FP4DequantizeFunction.apply(values, scales)
            real.backward(o.x)
            return {"values": values, "scales": scales, "real": real, "da": a.grad}

        return {
            "fp8_mm": lambda: {"y": nf.fp8_mm(*codes())},
            "fp8_mm_view": lambda: {
                "y": nf.fp8_mm_view(*codes()),
                "strides": nf.fp8_mm_view(*codes()).stride(),
            },
            "fp8_linear_forward": lambda: {
                "y": nf.fp8_linear_forward(o.x, o.w, o.bias),
                "no bias": nf.fp8_linear_forward(o.x, o.w),
            },
            "fp8_linear_backward": lambda: backward((True, True, True)),
            "fp8_linear_backward dx": lambda: backward((True, False, False)),
            "fp8_linear_backward dw": lambda: backward((False, True, False)),
            "fp8_linear_backward db": lambda: backward((False, False, True)),
            "fp4_matmul": lambda: {"y": nf.fp4_matmul(o.x, o.w.t())},
            "fp4_matmul_backward_A": lambda: {"da": nf.fp4_matmul_backward_A(o.dy, o.w.t())},
            "fp4_matmul_backward_B": lambda: {"db": nf.fp4_matmul_backward_B(o.x, o.dy)},
            "FP4MatMulFunction": applied,
            "FP4QuantizeFunction": rounded,
            "fp4_quantize": lambda: {"real": nf.fp4_dequantize(nf.fp4_quantize(o.x))},
            "packed": lambda: packed_alone(o, k, n),
        }

    def packed_alone(o: Operands, k: int, n: int) -> Results:
        found: Results = {}
        for recipe in ("nvfp4", "mxfp4", "nvfp4_four_over_six"):
            layer = nn.Linear(k, n, device=device, dtype=o.w.dtype)
            with torch.no_grad():
                layer.weight.copy_(o.w)
                layer.bias.copy_(o.bias)
            made = nf.PackedFP4Linear.from_linear(layer, recipe)
            found |= {f"{recipe} packed": made.packed, f"{recipe} scale": made.scale}
            for tokens in (1, 2, 3, 16, 40, 200):
                x = tensor("exact", (tokens, k), 1, -2, BF16, device)
                found[f"{recipe} {tokens}"] = made(x)
        return found

    settings = [("exact", (33, 100, 72), "bf16"), ("exact", (48, 128, 64), "fp32")]
    settings += [("general", (33, 112, 80), "fp16"), ("general", (64, 256, 128), "bf16")]
    if device == "cuda":
        settings += [("general", (512, 1024, 768), "bf16"), ("general", (300, 4096, 1032), "bf16")]
    for group, shape, dtype in settings:
        sizes = "x".join(map(str, shape))
        for name, call in calls(group, shape, dtype).items():
            yield Case(group, f"function {name} {sizes} {dtype}", call)


def refused_cases(device: str) -> Iterator[Case]:
    """Arguments that are errors."""
    o = operands("exact", SPECIAL, device)

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    calls: dict[str, Callable[[], Any]] = {
        "K differs": lambda: nf.linear(o.x, o.w[:, :-1]),
        "bias differs": lambda: nf.linear(o.x, o.w, o.bias[:-1]),
        "int": lambda: nf.linear(o.x.int(), o.w),
        "scalar": lambda: nf.linear(zeros(), o.w),
        "no such recipe": lambda: nf.linear(o.x, o.w, None, "fp7"),
        "no such format": lambda: nf.quantize(o.x, "e3m4"),
        "matmul batched b": lambda: nf.matmul(o.x, zeros(2, 3, 4)),
        "two e5m2": lambda: nf.Gemm("e5m2", "e5m2"),
        "fast bf16": lambda: nf.Gemm(None, "e4m3", "fast"),
        "no such accumulate": lambda: nf.Gemm("e4m3", "e4m3", "slow"),
        "two formats of x": lambda: nf.Recipe(wgrad=nf.Gemm("e4m3", "e5m2")),
        "delayed bf16": lambda: nf.Recipe(wgrad=nf.Gemm(None, None), delayed=nf.Delayed()),
        "delayed length": lambda: nf.Delayed(0),
        "block e5m2": lambda: nf.BlockRecipe(dy="e5m2"),
        "block fast": lambda: nf.BlockRecipe(fast=("fprop",)),
        "block no such": lambda: nf.BlockRecipe(fprop="column"),
        "mxfp4 four over six": lambda: nf.FP4Recipe("m", "mxfp4", four_over_six="x"),
        "mixed delayed": lambda: nf.MixedRecipe("m", "fp8_delayed", "fp8", "fp8"),
        "mixed no such": lambda: nf.MixedRecipe("m", "fp8", "fp9", "fp8"),
        "packed fp8": lambda: nf.PackedFP4Linear(32, 32, recipe="fp8"),
        "fp8_mm bf16": lambda: nf.fp8_mm(o.x, o.w),
    }
    for what, call in calls.items():

        def run(call: Any = call) -> Results:
            call()
            return {"refused": "no"}

        yield Case("exact", f"refused {what}", run)


def subjects(device: str) -> dict[str, Callable[[], Iterator[Case]]]:
    """Cases by what they are about."""
    found: dict[str, Callable[[], Iterator[Case]]] = {
        f"layer {name}": functools.partial(layer_cases, name, recipe, device)
        for name, recipe in recipes().items()
    }
    for name in QUANTIZE:
        found[f"quantize {name}"] = functools.partial(quantize_cases, name, device)
    found["functions"] = functools.partial(function_cases, device)
    found["refused"] = functools.partial(refused_cases, device)
    return found


# ---- commands ----


def machine(device: str) -> dict[str, Any]:
    root = pathlib.Path(nf.__file__).resolve().parents[2]
    try:
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        commit = None
    binary = getattr(sys.modules.get("narrowfloat._binary"), "module", None)
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cublaslt": binary.cublaslt_version() if device == "cuda" and binary else None,
        "commit": commit,
        "narrowfloat": nf.__version__,
    }


def record(device: str, exact_alone: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)  # small tensors; threads beside other work only wait
    found: dict[str, Any] = {"machine": machine(device), **{group: {} for group in GROUPS}}
    for cases in subjects(device).values():
        for case in cases():
            if exact_alone and case.group != "exact":
                continue
            assert case.name not in found[case.group], case.name
            found[case.group][case.name] = outcome(case)
    return found


def to_json(found: dict[str, Any]) -> str:
    """A line a case."""
    parts = [f'"machine": {json.dumps(found["machine"])}']
    for group in GROUPS:
        lines = (f"{json.dumps(name)}: {json.dumps(h)}" for name, h in found[group].items())
        parts.append(f'"{group}": {{\n' + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The results of one case that differ; of errors their types count."""
    kind = {"error": lambda text: text.split(":")[0]}
    return [
        name
        for name in dict.fromkeys((*a, *b))
        if name not in a
        or name not in b
        or kind.get(name, str)(a[name]) != kind.get(name, str)(b[name])
    ]


def changed(name: str) -> str | None:
    """Why a case differs on purpose."""
    since = (why for pattern, why in CHANGED_SINCE.items() if re.search(pattern, name))
    return CHANGED.get(name) or next(since, None)


def compare(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Prints what differs; how many cases do, those that one side lacks included."""
    differ = reworded = 0
    for group in GROUPS:
        equal = 0
        for name in dict.fromkeys((*a[group], *b[group])):
            if name not in a[group] or name not in b[group]:
                if a[group] and b[group]:  # else one was recorded without the group
                    differ += 1
                    print(f"{group}: {name}: only in {'A' if name in a[group] else 'B'}")
                continue
            ours, theirs = a[group][name], b[group][name]
            found = differences(ours, theirs)
            if found and (why := changed(name)):
                print(f"{group}: {name}: {', '.join(found)} differ on purpose: {why}")
                continue
            equal += not found
            differ += bool(found)
            if found:
                sides = zip("AB", (ours, theirs), strict=True)
                errors = [f"; {side}: {s['error']}" for side, s in sides if "error" in s]
                print(f"{group}: {name}: {', '.join(found)} differ{''.join(errors)}")
            elif ours != theirs:
                reworded += 1
                print(f"{group}: {name}: the error has another text: {theirs['error']}")
        print(f"{group}: {equal} cases equal")
    print(f"{differ} cases differ, {reworded} have the same error in other words")
    return differ


@contextlib.contextmanager
def shuffled() -> Iterator[None]:
    """Every matmul of fp32 tensors sums in another order."""
    plain = torch.Tensor.__matmul__

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype != FP32 or a.dim() < 2 or b.dim() != 2 or a.shape[-1] < 2:
            return plain(a, b)
        generator = torch.Generator().manual_seed(7)
        order = torch.randperm(a.shape[-1], generator=generator)
        halves = order.split(-(-len(order) // 3))
        total = plain(a[..., halves[0]], b[halves[0]])
        for part in halves[1:]:
            total = plain(a[..., part], b[part]) + total
        return total

    torch.Tensor.__matmul__ = matmul  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__matmul__ = plain  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    recording.add_argument("--out", type=pathlib.Path, required=True)
    recording.add_argument("--exact", action="store_true", help="leave out the group general")
    comparing = commands.add_parser("compare")
    comparing.add_argument("a", type=pathlib.Path)
    comparing.add_argument("b", type=pathlib.Path)
    commands.add_parser("shuffle")
    options = parser.parse_args()
    if options.command == "compare":
        a, b = (json.loads(path.read_text()) for path in (options.a, options.b))
        return 1 if compare(a, b) else 0
    if options.command == "shuffle":
        plain = record("cpu", exact_alone=True)
        with shuffled():
            return 1 if compare(plain, record("cpu", exact_alone=True)) else 0
    began = time.perf_counter()
    found = record(options.device, options.exact)
    options.out.write_text(to_json(found))
    counts = ", ".join(f"{len(found[group])} {group}" for group in GROUPS)
    print(f"{counts} cases in {time.perf_counter() - began:.0f} s: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
