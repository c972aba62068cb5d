"""How a time is taken: contenders in turn over rotating inputs, medians, and the limit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

L2_SAFE_BYTES = 200e6  # more than three times the L2 of an H200 (60 MB)
CHUNK_SECONDS = 0.25  # between two synchronizations, so that many runs are queued behind each other
CPU = torch.device("cpu")
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep, which nothing measured here launches


# Arithmetic


def pairwise_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of theirs[i] / ours[i]: what drifts in the card's clocks cancels within a pair."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"pairwise_ratio: expected as many times of one as of the other, got {len(ours)} "
            f"and {len(theirs)}"
        )
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def sets_for(set_bytes: float, free_bytes: float = math.inf, held_bytes: float = 0) -> int:
    """How many input sets to rotate: over L2_SAFE_BYTES in all and at least 4, unless that takes
    more than 256 or what one set holds in memory (`held_bytes`) leaves room for fewer in 60 % of
    the free memory."""
    wanted = min(max(4, math.ceil(L2_SAFE_BYTES / max(set_bytes, 1))), 256)
    room = 0.6 * free_bytes / max(held_bytes, set_bytes, 1)
    return max(1, int(min(wanted, room)))


def quantize_bytes(elements: int, rows: bool, columns: bool, itemsize: int = 2) -> int:
    """Least bytes to quantize with a fresh per-tensor scale: a read for amax, a read to quantize,
    and a byte an element for each orientation written."""
    return elements * (2 * itemsize + rows + columns)


class LayerReads(NamedTuple):
    """What quantizing a layer's operands moves at least."""

    reads: int  # of x and dy: with a scale that spans more than a block one more, for amax
    copies: int  # of each that are written
    of_w: int = 1  # reads in the forward
    blocks: int = 0  # copies with a scale each 128 elements


# Others are emulated on an H200, or not counted.
LAYER_BYTES = {
    "fp8": LayerReads(2, 2, of_w=2),
    "fp8_delayed": LayerReads(1, 2),
    "fp8_row": LayerReads(2, 2, of_w=2),
    "fp8_block": LayerReads(1, 2, blocks=2),
    "fp8_block_row_wgrad": LayerReads(2, 2, blocks=1),
    "fp8_block_bf16_wgrad": LayerReads(1, 1, blocks=1),
    "fp8_block_pow2": LayerReads(1, 2, blocks=2),
}


def layer_bytes(
    tokens: int,
    inputs: int,
    outputs: int,
    reused: bool,
    itemsize: int = 2,
    recipe: str = "fp8",
) -> float:
    """Least bytes that quantizing costs a linear layer, forward + backward.

    fp8, fp8_row: x 6 an element (amax, quantize, both orientations), dy 6, w 5 in the forward and 3
    for the transposed copy that the backward makes with the same scale; with reused weights none
    for w. fp8_delayed reads once: x and dy 4 each, w 3 and 3. By blocks x and dy are read once: 4
    each, where wgrad is in bf16 3, where it is by row 6, w 3 and 3; a scale of 4 bytes for 128
    elements comes on top of each copy by blocks.
    """
    reads, copies, of_w, blocks = LAYER_BYTES[recipe]
    each = reads * itemsize + copies + blocks * 4 / 128
    total = tokens * (inputs + outputs) * each
    if not reused:
        total += outputs * inputs * ((of_w * itemsize + 1) + (itemsize + 1))
    return total


def limit_ms(gemm_ms: float, moved_bytes: float, copy_gbps: float) -> float:
    """The GEMM kernels' time plus the bytes at copy bandwidth (GB/s of bytes read + written)."""
    return gemm_ms + moved_bytes / copy_gbps / 1e6


class Kernel(NamedTuple):
    start_us: float
    us: float
    name: str


def is_gemm(name: str) -> bool:
    """Whether a kernel inside our layer belongs to a GEMM: neither one of narrowfloat's own nor one
    of PyTorch's (fills, copies), nor a memory operation. What is left is cuBLASLt's."""
    lower = name.lower()
    others = ("narrowfloat", "at::", "at_cuda", "memcpy", "memset", MARKER, "triton")
    return not any(other in lower for other in others)


