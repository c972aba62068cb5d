"""The devices, recipes, tolerances and comparisons that all tests share."""

from __future__ import annotations

import copy
import fcntl
import gc
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import narrowfloat as nf

# Relative error of one GEMM on Gaussian data, ||y - ref|| / ||ref||: .0023 is expected with two
# bf16 operands, .038 with two e4m3 ones, .059 with an e5m2 one, .135 in nvfp4 and .163 in mxfp4. Of
# a gradient in FP4, whose dy is rounded stochastically, about .18 and .20.
TOLERANCE = {
    "bf16": 0.01,
    "e4m3": 0.05,
    "e5m2": 0.08,
    "nvfp4": 0.16,
    "mxfp4": 0.20,
    "nvfp4 gradient": 0.21,
    "mxfp4 gradient": 0.24,
}


if "PYTEST_XDIST_WORKER" in os.environ:  # each worker's threads on every core would only wait
    torch.set_num_threads(1)


def why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    answer = nf.supported("fp8", "cuda")
    return None if answer else f"fp8 does not run here: {answer.reason}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs on the CPU and, marked gpu, on a GPU where there is one."""
    if request.param == "cuda" and (why := why_no_gpu()):
        pytest.skip(why)
    return request.param


@pytest.fixture
def cuda() -> str:
    """For tests of the GPU alone; mark them gpu."""
    if why := why_no_gpu():
        pytest.skip(why)
    return "cuda"


@pytest.fixture(params=["fp8", "nvfp4", "mxfp4"])
def recipe(request: pytest.FixtureRequest) -> str:
    """For cases with many combinations: one recipe of each family; see each_recipe."""
    return request.param


EVERY_RECIPE = [
    *nf.RECIPES.values(),
    nf.block_recipe("unlike", "mx", "row", "block_pow2"),
    nf.Recipe("w in bf16", nf.Gemm("e4m3", None), nf.Gemm("e5m2", None)),
    nf.Recipe("two formats of x", nf.Gemm("e5m2", "e4m3"), wgrad=nf.Gemm("e4m3", "e4m3")),
]


@pytest.fixture(params=EVERY_RECIPE, ids=str)
def each_recipe(request: pytest.FixtureRequest, device: str) -> nf.Recipe:
    """Each recipe of the package, and some of a user's own, where the device runs it."""
    skip_where_it_does_not_run(request.param, device)
    return request.param


def dtypes_for(recipe: nf.Recipe, *others: torch.dtype) -> tuple[torch.dtype, ...]:
    """fp32 and others: recipes share what an operand's dtype concerns, so that one of each family
    of kernels sees all of them."""
    return (torch.float32, *(others if recipe.name in ("fp8", "fp8_row", "nvfp4") else ()))


def kinds(recipe: str | nf.Recipe) -> tuple[str, str, str]:
    """TOLERANCE's names for y, dx and dw."""
    recipe = nf.RECIPES[recipe] if isinstance(recipe, str) else recipe
    found = []
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, name)
        if gemm.kind == "fp4":
            found.append(gemm.a.scaling + ("" if name == "fprop" else " gradient"))
        elif gemm.kind == "bf16":
            found.append("bf16")
        else:
            e5m2 = any(cast is not None and cast.element == "e5m2" for cast in gemm.casts)
            found.append("e5m2" if e5m2 else "e4m3")
    return found[0], found[1], found[2]


