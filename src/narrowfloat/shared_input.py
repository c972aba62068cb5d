"""An input that several layers read, quantized once: q, k, v read one x, and so do gate and up.

Nothing in a model says which of its layers do. So each layer's call notes which tensor it read, and
the next one that reads the same tensor tells the first: from then on that one has x quantized by an
operator of its own, keeps what it made at hand, and those behind it take it. What they compute is
the same bit for bit, since a tensor is quantized the same way by whichever operator does it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import ops
from .recipe import Recipe
from .reference.linear import Quantized
from .reference.tensor import SCALE
from .weight_cache import stream_and_capture

NONE = Quantized()


class Reader(Protocol):
    """A layer, for which it is noted whether one called after it read the same tensor."""

    shares_input: bool


class SharedInput(NamedTuple):
    """x [..., K], taken as [M,K], quantized once, as the operators take it; without codes where a
    GEMM reads x itself."""

    rows: Quantized  # x [M,K], for y
    columns: Quantized  # its transpose [K,M], for dw


class _Kept:
    """What was made of x: rows until the next x comes or x is gone, columns as long as a graph that
    saved them is there."""

    __slots__ = ("columns", "place", "rows", "taken")

    def __init__(self, taken: bool) -> None:
        self.taken = taken  # by another layer than the one that it was made for
        self.forget()

    def forget(self, _: Any = None) -> None:
        self.place: tuple[int, int] | None = None  # the stream and the capture it was made in
        self.rows = NONE
        self.columns: tuple[Any, ...] | None = None  # weak references

    def keep(self, made: SharedInput, place: tuple[int, int], with_columns: bool) -> None:
        self.place, self.rows = place, made.rows
        if with_columns:
            self.columns = tuple(None if t is None else weakref.ref(t) for t in made.columns)

    def made(self, place: tuple[int, int], with_columns: bool) -> SharedInput | None:
        """None if it is not there. On another stream it may not be written yet, nor in another
        capture."""
        if self.place != place:
            return None
        if not with_columns:
            return SharedInput(self.rows, NONE)
        if self.columns is None:
            return None
        columns = [None if ref is None else ref() for ref in self.columns]
        for ref, column in zip(self.columns, columns, strict=True):
            if ref is not None and column is None:  # the graph that had it is gone
                return None
        return SharedInput(self.rows, Quantized(*columns))


class _Note:
    """What a thread's last layer read. One object a thread, written in each call: it is cheaper
    than one a call."""

    __slots__ = ("dtype", "kept", "layer", "spec", "version", "x")

    def __init__(self) -> None:
        self.write(_nothing, _nothing, 0, torch.float32, 0, None)

    def write(
        self, x: Any, layer: Any, version: int, dtype: torch.dtype, spec: int, kept: _Kept | None
    ) -> None:
        self.x, self.layer = x, layer  # weak references; the layer is the first that read x
        self.version, self.dtype, self.spec, self.kept = version, dtype, spec, kept


def _nothing() -> None:
    return None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.note = _Note()


_thread = _Thread()


def take(
    x: Tensor, recipe: Recipe, dtype: torch.dtype, layer: Reader, dw: bool
) -> SharedInput | None:
    """x quantized for a layer, if another reads it too; else None: the layer's own call quantizes.

    dtype: x is cast to it first (autocast). layer: its `shares_input` is set here. dw: whether the
    columns are wanted.
    """
    spec = recipe.x_spec
    if spec == 0 or type(x) is not Tensor:  # a subclass may be anything
        return None
    try:
        version = x._version
    except RuntimeError:  # an inference tensor counts none
        return None
    note, again = _thread.note, False
    kept = note.kept
    if note.x() is x and (first := note.layer()) is not layer:
        again = note.version == version and note.spec == spec and note.dtype == dtype
        # one that was reverted to nn.Linear meanwhile has no such attribute
        if again and first is not None and not getattr(first, "shares_input", True):
            first.shares_input = True
    elif kept is not None and not kept.taken:
        first = note.layer()
        if getattr(first, "shares_input", False):
            first.shares_input = False
    if not again and not layer.shares_input:
        note.write(weakref.ref(x), weakref.ref(layer), version, dtype, spec, None)
        return None
    # What is saved there may be changed, or counted (a checkpoint compares what its forward and its
    # recomputation save), so there each layer saves what is its own.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    place = stream_and_capture(x)
    if again and kept is not None:
        kept.taken = True
        made = kept.made(place, dw)
        if made is not None:
            return made
    kept = _Kept(again)
    by = note.layer if again else weakref.ref(layer)
    # what the last one kept is freed before more is made
    note.write(weakref.ref(x, kept.forget), by, version, dtype, spec, kept)
    with torch.no_grad():
        made = quantized(x if x.dtype == dtype else x.to(dtype), recipe, dw)
    kept.keep(made, place, dw)
    return made


def quantized(x: Tensor, recipe: Recipe, dw: bool) -> SharedInput:
    """x quantized by an operator of its own, as `recipe` has it. dw: whether columns are wanted."""
    spec = recipe.x_spec if dw else recipe.x_rows_spec
    if spec == 0:
        return SharedInput(NONE, NONE)
    rows, rows_scales, columns, columns_scales, scales = ops.quantize_op(x, spec)
    (has_rows, of_rows, of_x), (has_columns, of_columns, of_columns_too) = recipe.x_sides
    made_rows = made_columns = NONE
    if has_rows:
        made_rows = Quantized(rows, rows_scales if of_rows else None, scales if of_x else None)
    if dw and has_columns:
        scale = scales[SCALE:] if of_columns_too else None
        made_columns = Quantized(columns, columns_scales if of_columns else None, scale)
    return SharedInput(made_rows, made_columns)
