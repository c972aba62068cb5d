"""Packed FP4 weights for inference, and the layer that has them.

Training keeps codes row by row and block scales in tiles, as cuBLASLt reads them. A matmul with a
few tokens lives by how fast the weights come from memory, so inference orders them once as the
kernel's threads use them: csrc/w4a16/packed.cuh says how, the kernels beside it multiply. Where
many tokens come the weights are unpacked to bf16 first (csrc/w4a16/weights.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from . import _binary, support, tensor_kinds
from . import recipe as recipes
from .cast import Cast
from .formats import GROUP, HIGH_PRECISION, NVFP4, codes_shape, padded32, scales_size
from .functional_op import has_tangent
from .ops import Operator, quantize_op
from .recipe import Recipe
from .reference import fp4
from .reference.tensor import check_quantizable, check_same_device, check_tensor
from .spec import both

# A unit: 32 rows x 128 of K, their codes and then their block scales.
UNIT_ROWS, UNIT_COLS = 32, 128
UNIT_CODES = UNIT_ROWS * UNIT_COLS // 2
UNIT_BYTES = UNIT_CODES + UNIT_ROWS * UNIT_COLS // GROUP

# Where the bits of a word's eight codes lie, those of 8, 4, 2 and 1. The eight are four pairs of
# neighbours along K: (row g, first two), (row g + 8, first two), (row g, last two) and (row g + 8,
# last two). Few shifts bring each to the bits 15, 8, 7, 6 and 31, 24, 23, 22, as bf16 has them.
_BITS = (
    ((15, 8, 7, 6), (31, 24, 23, 22)),
    ((11, 4, 3, 2), (27, 20, 19, 18)),
    ((5, 30, 29, 28), (21, 14, 13, 12)),
    ((9, 10, 1, 0), (25, 26, 17, 16)),
)
_CHUNK = 1 << 22  # elements that are packed at once; a few int32 copies of them exist meanwhile


def _stored_scales() -> Tensor:
    """The stored byte of each E4M3 byte: five bits of exponent, offset by 12, three of mantissa.
    E4M3's subnormal numbers are normal there. NaN, and what no scale is (a set sign), is 175."""
    stored = torch.full((256,), 175, dtype=torch.uint8)
    stored[0] = 0
    stored[1:8] = torch.tensor([24, 32, 36, 40, 42, 44, 46])  # 1 to 7 times 2^-9
    stored[8 : NVFP4.nan] = torch.arange(8, NVFP4.nan) + 40
    return stored


def _original_scales() -> Tensor:
    original = torch.full((256,), NVFP4.nan, dtype=torch.uint8)
    for byte, stored in enumerate(_stored_scales()[:128].tolist()):
        original[stored] = byte
    return original


