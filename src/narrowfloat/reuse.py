"""Decides how long a quantized weight may be reused: reuse_weights() and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _binary, ops
from .mixed import HeldWeight
from .recipe import AnyRecipe
from .settings import BLOCK_COLUMNS_SHIFT


class Quantized(NamedTuple):
    """A tensor along one contraction, as an operator takes it; None where its kind has none."""

    codes: Tensor | None
    block_scales: Tensor | None
    scale: Tensor | None  # of the tensor


NOTHING = Quantized(None, None, None)


class Held(NamedTuple):
    """A weight [N,K] quantized once, as the operators of its recipe take it; NOTHING for a product
    that reads the weight itself.

    They are written when made and never again, so a graph of autograd that saved them can be
    run whenever it likes.
    """

    rows: Quantized = NOTHING  # w [N,K], for y
    columns: Quantized = NOTHING  # its transpose [K,N], for dx


NOT_HELD = Held()


def _fp8(w: Tensor, rows: int | None, columns: int | None) -> Held:
    if rows is not None and columns is not None and rows != columns:  # formats
        return Held(_fp8(w, rows, None).rows, _fp8(w, None, columns).columns)
    code = columns if rows is None else rows
    by_rows, by_columns, scale = ops.quantize_op(w, code, rows is not None, columns is not None)
    return Held(
        NOTHING if rows is None else Quantized(by_rows, None, scale),
        NOTHING if columns is None else Quantized(by_columns, None, scale),
    )


def _block(w: Tensor, rows: int | None, columns: int | None) -> Held:
    settings = (rows or 0) | (columns or 0) << BLOCK_COLUMNS_SHIFT
    by_rows, rows_scales, by_columns, columns_scales = ops.block_quantize_op(w, settings)
    return Held(
        NOTHING if rows is None else Quantized(by_rows, rows_scales, None),
        NOTHING if columns is None else Quantized(by_columns, columns_scales, None),
    )


_QUANTIZE = {"fp8": _fp8, "block": _block}


def quantized(w: Tensor, how: HeldWeight) -> Held:
    """w [N,K] along both contractions, as `how` says."""
    rows, columns = how
    if rows is not None and columns is not None and rows[0] == columns[0]:  # one read of w
        return _QUANTIZE[rows[0]](w, rows[1], columns[1])
    return Held(
        NOTHING if rows is None else _QUANTIZE[rows[0]](w, rows[1], None).rows,
        NOTHING if columns is None else _QUANTIZE[columns[0]](w, None, columns[1]).columns,
    )


class WeightCache:
    """The quantized weights of one reuse_weights() context. Linear leaves it out of copies and
    pickles of itself."""

    def __init__(self) -> None:
        self.open = 0  # contexts entered and not left
        self._held: dict[int, tuple[Tensor, tuple[Any, ...], Tensor, Held]] = {}

    def get(self, w: Tensor, recipe: AnyRecipe) -> Held | None:
        """w quantized as `recipe` wants it, made now if what is held does not fit; None where
        nothing may be held."""
        how = recipe.weight
        if how is None or self.open == 0 or torch.compiler.is_compiling() or w.is_inference():
            return None  # an inference tensor counts no versions
        # What is held was written on one stream, in one capture or in none; elsewhere its
        # contents may not be there yet (or, after a capture, not before the replay).
        key = (w._version, w.data_ptr(), w.dtype, how, *_stream_and_capture(w))
        found = self._held.get(id(w))
        if found is not None and found[0] is w and found[1] == key:
            return found[3]
        if not isinstance(w, nn.Parameter):
            return None  # computed anew for each forward (a parametrization): it would only pile up
        with torch.inference_mode(False), torch.no_grad():
            # The alias keeps the address from being given to other memory while the key names it.
            alias = w.detach()
            held = quantized(alias, how)
        self._held[id(w)] = (w, key, alias, held)
        return held

    def drop(self) -> None:
        self._held.clear()


def _stream_and_capture(w: Tensor) -> tuple[int, int]:
    if w.device.type != "cuda" or _binary.module is None:
        return (0, 0)
    stream = torch._C._cuda_getCurrentRawStream(w.device.index)
    return (stream, _binary.module.capture_id(stream))


@contextmanager
def reuse_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, each weight of model's narrowfloat Linears is quantized once, not at each forward.

    For gradient accumulation: enter it around the forwards and backwards of one optimizer step.
    Both orientations of each weight are held in FP8 (2 bytes an element, and its scales) until the
    context is left, an optimizer steps, or the weight's version changes (any in-place operation).
    Writes that PyTorch does not count, those through `.data`, are not seen: leave the context
    first. A weight that is computed at each forward (a parametrization) is not held, nor is what
    products in FP4, with scales from the steps before or with a single operand in bf16 read: it is
    quantized at each forward as outside. Code under torch.compile and modules that are called from
    several streams quantize as outside the context (again for each stream); a capture holds its own
    copies.
    """
    from .modules import Linear

    layers = [module for module in model.modules() if isinstance(module, Linear)]
    if not layers:
        raise ValueError(
            f"reuse_weights: expected a model with narrowfloat Linear layers, got "
            f"{type(model).__name__} without any (call narrowfloat.convert(model) first)"
        )
    cache = next((m.weight_cache for m in layers if m.weight_cache is not None), None)
    cache = cache or WeightCache()
    mine = [module for module in layers if module.weight_cache is None]
    for module in mine:
        module.weight_cache = cache
    cache.open += 1
    hook = register_optimizer_step_post_hook(lambda *_: cache.drop())
    try:
        yield model
    finally:
        hook.remove()
        cache.open -= 1
        for module in mine:
            module.weight_cache = None
        if cache.open == 0:
            cache.drop()
