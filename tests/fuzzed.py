"""How the fuzz tests draw their examples, and how many of them run.

An example is a NamedTuple of plain values: hypothesis shrinks it and prints it whole, and a line of
Python runs it again. Its tensors are drawn from its seeds on the CPU, so each device sees the same.

NARROWFLOAT_FUZZ_EXAMPLES: how many the long run (`-m fuzz`) tries together, 10,000 unless told.
NARROWFLOAT_FUZZ_SEED: another seed finds other examples. NARROWFLOAT_FUZZ_OUT: a file for its rows.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

FEW = 12  # examples of a check in the ordinary run, the same ones each time
PARTS = 16  # of the long run, so that workers share it evenly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def long_run_examples(checks: int) -> int:
    """Of each part of each check."""
    return math.ceil(int(os.environ.get("NARROWFLOAT_FUZZ_EXAMPLES", "10000")) / PARTS / checks)


def run(
    check: Callable[[Any, str], None],
    examples: st.SearchStrategy[Any],
    device: str,
    request: pytest.FixtureRequest,
    part: int | None = None,
    number: int = FEW,
) -> None:
    """check(example, device) for `number` examples. part: of the long run, which is counted."""
    counted = 0

    @hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=part is None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        print_blob=False,
    )
    @hypothesis.given(examples)
    def each(example: Any) -> None:
        nonlocal counted
        counted += 1
        check(example, device)

    if part is None:
        each()
        return
    begin = int(os.environ.get("NARROWFLOAT_FUZZ_SEED", "0"))
    failed = 1
    try:
        hypothesis.seed(zlib.crc32(f"{begin} {part} {request.node.name}".encode()))(each)()
        failed = 0
    finally:
        # conftest.py adds these up, of all workers
        name = torch.cuda.get_device_name() if device == "cuda" else device
        request.node.user_properties.append(("fuzz", (name, counted, failed)))


# ---- tensors ----


class Made(NamedTuple):
    """How a tensor [rows, cols] is made."""

    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    values: str = "normal"
    seed: int = 0


def _inside(t: Tensor, before: int, after: int, above: int = 1) -> Tensor:
    """A view of a wider tensor, whose other elements are NaN (or, of integers, all ones)."""
    rows, cols = t.shape
    sizes = rows + above + 1, before + cols + after
    whole = torch.full((*sizes, t.element_size()), 0xFF, dtype=torch.uint8, device=t.device)
    wide = whole.view(t.dtype).view(sizes)
    at = wide[above : above + rows, before : before + cols]
    at.copy_(t)
    return at


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "in a wider one": lambda t: _inside(t, 16, 16),
    "off 16 bytes": lambda t: _inside(t, 3, 2),
    "an odd offset": lambda t: _inside(t, 1, 0, 0),
    "transposed in a wider one": lambda t: _inside(t.t(), 5, 2).t(),
    "every second column": lambda t: _inside(t.repeat_interleave(2, 1), 1, 3)[:, ::2],
    "every second row": lambda t: _inside(t.repeat_interleave(2, 0), 8, 8)[::2],
    "one row for all": lambda t: t[:1].expand_as(t) if len(t) else t,
    "one column for all": lambda t: t[:, :1].expand_as(t) if t.shape[1] else t,
    "one value for all": lambda t: t[:1, :1].expand_as(t) if t.numel() else t,
}


def _ties(r: int, c: int, g: torch.Generator) -> Tensor:
    """Small integers times powers of two: half-way cases of every format."""
    return torch.randint(-512, 513, (r, c), generator=g) / 2.0**4


def _normal(r: int, c: int, g: torch.Generator) -> Tensor:
    return torch.randn(r, c, generator=g)


def _range(r: int, c: int, g: torch.Generator) -> Tensor:
    return _normal(r, c, g) * 2.0 ** torch.randint(-24, 13, (r, c), generator=g)


def _sparse(r: int, c: int, g: torch.Generator) -> Tensor:
    return _normal(r, c, g) * (torch.rand(r, c, generator=g) < 0.05)


def _outlier(r: int, c: int, g: torch.Generator) -> Tensor:
    t = _normal(r, c, g)
    return _put(t, 1e4, g)


def _put(t: Tensor, value: float, g: torch.Generator) -> Tensor:
    """`value` in one or two places."""
    if t.numel():
        for _ in range(2):
            t.view(-1)[torch.randint(t.numel(), (1,), generator=g)] = value
    return t


NAN, INF = float("nan"), float("inf")
VALUES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "ties": _ties,
    "range": _range,
    "sparse": _sparse,
    "outlier": _outlier,
    "zeros": lambda r, c, g: torch.zeros(r, c),
    "negative zeros": lambda r, c, g: -torch.zeros(r, c),
    "constant": lambda r, c, g: torch.full((r, c), -0.37),
    "small": lambda r, c, g: _normal(r, c, g) * 1e-5,
    "denormal": lambda r, c, g: _normal(r, c, g) * 1e-40,
    "smallest": lambda r, c, g: torch.randint(-3, 4, (r, c), generator=g) * 2.0**-149,
    "tiny": lambda r, c, g: _normal(r, c, g) * 1e-37,
    "large": lambda r, c, g: _normal(r, c, g) * 1e4,
    "huge": lambda r, c, g: _normal(r, c, g) * 1e38,
    "largest": lambda r, c, g: torch.where(_normal(r, c, g) < 0, -3.4028234e38, 3.4028234e38),
    "nan": lambda r, c, g: _put(_normal(r, c, g), NAN, g),
    "inf": lambda r, c, g: _put(_normal(r, c, g), INF, g),
    "-inf": lambda r, c, g: _put(_normal(r, c, g), -INF, g),
    "nan and inf": lambda r, c, g: _put(_put(_normal(r, c, g), NAN, g), -INF, g),
    "all nan": lambda r, c, g: torch.full((r, c), NAN),
}
FINITE = [v for v in VALUES if "nan" not in v and "inf" not in v]
# those whose GEMMs stay far from the ends of fp32
ORDINARY = ["normal", "ties", "range", "sparse", "outlier", "zeros", "constant", "small"]


def values(how: Made, rows: int, cols: int) -> Tensor:
    """On the CPU, as they lie last: contiguous."""
    g = torch.Generator().manual_seed(how.seed)
    t = VALUES[how.values](rows, cols, g).float()
    largest = torch.finfo(how.dtype).max  # fp16's are large where they were large in fp32
    t = torch.where(t.isinf(), t, t.clamp(-largest, largest))
    return LAYOUTS[how.layout](t.to(how.dtype))


def make(how: Made, rows: int, cols: int, device: str) -> Tensor:
    return LAYOUTS[how.layout](values(how, rows, cols).contiguous().to(device))


def leading(t: Tensor, sizes: tuple[int, ...], swapped: bool) -> Tensor:
    """t [rows, K] as [*sizes, K], the first two sizes in the other order if swapped."""
    t = t.view(*sizes, t.shape[-1])
    return t.transpose(0, 1) if swapped and len(sizes) > 1 else t


# ---- what is drawn ----

EDGES = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 144, 160, 256]
sizes = st.one_of(
    st.sampled_from(EDGES), st.integers(1, 200), st.sampled_from([0, 1, 16, 257, 300])
)
small_sizes = st.one_of(st.sampled_from(EDGES[:16]), st.integers(0, 70))
seeds = st.integers(0, 2**31 - 1)


def made(
    values: list[str] | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> st.SearchStrategy[Made]:
    # ordinary numbers half of the time: a NaN hides every other mistake of a call
    kinds = st.one_of(
        st.sampled_from(ORDINARY), st.sampled_from(list(VALUES) if values is None else values)
    )
    return st.builds(Made, st.sampled_from([*LAYOUTS]), st.sampled_from(dtypes), kinds, seeds)


def leading_sizes(size: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """Of x [..., K]: from none to three dimensions."""
    few = st.integers(1, 6)
    return st.one_of(
        st.tuples(size), st.tuples(few, size), st.tuples(few, few, few), st.just(()), st.tuples(few)
    )


# ---- comparing GEMMs ----


class Scales(NamedTuple):
    """Those that a GEMM's sum is multiplied by in the end, in an order that nobody promises."""

    least: float = 1.0  # of one operand
    most: float = 1.0
    product: float = 1.0  # of both operands' tensor scales

    @staticmethod
    def of(operand: tuple[Tensor | None, ...]) -> Scales:
        """operand: codes, scales of rows or blocks, scale of the tensor."""
        if not operand:
            return Scales()
        scales, scale = operand[1:]
        product = 1.0 if scale is None else float(scale[0])
        every = torch.tensor([1.0, product])
        if scales is not None and scales.dtype == torch.float32:  # of rows or blocks
            every = torch.cat([every, scales.cpu().flatten()])
        every = every[every.isfinite()]
        return Scales(float(every.min()), float(every.max()), product)

    def times(self, other: Scales) -> Scales:
        return Scales(*(a * b for a, b in zip(self, other, strict=True)))