def _units(n: int, k: int) -> tuple[int, int]:
    return -(-n // UNIT_ROWS), -(-k // UNIT_COLS)


def packed_shape(n: int, k: int) -> tuple[int, int, int]:
    """Of the packed weights [n, k]: uint8 [ceil(n / 32), ceil(k / 128), 2304]."""
    return (*_units(n, k), UNIT_BYTES)


def _check_packed(packed: Tensor, n: int, k: int, who: str) -> None:
    if packed.dtype != torch.uint8 or packed.shape != packed_shape(n, k):
        raise ValueError(
            f"{who}: expected packed weights in uint8 {packed_shape(n, k)} for N {n} and K {k}, "
            f"got {packed.dtype} {tuple(packed.shape)} (pack() makes them)"
        )


def pack(codes: Tensor, tiled_scales: Tensor, n: int, k: int) -> Tensor:
    """Weights [n, k] from the layout of the quantize operator to that of inference.

    codes: uint8 [padded(n), padded32(k) / 2]; tiled_scales: uint8, or float8_e4m3fn, flat, in
    tiles of 128 x 4, [scales_size(n, k)]; ValueError for others. Returns uint8 packed_shape(n, k).
    Codes whose scale is 0 become 0. unpack() is the inverse.
    """
    if codes.dtype != torch.uint8 or codes.shape != codes_shape(n, k):
        raise ValueError(
            f"pack: expected codes in uint8 {codes_shape(n, k)} for N {n} and K {k}, got "
            f"{codes.dtype} {tuple(codes.shape)} (the quantize operator makes them)"
        )
    if tiled_scales.dtype is NVFP4.scale:
        tiled_scales = tiled_scales.view(torch.uint8)
    if tiled_scales.dtype != torch.uint8 or tiled_scales.shape != (scales_size(n, k),):
        raise ValueError(
            f"pack: expected tiled scales in uint8 {(scales_size(n, k),)} for N {n} and K {k}, got "
            f"{tiled_scales.dtype} {tuple(tiled_scales.shape)} (the quantize operator makes them)"
        )
    if tiled_scales.device != codes.device:
        raise ValueError(
            f"pack: expected tiled scales on {codes.device} as codes are, got "
            f"{tiled_scales.device} (move them there)"
        )
    tiles, units = _units(n, k)
    scales = fp4.untile(tiled_scales, n, padded32(k))
    stored = _stored_scales().to(codes.device)
    packed = torch.empty(packed_shape(n, k), dtype=torch.uint8, device=codes.device)
    step = max(1, _CHUNK // max(1, UNIT_ROWS * UNIT_COLS * units))
    for first in range(0, tiles, step):
        rows = slice(first * UNIT_ROWS, min((first + step) * UNIT_ROWS, n))
        t = min(step, tiles - first)
        missing = t * UNIT_ROWS - (rows.stop - rows.start)
        s = scales[rows]
        s = pad(s, (0, units * UNIT_COLS // GROUP - s.shape[1], 0, missing))
        c = fp4.unpack(codes[rows])
        c = pad(c, (0, units * UNIT_COLS - c.shape[1], 0, missing))
        c = (c.view(*s.shape, GROUP) * (s != 0)[..., None]).to(torch.int32)
        # [tile, half of rows, + 8, g, unit, half of K, t, j, which two, which of two]
        c = c.view(t, 2, 2, 8, units, 2, 4, 4, 2, 2).permute(0, 4, 5, 1, 3, 6, 7, 8, 2, 9)
        c = c.reshape(t, units, UNIT_CODES // 4, 8)
        words = torch.zeros(c.shape[:-1], dtype=torch.int32, device=codes.device)
        for i, bits in enumerate(bits for pair in _BITS for bits in pair):
            for weight, bit in zip((3, 2, 1, 0), bits, strict=True):
                words |= (c[..., i] >> weight & 1) << bit
        block = packed[first : first + t]
        block[..., :UNIT_CODES] = words.view(torch.uint8)
        s = stored[s.int()].view(t, 2, 2, 8, units, 2, 4).permute(0, 4, 3, 6, 5, 1, 2)
        block[..., UNIT_CODES:] = s.reshape(t, units, UNIT_BYTES - UNIT_CODES)
    return packed


def unpack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """pack()'s inverse: (codes, tiled scales) as the quantize operator returns them."""
    _check_packed(packed, n, k, "unpack")
    tiles, units = _units(n, k)
    rows, half_cols = codes_shape(n, k)
    codes = torch.zeros((rows, half_cols), dtype=torch.uint8, device=packed.device)
    scales = torch.empty((n, padded32(k) // GROUP), dtype=torch.uint8, device=packed.device)
    original = _original_scales().to(packed.device)
    step = max(1, _CHUNK // max(1, UNIT_ROWS * UNIT_COLS * units))
    for first in range(0, tiles, step):
        block = packed[first : first + step]
        t = block.shape[0]
        words = block[..., :UNIT_CODES].contiguous().view(torch.int32)
        c = torch.zeros((*words.shape, 8), dtype=torch.uint8, device=packed.device)
        for i, bits in enumerate(bits for pair in _BITS for bits in pair):
            for weight, bit in zip((3, 2, 1, 0), bits, strict=True):
                c[..., i] |= ((words >> bit & 1) << weight).to(torch.uint8)
        c = c.view(t, units, 2, 2, 8, 4, 4, 2, 2, 2).permute(0, 3, 8, 4, 1, 2, 5, 6, 7, 9)
        c = fp4.pack(c.reshape(t * UNIT_ROWS, units * UNIT_COLS))
        at = slice(first * UNIT_ROWS, min((first + t) * UNIT_ROWS, n))
        codes[at] = c[: at.stop - at.start, :half_cols]
        s = original[block[..., UNIT_CODES:].int()]
        s = s.view(t, units, 8, 4, 2, 2, 2).permute(0, 5, 6, 2, 1, 4, 3)
        s = s.reshape(t * UNIT_ROWS, units * UNIT_COLS // GROUP)
        scales[at] = s[: at.stop - at.start, : scales.shape[1]]
    return codes, fp4.tile(scales, n, k)


def dequantize(packed: Tensor, scale: Tensor, n: int, k: int) -> Tensor:
    """fp32 [n, k], code x block scale x tensor scale."""
    return fp4.unpacked(*unpack(packed, n, k), n, k) * scale


# ---- the operator ----

_library = torch.library.Library("narrowfloat", "FRAGMENT")


def _check_matmul(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, n: int, out_dtype: torch.dtype
) -> None:
    who = "fp4_weight_matmul"
    for name, t in (("x", x), ("packed", packed), ("scale", scale)):
        check_tensor(t, who, name)
    if x.dim() == 0:
        raise ValueError(f"{who}: expected x of at least one dimension, got a scalar")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{who}: expected x in torch.bfloat16, got {x.dtype} (convert it first)")
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{who}: expected out_dtype out of float32, bfloat16, float16, got {out_dtype}"
        )
    check_same_device(x, who, "x", packed=packed, scale=scale, bias=bias)
    _check_packed(packed, n, x.shape[-1], who)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(
            f"{who}: expected the scale in float32 with one element, got {scale.dtype} "
            f"{tuple(scale.shape)}"
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype not in HIGH_PRECISION):
        raise ValueError(
            f"{who}: expected bias [{n}] in float32, bfloat16 or float16, got "
            f"{tuple(bias.shape)} in {bias.dtype}"
        )


def fp4_weight_matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    n: int,
    out_dtype: torch.dtype,
    constant: bool,
) -> Tensor:
    """y [..., n] = scale (x [..., K] w [n, K]^T) + bias, w packed: an fp32 sum, one rounding.

    x: bf16; scale: fp32, one element; bias: fp32, bf16 or fp16. constant: the weights may be read
    before the launches before have ended (csrc/w4a16/matmul.h, FP4Matmul). The CPU's kernel.
    """
    _check_matmul(x, packed, scale, bias, n, out_dtype)
    w = fp4.unpacked(*unpack(packed, n, x.shape[-1]), n, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        y = (x.float() @ w.t()) * scale
    return (y if bias is None else y + bias.float()).to(out_dtype)


_library.define(
    "fp4_weight_matmul(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int n,"
    " ScalarType out_dtype, bool constant) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.impl("fp4_weight_matmul", fp4_weight_matmul, "CPU")


def _no_binary(*_: object) -> None:
    raise NotImplementedError(_binary.problem)


if _binary.problem is not None:  # a CUDA tensor gets the reason, in compiled code too
    _library.impl("fp4_weight_matmul", _no_binary, "CUDA")


@torch.library.register_fake("narrowfloat::fp4_weight_matmul")
def _fp4_weight_matmul(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    n: int,
    out_dtype: torch.dtype,
    constant: bool,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


fp4_weight_matmul_op = Operator(torch.ops.narrowfloat.fp4_weight_matmul.default)


# ---- the layer ----


def _out_dtype(x: Tensor) -> torch.dtype:
    kind = "cuda" if x.is_cuda else "cpu"  # torch knows nothing of autocast on meta
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class PackedFP4Linear(nn.Module):
    """A linear layer for inference whose weights are packed FP4: 4.5 bits each.

    y = x w^T + bias with x rounded to bf16 and w as `recipe` quantizes it in training. Made by
    from_linear(), or with the constructor and load_state_dict(). Buffers: `packed` uint8
    packed_shape(out_features, in_features), `scale` fp32 [1], `bias` [out_features] or None. There
    are no parameters and no gradient: an input that requires one is a ValueError.

    overlap: each launch may fetch weights while the launch before it ends, 1 to 2 us saved a layer
    with few tokens. Set it where the buffers were written, and waited for, before inference began
    and stay so.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "nvfp4",
        overlap: bool = False,
    ) -> None:
        """Without weights yet: zeros. dtype: of the bias."""
        super().__init__()
        self.in_features, self.out_features, self.overlap = in_features, out_features, overlap
        self.recipe = _fp4_recipe(recipe)
        shape = packed_shape(out_features, in_features)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.ones(1, dtype=torch.float32, device=device))
        made = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_buffer("bias", made)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, recipe: str | Recipe | None = None, *, overlap: bool = False
    ) -> PackedFP4Linear:
        """Quantize and pack the weight of `linear`; its bias is copied.

        recipe: default that of a narrowfloat layer if it is an FP4 one, else "nvfp4".
        """
        if recipe is None:
            own = getattr(linear, "recipe", None)
            recipe = own if own is not None and fp4_weight(own) is not None else "nvfp4"
        weight = linear.weight.detach()
        layer = cls(
            linear.in_features, linear.out_features, False, "meta", recipe=recipe, overlap=overlap
        )
        support.require(layer.recipe, weight.device)
        rows = both(fp4_weight(layer.recipe), None)
        codes, tiled, _, _, scales = quantize_op(weight, rows.pack())
        layer.packed = pack(codes, tiled, linear.out_features, linear.in_features)
        layer.scale = scales[:1].clone()
        layer.bias = None if linear.bias is None else linear.bias.detach().clone()
        return layer.train(linear.training)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe":
            before, value = vars(self).get(name), _fp4_recipe(value)
            if before is not None and before != value:
                raise ValueError(
                    f"PackedFP4Linear: expected the recipe that its weights are packed in, "
                    f"{before}, got {value} (pack them again from a Linear)"
                )
        super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor:
            found = self._of_another_kind(input)
            if found is not None:
                return found
        if not isinstance(input, Tensor) or input.dtype not in HIGH_PRECISION:
            check_quantizable(input, "PackedFP4Linear", "input")
        if input.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "PackedFP4Linear: expected an input without gradient, got one that requires it "
                "(packed weights are for inference: run it under torch.no_grad())"
            )
        if not torch.compiler.is_compiling() and has_tangent(input):
            raise NotImplementedError(
                "PackedFP4Linear: expected an input without a tangent, got a dual tensor "
                "(quantized layers have no forward mode)"
            )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"PackedFP4Linear: expected an input [..., {self.in_features}], got "
                f"{tuple(input.shape)}"
            )
        held = self._buffers  # past __getattr__, a call in Python for each
        return fp4_weight_matmul_op(
            input.to(torch.bfloat16),
            held["packed"],
            held["scale"],
            held["bias"],
            self.out_features,
            _out_dtype(input),
            self.overlap,
        )

    def _of_another_kind(self, input: Any) -> Tensor | None:
        """Of a torch.fx proxy or a jagged nested tensor; None for others."""
        if tensor_kinds.is_jagged(input):
            return tensor_kinds.of_values(input, self.forward, "PackedFP4Linear")
        if not tensor_kinds.is_proxy(input):
            return None
        call = tensor_kinds.leaf_of(input)
        if call is None:
            raise NotImplementedError(
                "PackedFP4Linear: expected to be called as a module of the model that torch.fx "
                "traces, got a trace of its own forward (trace a model around a layer without "
                "hooks; the layer has no graph inside)"
            )
        return call

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "PackedFP4Linear has no attribute 'weight': the weight is packed in FP4 and cannot "
                "be written (dequantize() gives its values; a parent that computes with it, or "
                "merges an adapter into it, needs the layer unpacked: leave it out with filter)"
            )
        return super().__getattr__(name)

    def dequantize(self) -> Tensor:
        """The weight [out_features, in_features] in fp32."""
        return dequantize(self.packed, self.scale, self.out_features, self.in_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedFP4Linear:
        scale: Any = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:  # model.to(dtype) is for the bias; the scale stays
            self.scale = scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, recipe={self.recipe}"
        )


tensor_kinds.LEAVES.add(PackedFP4Linear.forward)


def fp4_weight(recipe: Recipe) -> Cast | None:
    """How a recipe's forward quantizes w, where that is in FP4; else None."""
    w = recipe.fprop.casts[1]
    return w if w is not None and w.of.family == "fp4" else None


def _fp4_recipe(recipe: str | Recipe) -> Recipe:
    found = recipes.get(recipe)
    if fp4_weight(found) is None:
        raise ValueError(
            f"PackedFP4Linear: expected an FP4 recipe such as 'nvfp4' or 'mxfp4', got {recipe!r}"
        )
    return found
