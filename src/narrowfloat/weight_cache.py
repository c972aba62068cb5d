"""How long a quantized weight may be reused: reuse_weights() and its cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _binary, ops
from .formats import TENSOR
from .recipe import Recipe
from .reference.linear import Quantized
from .reference.tensor import SCALE
from .spec import Quantize


class CachedWeight(NamedTuple):
    """A weight [N,K] quantized once, as the operators take it; None for a GEMM that reads the
    weight itself.

    They are written when made and never again, so a graph of autograd that saved them can be
    run whenever it likes.
    """

    rows: Quantized | None  # w [N,K], for y
    columns: Quantized | None  # its transpose [K,N], for dx

    @property
    def rows_arguments(self) -> tuple[Tensor | None, ...]:
        """What linear_forward takes after its spec."""
        return () if self.rows is None else (None, None, None, *self.rows)


def quantized(w: Tensor, spec: int) -> CachedWeight:
    """w [N,K] along both contractions, as a packed spec.Quantize says; one read of w where the
    kernels can."""
    made = ops.quantize_op(w, spec)
    choices = Quantize.unpack(spec)
    found: list[Quantized | None] = []
    for side, (cast, wanted) in enumerate(
        ((choices.rows, choices.want_rows), (choices.columns, choices.want_columns))
    ):
        if cast is None or not wanted:
            found.append(None)
            continue
        codes, scales = made[2 * side : 2 * side + 2]
        scale = made[4][SCALE * side : SCALE * (side + 1)] if cast.of.tensor_scale else None
        found.append(Quantized(codes, None if cast.of is TENSOR else scales, scale))
    return CachedWeight(found[0], found[1])


class WeightCache:
    """The quantized weights of one reuse_weights() context. Linear leaves it out of copies and
    pickles of itself."""

    def __init__(self) -> None:
        self.open = 0  # contexts entered and not left
        self._cached: dict[int, tuple[Tensor, tuple[Any, ...], Tensor, CachedWeight]] = {}

    def get(self, w: Tensor, recipe: Recipe) -> CachedWeight | None:
        """w quantized as `recipe` wants it, made now if what is cached does not fit; None where
        nothing may be cached."""
        how = recipe.cached_spec
        if how == 0 or self.open == 0 or torch.compiler.is_compiling() or w.is_inference():
            return None  # an inference tensor counts no versions
        found = self._cached.get(id(w))
        if found is None and not isinstance(w, nn.Parameter):
            return None  # computed anew for each forward (a parametrization): it would only pile up
        # What is cached was written on one stream, in one capture or in none; elsewhere its
        # contents may not be there yet (or, after a capture, not before the replay).
        key = (w._version, w.data_ptr(), w.dtype, how, *stream_and_capture(w))
        if found is not None and found[0] is w and found[1] == key:
            return found[3]
        with torch.inference_mode(False), torch.no_grad():
            # The alias keeps the address from being given to other memory while the key names it.
            alias = w.detach()
            cached = quantized(alias, how)
        self._cached[id(w)] = (w, key, alias, cached)
        return cached

    def drop(self) -> None:
        self._cached.clear()


def stream_and_capture(w: Tensor) -> tuple[int, int]:
    """The current stream of w's device and its capture; zeros where there is none."""
    if w.device.type != "cuda" or _binary.module is None:
        return (0, 0)
    stream = torch._C._cuda_getCurrentRawStream(w.device.index)
    return (stream, _binary.module.capture_id(stream))


@contextmanager
def reuse_weights(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, each weight of model's narrowfloat Linears is quantized once, not at each forward.

    For gradient accumulation: enter it around the forwards and backwards of one optimizer step.
    Both orientations of each weight are kept in FP8 (2 bytes an element, and its scales) until the
    context is left, an optimizer steps, or the weight's version changes (any in-place operation).
    Writes that PyTorch does not count, those through `.data`, are not seen: leave the context
    first. A weight that is computed at each forward (a parametrization) is not cached, nor is what
    GEMMs in FP4 or with delayed scaling read: it is quantized at each forward as outside. Code
    under torch.compile and modules that are called from several streams quantize as outside the
    context (again for each stream); a capture has its own copies.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "weight_cache")]
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