def segments(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Kernels in order of their start, cut at each marker; what precedes the first is dropped."""
    cut: list[list[Kernel]] = []
    for kernel in sorted(kernels):
        if MARKER in kernel.name:
            cut.append([])
        elif cut:
            cut[-1].append(kernel)
    return cut


def gemm_ms(kernels: Iterable[Kernel], contenders: int, iterations: int = 1) -> float:
    """Median over rounds of the first contender's GEMM kernels, in ms an iteration.

    A marker precedes each contender's turn; `iterations` is what one turn holds. The first third
    of the rounds, in which the clocks settle, is not counted.
    """
    ours = segments(kernels)[::contenders]
    ours = ours[len(ours) // 3 :]
    sums = [sum(k.us for k in turn if is_gemm(k.name)) for turn in ours]
    if not sums or min(sums) <= 0:
        raise RuntimeError(
            f"gemm_ms: expected GEMM kernels in each of {len(sums)} profiled turns, got "
            f"{sorted({k.name[:60] for turn in ours for k in turn})} (does the profiler work here?)"
        )
    return statistics.median(sums) / 1e3 / iterations


# Timing


def _nothing(_: int) -> None:
    return None


@dataclass
class Contender:
    """run(i) is timed, reset(i) is not; i counts the rounds, and rotation is the contender's."""

    run: Callable[[int], Any]
    reset: Callable[[int], Any] = _nothing


class Device:
    """The clock of a device: events on a GPU, the host's counter on the CPU."""

    def __init__(self, name: str) -> None:
        self.cuda = name == "cuda"
        self.torch = torch.device("cuda", torch.cuda.current_device()) if self.cuda else CPU

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.torch)

    def sets(self, set_bytes: float, held_bytes: float) -> int:
        """sets_for with this device's free memory; two on the CPU, where no time counts."""
        if not self.cuda:
            return 2
        torch.cuda.empty_cache()
        return sets_for(set_bytes, torch.cuda.mem_get_info(self.torch)[0], held_bytes)

    def marks(self, count: int) -> list[Any]:
        """Events, each recorded once: the first record creates the event, which is not to be
        timed."""
        if not self.cuda:
            return [0.0] * count
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in events:
            event.record()
        return events

    def stamp(self, marks: list[Any], index: int) -> None:
        if self.cuda:
            marks[index].record()
        else:
            marks[index] = time.perf_counter()

    def between(self, start: Any, end: Any) -> float:  # ms
        if self.cuda:
            return float(start.elapsed_time(end))
        return float(end - start) * 1e3


def interleave(
    device: Device,
    contenders: Sequence[Contender],
    seconds: float,
    sets: int = 1,
) -> list[list[float]]:
    """Times in ms, one list a contender, of rounds in which each runs once, in the order given.

    Every contender first sees each of `sets` input sets, then the clocks are warmed for a fifth of
    the seconds. Runs are queued behind each other, in chunks; a chunk's first round, which finds
    the GPU idle, is not counted. At least 10 rounds are.
    """

    def turn(i: int) -> None:
        for contender in contenders:
            contender.run(i)
            contender.reset(i)

    for i in range(max(sets, 2)):
        turn(i)
    device.synchronize()
    began, warmed = time.perf_counter(), 0
    while warmed < 2 or time.perf_counter() - began < 0.2 * seconds:
        turn(warmed)
        device.synchronize()
        warmed += 1
    each = (time.perf_counter() - began) / warmed
    rounds = min(max(int(CHUNK_SECONDS / each), 5), 64)
    width = 2 * len(contenders)
    marks = device.marks(rounds * width)
    device.synchronize()

    times: list[list[float]] = [[] for _ in contenders]
    began, i = time.perf_counter(), 0
    while len(times[0]) < 10 or time.perf_counter() - began < 0.8 * seconds:
        turn(i)
        for r in range(rounds):
            i += 1
            for c, contender in enumerate(contenders):
                device.stamp(marks, r * width + 2 * c)
                contender.run(i)
                device.stamp(marks, r * width + 2 * c + 1)
                contender.reset(i)
        i += 1
        device.synchronize()
        for r in range(rounds):
            for c, kept in enumerate(times):
                start = r * width + 2 * c
                kept.append(device.between(marks[start], marks[start + 1]))
    return times


def captured(device: Device, calls: Sequence[Callable[[], Any]]) -> Contender:
    """One graph that makes every call once; what the calls return lives as long as it, so that
    each writes memory of its own. On the CPU the calls themselves."""
    if not device.cuda:

        def run(_: int) -> None:
            for call in calls:
                call()

        return Contender(run)
    stream = torch.cuda.Stream(device.torch)
    stream.wait_stream(torch.cuda.current_stream(device.torch))
    with torch.cuda.stream(stream):
        for call in [*calls[:3], *calls]:
            call()
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]

    def replay(_: int, kept: list[Any] = kept) -> None:
        graph.replay()

    return Contender(replay)


def profiled_gemm_ms(
    device: Device, contenders: Sequence[Contender], rounds: int, iterations: int = 1
) -> float | None:
    """gemm_ms of the first contender, its rounds shared with the others as when it was timed (the
    clocks depend on what runs beside). None on the CPU, which has no kernels."""
    if not device.cuda:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(rounds):
            for contender in contenders:
                torch.cuda._sleep(100)
                contender.run(i)
                contender.reset(i)
        device.synchronize()
    kernels = [
        Kernel(event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return gemm_ms(kernels, len(contenders), iterations)


def copier(device: Device, size: int = 2 * 2**30) -> tuple[Contender, int]:
    """A device-to-device copy of `size` bytes, and how many bytes it moves, read + written."""
    size = size if device.cuda else 2**22
    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device.torch)
    target = torch.empty_like(source)
    return Contender(lambda _: target.copy_(source)), 2 * size


def host_us(run: Callable[[], Any], reset: Callable[[], Any], count: int, device: Device) -> float:
    """Host time of run() in us, mean of `count` calls that are queued without synchronizing."""
    device.synchronize()
    spent = 0
    for _ in range(count):
        began = time.perf_counter_ns()
        run()
        spent += time.perf_counter_ns() - began
        reset()
    device.synchronize()
    return spent / count / 1e3