@pytest.fixture
def large_memory(cuda: str) -> Iterator[str]:
    """For tests of the GPU that take up to 30 GB: one at a time, whatever the number of workers."""
    with (pathlib.Path(tempfile.gettempdir()) / "narrowfloat_large_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if torch.cuda.mem_get_info()[0] < 30 << 30:
            pytest.skip("needs 30 GB of free GPU memory")
        yield cuda
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """What a test compiled does not count for the next one: Dynamo gives up on a function, here a
    layer's forward, after eight compilations."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _generators_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """A capture that fails leaves torch's generator of the device in it: every test after it in the
    process would fail too, when it draws. Such a test fails alone."""
    yield
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_initialized():
        return
    try:
        torch.rand(1, device="cuda")
    except RuntimeError:
        for index, generator in enumerate(torch.cuda.default_generators):
            new = torch.Generator(f"cuda:{index}")
            generator.graphsafe_set_state(new.graphsafe_get_state())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ends_of_training(recipe: str | nf.Recipe, device: str) -> tuple[float, float]:
    """Last losses of a small regression, as plain nn.Linear and converted to the recipe."""
    target = torch.randn(64, 64, device=device) * 0.2
    losses = []
    for converted in (False, True):
        torch.manual_seed(3)
        layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
        model = torch.nn.Sequential(*layers).to(device)
        if converted:
            nf.convert(model, recipe, head=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(60):
            x = torch.randn(128, 64, device=device)
            loss = ((model(x) - x @ target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[1]


def skip_where_it_does_not_run(recipe: Any, device: str) -> None:
    if not (answer := nf.supported(recipe, device)):
        pytest.skip(answer.reason)


def relative_error(a: torch.Tensor, ref: torch.Tensor) -> float:
    a, ref = a.double(), ref.double()
    return ((a - ref).norm() / ref.norm()).item()


def assert_close_as(
    a: torch.Tensor, ref: torch.Tensor, kind: str = "e4m3", spread: float = 1, what: str = ""
) -> None:
    """Within the format's error of ref, the norm too (a cosine alone would not see a scale).
    spread: room where there are few values."""
    assert a.shape == ref.shape, (what, a.shape, ref.shape)
    error, limit = relative_error(a, ref), TOLERANCE[kind] * spread
    assert error <= limit, f"{what}: relative error {error:.4f} > {limit}"
    ratio = (a.double().norm() / ref.double().norm()).item()
    assert abs(ratio - 1) <= limit, f"{what}: norm ratio {ratio:.4f}"


def assert_layer_is_close(
    made: nf.Linear,
    x: torch.Tensor,
    g: torch.Tensor | None = None,
    spread: float = 1,
) -> torch.Tensor:
    """Forward and backward of `made` at x: y and the gradients against fp64; returns y.

    g None means y.sum().backward(), whose gradient is an expanded one.
    """
    x = x.detach().requires_grad_()
    made.zero_grad(set_to_none=True)
    y = made(x)
    if g is None:
        y.sum().backward()
        g = torch.ones_like(y)
    else:
        y.backward(g)
    k, n = made.in_features, made.out_features
    x2, w, g2 = x.detach().double().reshape(-1, k), made.weight.detach().double(), g.double()
    g2 = g2.reshape(-1, n)
    ref = x2 @ w.t()
    if made.bias is not None:
        ref = ref + made.bias.detach().double()
        # summed unquantized: only the rounding to the bias's own dtype remains
        assert relative_error(made.bias.grad, g2.sum(0)) < 2**-8
    assert y.shape == (*x.shape[:-1], n) and y.is_contiguous() and y.dtype == x.dtype
    assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
    assert made.weight.grad.shape == (n, k) and made.weight.grad.dtype == made.weight.dtype
    results = (y.detach().reshape(-1, n), x.grad.reshape(-1, k), made.weight.grad)
    for a, right, kind, what in zip(
        results, (ref, g2 @ w, g2.t() @ x2), kinds(made.recipe), ("y", "dx", "dw"), strict=True
    ):
        assert_close_as(a, right, kind, spread, what)
    return y.detach()


def assert_autocast_is_a_cast(layer: nf.Linear, x: torch.Tensor) -> None:
    """In autocast's dtypes y is that of the cast x, and gradients have their tensors' dtypes."""
    for low in (torch.bfloat16, torch.float16):
        leaf = x.detach().clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast(x.device.type, dtype=low):
            y = layer(leaf)
        y.float().sum().backward()
        assert y.dtype == low
        assert leaf.grad.dtype == x.dtype and layer.weight.grad.dtype == layer.weight.dtype
        cast = nf.linear(leaf.detach().to(low), layer.weight, layer.bias, layer.recipe)
        assert_same_bits(y, cast)


def assert_all_ways_are_eager(layer: nf.Linear, x: torch.Tensor, g: torch.Tensor) -> None:
    """Checkpointed, compiled and without gradients: the same bits, gradients g of y included."""
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    ways = {
        "eager": layer,
        "reentrant": lambda t: checkpoint(layer, t, use_reentrant=True),
        "not reentrant": lambda t: checkpoint(layer, t, use_reentrant=False),
        "compiled": compiled,
    }
    results = []
    for call in ways.values():
        leaf = x.clone().requires_grad_()
        made = compiled if call is compiled else layer
        made.zero_grad()
        y = call(leaf)
        torch.manual_seed(5)  # of stochastic rounding
        y.backward(g)
        results.append((y, leaf.grad, made.weight.grad.clone(), made.bias.grad.clone()))
    for what, other in zip(ways, results, strict=True):
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b, what)
    with torch.no_grad():
        assert_same_bits(layer(x), results[0][0])
        assert_same_bits(compiled(x), results[0][0])
    with torch.inference_mode():
        assert_same_bits(layer(x), results[0][0])


def tensors_saved(layer: nf.Linear, x: torch.Tensor, *frozen: torch.Tensor) -> list[torch.Tensor]:
    """For the backward of layer(x), by a layer with a bias where those need no gradient."""
    found: list[torch.Tensor] = []
    for t in (x, layer.weight, layer.bias):
        t.requires_grad_(not any(t is f for f in frozen))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        layer(x)
    return found


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """call()'s graph and results; warmed up on a side stream first, as a capture needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def assert_same_bits(a: torch.Tensor, b: torch.Tensor, what: str = "") -> None:
    """Equal byte for byte; the message names the first coordinate that is not, and both values."""
    assert a.shape == b.shape and a.dtype == b.dtype, (what, a.shape, b.shape, a.dtype, b.dtype)
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    if a.numel() == 0:
        return
    size = a.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    differs = a.view(integer) != b.view(integer)
    if differs.any():
        at = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {a.numel()} elements differ, first at {at}: "
            f"{a.view(integer)[at]:#x} ({a[at].float():g}) and "
            f"{b.view(integer)[at]:#x} ({b[at].float():g})"
        )


# ---- long runs ----


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of marker fuzz run only where they are asked for by name."""
    if "fuzz" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("fuzz") is not None]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item.get_closest_marker("fuzz") is None]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row of each device that was fuzzed, of all workers together."""
    found: dict[str, list[int]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "fuzz" and report.when == "call":
                    row = found.setdefault(value[0], [0, 0])
                    row[0] += value[1]
                    row[1] += value[2]
    for device, (examples, failed) in found.items():
        row = {"bench": "fuzz", "device": device, "examples": examples, "failed": failed}
        terminalreporter.write_line(json.dumps(row))
        if out := os.environ.get("NARROWFLOAT_FUZZ_OUT"):
            with pathlib.Path(out).open("a") as file:
                file.write(json.dumps(row) + "\n")
