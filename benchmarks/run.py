"""What a subject has at hand, and that a failure of one row costs no other."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import measure
import record
import torch
from measure import Device
from torch import Tensor

BF16 = torch.bfloat16


class Run:
    """What a subject needs: options, device, where rows go, and what failed."""

    def __init__(self, options: argparse.Namespace, device: Device, out: record.Results) -> None:
        self.options, self.device, self.out = options, device, out
        self.recipe: str = options.recipe
        self.failures: list[str] = []

    def seconds(self, rows: int, default: float) -> float:
        """Measuring time of one of a subject's rows."""
        if not self.device.cuda and self.options.seconds is None:
            return 0.02
        return default if self.options.seconds is None else self.options.seconds / max(rows, 1)

    def shapes(self, defaults: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The defaults, or those of --shapes that have as many sizes; small ones on the CPU."""
        width = len(defaults[0])
        asked = [shape for shape in self.options.shapes or () if len(shape) == width]
        if self.options.shapes:
            return asked
        return list(defaults) if self.device.cuda else [(64, 32, 48)[:width]]

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A failure costs its own rows, not the rest of a run on a lent machine."""
        try:
            yield
        except Exception:
            self.failures.append(what)
            print(f"FAILED {what}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        finally:
            gc.collect()
            if self.device.cuda:
                torch.cuda.empty_cache()

    @functools.cached_property
    def copy_gbps(self) -> float:
        """Bandwidth of a device-to-device copy in this run, bytes read + written."""
        copy, moved = measure.copier(self.device)
        (times,) = measure.interleave(self.device, [copy], self.seconds(1, 0.5))
        return moved / statistics.median(times) / 1e6

    def take_quantize(
        self,
        kernel: str,
        shape: tuple[int, ...],
        calls: Sequence[Callable[[], Any]],
        moved: float,
        seconds: float,
    ) -> None:
        """A row of quantize: one call a set, captured, in turns with a copy of 2 GiB. moved: bytes
        that all of the calls must move."""
        copy, copy_bytes = measure.copier(self.device)
        ours = measure.captured(self.device, calls)
        times, copies = measure.interleave(self.device, [ours, copy], seconds)
        gbps = [moved / t / 1e6 for t in times]
        copy_gbps = [copy_bytes / t / 1e6 for t in copies]
        self.out.add(
            record.row(
                "quantize",
                kernel=kernel,
                rows=shape[0],
                cols=shape[1],
                gbps=statistics.median(gbps),
                copy_gbps=statistics.median(copy_gbps),
                ratio=measure.pairwise_ratio(copy_gbps, gbps),
            )
        )

    def randn(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, device=self.device.torch, dtype=BF16).requires_grad_(grad)