def assert_sum(
    got: Tensor,
    want: Tensor,
    terms: Tensor,
    relative: float,
    what: str,
    scales: Scales = Scales(),  # noqa: B008
    broken: Tensor | None = None,
) -> None:
    """got, a GEMM's result, against want in fp64, each element within its own error: `relative` of
    terms, the sum of its products' magnitudes, and a rounding to got's dtype.

    broken: where an operand has a NaN or an Inf; want is not finite there, and got may not be
    (None: wherever want is not). Where terms come near the largest number of fp32 or of
    got's dtype a sum, or a sum times one of the scales, may have overflowed, or not. Nothing is
    promised where fp32 does not hold the product of the tensors' scales.
    """
    assert got.shape == want.shape, (what, got.shape, want.shape)
    if want.numel() == 0:
        return
    g, limits = got.detach().cpu().double(), torch.finfo(got.dtype)
    single = torch.finfo(torch.float32)
    if not scales.product <= single.max:
        return
    most = min(limits.max, single.max * scales.least)
    near = (terms * 1.01 >= most) | terms.isnan()
    # what is below the normal numbers of fp32 may have been flushed: a sum times a scale; a scale
    # itself, or the product of two, which sums of codes are multiplied by
    flushed = single.tiny * scales.most
    if min(scales.least, scales.product) < single.tiny:
        flushed *= 1e9
    smallest = max(limits.smallest_normal * limits.eps, flushed)
    bound = relative * terms + limits.eps * want.abs() + smallest
    right = (g - want).abs() <= bound
    lost = ~want.isfinite()
    must = lost if broken is None else lost & broken
    wrong = torch.where(lost, must & g.isfinite(), ~right & ~near)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {want.numel()} are wrong, first at {at}: {g[at]:.9g} "
            f"where {want[at]:.9g} within {bound[at]:.3g} is right"
        )
