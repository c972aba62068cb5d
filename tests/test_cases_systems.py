"""Public failures of devices, streams, graphs, memory and installs do not happen: the kind
"systems" (O-59 to O-70), O-73, O-86, O-87, O-91, O-92, O-96 and O-97; CASES.md tells of each."""

from __future__ import annotations

import copy
import gc
import math
import os
import pathlib
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from conftest import (
    EVERY_RECIPE,
    TOLERANCE,
    assert_close_as,
    assert_same_bits,
    kinds,
    relative_error,
    skip_where_it_does_not_run,
)
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowfloat as nf
from narrowfloat import formats, ops, support
from narrowfloat.spec import DW, NEED_DX, SAVE_X
from narrowfloat.w4a16 import PackedFP4Linear, fp4_weight_matmul_op

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SRC = str(pathlib.Path(nf.__file__).parents[1])


# without random bits, and whose calls do not change what the next ones give
REPEATED = [r for r in EVERY_RECIPE if not (r.draws_dx or r.draws_dw or r.delayed)]


def layer(
    recipe: str | nf.Recipe, k: int, n: int, device: str | None = None, dtype=BF16
) -> nf.Linear:
    return nf.Linear(k, n, device=device, dtype=dtype, recipe=recipe)


def rounded_to_nearest(recipe: str) -> nf.Recipe:
    """Without the random bits, which graphs that replay at once would take from one generator."""
    return (
        nf.RECIPES[recipe] if recipe == "fp8" else nf.fp4_recipe(recipe, recipe, True, True, False)
    )


def step(made, x: Tensor, g: Tensor, seed: int | None = 0) -> list[Tensor]:
    """[y, dx, dw, db] without touching .grad; the same bits each time, but with no seed."""
    leaf = x.detach().requires_grad_()
    y = made(leaf)
    if seed is not None:
        torch.manual_seed(seed)
    return [y.detach(), *torch.autograd.grad(y, [leaf, made.weight, made.bias], g)]


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": SRC, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# several devices


@pytest.mark.gpu
def test_o59_a_device_that_is_not_the_current_one(cuda, recipe):
    """O-59: cuda:1 while cuda:0 is current: right, and cuda:0 neither used nor made current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    torch.cuda.set_device(0)
    base = layer(recipe, 64, 48)
    x, g = torch.randn(24, 64, dtype=BF16), torch.randn(24, 48, dtype=BF16)
    results = []
    try:
        for current, there in ((0, 1), (0, 0), (1, 1), (1, 0)):
            torch.cuda.set_device(current)
            other = 1 - there
            made = copy.deepcopy(base).to(f"cuda:{there}")
            xd, gd = x.to(f"cuda:{there}"), g.to(f"cuda:{there}")
            before = torch.cuda.memory_allocated(other)
            torch.cuda.reset_peak_memory_stats(other)
            results.append(step(made, xd, gd))
            assert all(t.device.index == there for t in results[-1])
            assert torch.cuda.max_memory_allocated(other) == before
            assert torch.cuda.current_device() == current
            torch.cuda.synchronize(there)
    finally:
        torch.cuda.set_device(0)
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert_same_bits(a, b)


@pytest.fixture
def cards(monkeypatch):
    """Pretends that CUDA devices of these capabilities are here; fake tensors stand on them."""

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(support._binary, "problem", None)
        monkeypatch.setattr(support._binary, "module", None)  # as if compiled for every chip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda device=0: capabilities[torch.device(device).index or 0],
        )
        monkeypatch.setattr(support, "_ready", {})

    # a fake tensor on a card would touch the card
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *_: None)
    return pretend


def fake_operands(index: int) -> tuple[FakeTensorMode, Tensor, Tensor]:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(8, 16, device=f"cuda:{index}")
        w = torch.empty(32, 16, device=f"cuda:{index}")
    return mode, x, w


@pytest.mark.filterwarnings("ignore::narrowfloat.support.EmulationWarning")
@pytest.mark.parametrize("order", [((9, 0), (8, 0)), ((8, 0), (9, 0)), ((7, 5), (12, 0))])
def test_o60_each_device_is_asked_for_itself(cards, order, recipe):
    """O-60: an older card beside one with FP8 changes nothing for the latter, nor one with FP4
    beside one without."""
    operands = [fake_operands(index) for index in range(2)]
    cards(*order)
    for index, capability in enumerate(order):
        good = capability >= (8, 9)
        for name in (index, f"cuda:{index}", torch.device("cuda", index)):
            answer = nf.supported(recipe, name)
            assert answer.ok == bool(answer) == good
            native = recipe == "fp8" or capability >= (10, 0)
            assert answer.how == (("native" if native else "emulation") if good else "no")
        mode, x, w = operands[index]
        assert x.device == torch.device("cuda", index)
        if good:
            with mode:
                assert nf.linear(x, w, None, recipe).shape == (8, 32)
        else:
            with mode, pytest.raises(NotImplementedError, match=f"{recipe}, got cuda:{index}"):
                nf.linear(x, w, None, recipe)


@pytest.mark.parametrize("capability", [(8, 0), (7, 5), (8, 6), (6, 1), (8, 7)])
def test_o92_an_unsupported_architecture_is_named(cards, capability, recipe):
    """O-92: recipe, the sm found and the supported ones, at the first call, before any launch."""
    mode, x, w = fake_operands(0)
    cards(capability)
    answer = nf.supported(recipe, "cuda")
    assert not answer
    calls = [lambda: nf.linear(x, w, None, recipe), lambda: nf.matmul(x, w.t(), recipe)]
    if recipe == "fp8":
        calls += [
            lambda: nf.fp8_linear_forward(x, w),
            lambda: nf.fp8_linear_backward(x.new_empty(8, 32), x, w),
        ]
    else:
        calls += [lambda: nf.quantize(x, recipe)]
    if recipe == "nvfp4":
        calls += [
            lambda: nf.fp4_matmul(x, w.t()),
            lambda: nf.fp4_matmul_backward_A(x.new_empty(8, 32), w.t()),
            lambda: nf.fp4_matmul_backward_B(x, x.new_empty(8, 32)),
            lambda: nf.fp4_quantize(x),
        ]
    for call in calls:
        with mode, pytest.raises(NotImplementedError) as caught:
            call()
        for word in (recipe, f"sm_{capability[0]}{capability[1]}", "sm_89", "sm_90", "sm_120"):
            assert word in str(caught.value), word
            assert word in answer.reason, word


@pytest.mark.parametrize("name", nf.RECIPES)
def test_o92_every_recipe_says_so(cards, name):
    cards((8, 6))
    answer = nf.supported(name, 0)
    assert not answer
    for word in (name, "sm_86", "sm_89", "sm_90", "sm_120"):
        assert word in answer.reason, word


@pytest.mark.filterwarnings("ignore::narrowfloat.support.EmulationWarning")
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_o92_a_supported_architecture_is_taken(cards, capability, recipe):
    """O-92: and every architecture of the table runs."""
    mode, x, w = fake_operands(0)
    cards(capability)
    native = recipe == "fp8" or capability >= (10, 0)
    assert nf.supported(recipe, "cuda").how == ("native" if native else "emulation")
    with mode:
        assert nf.linear(x, w, None, recipe).device == x.device


def test_emulation_says_so_once(cards) -> None:
    """By kind and device; a second recipe of the kind is quiet."""
    cards((9, 0))
    device = torch.device("cuda", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for recipe in ("mxfp8", "mxfp8", "fp8_block", "fp8_row", "fp8_block_pow2"):
            support.require(nf.RECIPES[recipe], device)
        support.require(nf.block_recipe("another", "mx", "bf16", "mx"), device)
    assert [w.category for w in caught] == [support.EmulationWarning]
    assert "recipe mxfp8 on cuda:0" in str(caught[0].message)


def test_o66_mixed_devices_are_named(recipe):
    """O-66: the operand on another device is named, with both devices."""
    x, w, bias = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
    with pytest.raises(ValueError, match="w on cpu.*meta"):
        nf.linear(x, w.to("meta"), None, recipe)
    with pytest.raises(ValueError, match="bias on cpu.*meta"):
        nf.linear(x, w, bias.to("meta"), recipe)
    with pytest.raises(ValueError, match="meta"):
        nf.matmul(x, w.t().to("meta"), recipe)


def test_o66_scales_on_another_device_are_named():
    """O-66: a scale or a quantized operand on another device is named, with both devices."""
    x, w = torch.randn(8, 16), torch.randn(32, 16)
    with pytest.raises(ValueError, match="meta"):
        nf.fp8_linear_backward(torch.randn(8, 32), x, w.to("meta"))
    with pytest.raises(ValueError, match="meta"):
        nf.fp8_linear_backward(torch.randn(8, 32).to("meta"), x, w)
    a, b = nf.quantize(x), nf.quantize(w)
    with pytest.raises(ValueError, match="a_scale on cpu.*meta"):
        ops.scaled_mm(a.data, b.data, a.scale.to("meta"), b.scale)
    with pytest.raises(ValueError, match="b_scale on cpu.*meta"):
        ops.scaled_mm(a.data, b.data, a.scale, b.scale.to("meta"))
    with pytest.raises(ValueError, match="b on cpu.*meta"):
        ops.scaled_mm(a.data, b.data.to("meta"), a.scale, b.scale)


def test_o66_mixed_devices_where_only_shapes_are_computed(recipe):
    """O-66: an x on meta does not hide that the weight is elsewhere."""
    x, w = torch.randn(8, 16, device="meta"), torch.randn(32, 16)
    with pytest.raises(ValueError, match="w on meta.*cpu"):
        nf.linear(x, w, None, recipe)
    with pytest.raises(ValueError, match="meta"):
        layer(recipe, 16, 32, dtype=F32)(x)


@pytest.mark.gpu
def test_o66_mixed_devices_with_a_gpu(cuda, recipe):
    """O-66: the same between the CPU and a GPU; the CPU alone works."""
    x, w, bias = torch.randn(64, 64), torch.randn(32, 64), torch.randn(32)
    with pytest.raises(ValueError, match="w on cpu.*cuda"):
        nf.linear(x, w.to(cuda), None, recipe)
    with pytest.raises(ValueError, match="w on cuda.*cpu"):
        nf.linear(x.to(cuda), w, None, recipe)
    with pytest.raises(ValueError, match="bias on cuda.*cpu"):
        nf.linear(x.to(cuda), w.to(cuda), bias, recipe)
    assert_close_as(nf.linear(x, w, bias, recipe), x @ w.t() + bias, kinds(recipe)[0])


@pytest.mark.gpu
def test_o66_scales_on_the_cpu_are_named(cuda):
    """O-66: what was quantized or saved on one device is refused on another, by name."""
    x, w = torch.randn(8, 16), torch.randn(32, 16)
    with pytest.raises(ValueError, match=r"cuda|cpu"):
        nf.fp8_linear_backward(torch.randn(8, 32), x.to(cuda), w.to(cuda))
    a, b = nf.quantize(x.to(cuda)), nf.quantize(w.to(cuda))
    with pytest.raises(ValueError, match="a_scale on cuda.*cpu"):
        ops.scaled_mm(a.data, b.data, a.scale.cpu(), b.scale)
    recipe = rounded_to_nearest("nvfp4")
    saved = ops.linear_forward(x.to(cuda), w.to(cuda), None, recipe.forward_spec | SAVE_X)[1:]
    dy, names = torch.randn(8, 32, device=cuda), ("x_columns", "x_columns_scales", "scales")
    for i, name in enumerate(names):
        moved = [t.cpu() if j == i else t for j, t in enumerate(saved)]
        with pytest.raises(ValueError, match=f"expected {name} on cuda.*cpu"):
            ops.linear_backward(
                dy, *moved, w.to(cuda), None, 16, recipe.backward_spec | NEED_DX | DW[F32]
            )


def test_o66_the_cpu_alone_works(recipe):
    """O-66: a CPU-only module call is served by the reference kernels."""
    made = layer(recipe, 16, 32, dtype=F32)
    assert nf.supported(recipe, "cpu").how == "reference"
    x = torch.randn(8, 16, requires_grad=True)
    made(x).sum().backward()
    assert x.grad.any() and made.weight.grad.any()


# streams and graphs


@pytest.mark.gpu
def test_o61_other_streams(cuda, recipe):
    """O-61: on a side stream the layer waits for what was written there, 100 of 100 times."""
    made = layer(recipe, 256, 128, cuda)
    g = torch.ones(64, 128, device=cuda, dtype=BF16)
    values = [1.0 + i / 4 for i in range(5)]
    right = [step(made, torch.full((64, 256), v, device=cuda, dtype=BF16), g) for v in values]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for i in range(100):
        with torch.cuda.stream(streams[i % 4]):
            x = torch.zeros(64, 256, device=cuda, dtype=BF16)
            torch.cuda._sleep(1_000_000)  # about .5 ms
            x.fill_(values[i % 5])
            result = step(made, x, g)
        streams[i % 4].synchronize()
        for a, b in zip(result, right[i % 5], strict=True):
            assert torch.equal(a, b), i


@pytest.mark.gpu
def test_o61_reused_weights_on_other_streams(cuda):
    """O-61: a weight cached on one stream is not read on another before it is written."""
    made = nf.FP8Linear(256, 128, device=cuda, dtype=BF16)
    g = torch.ones(64, 128, device=cuda, dtype=BF16)
    x = torch.randn(64, 256, device=cuda, dtype=BF16)
    right = step(made, x, g)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with nf.reuse_weights(made):
            with torch.cuda.stream(first):
                torch.cuda._sleep(20_000_000)
                step(made, x, g)
            with torch.cuda.stream(second):
                result = step(made, x, g)
            second.synchronize()
            for a, b in zip(result, right, strict=True):
                assert torch.equal(a, b)
        torch.cuda.synchronize()


def captured(made, x: Tensor, g: Tensor, reuse: bool = False):
    """(graph, results of its replay); warmed up on a side stream first, as capture needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(made, x, g)
        if reuse:
            with nf.reuse_weights(made):
                step(made, x, g)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if reuse:
        with nf.reuse_weights(made), torch.cuda.graph(graph):
            results = step(made, x, g, seed=None)
    else:
        with torch.cuda.graph(graph):
            results = step(made, x, g, seed=None)
    return graph, results


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """With the random bits of step()."""
    torch.manual_seed(0)
    graph.replay()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(64, 256, 128), (33, 100, 65)])
def test_o62_a_graph_owns_its_workspace(cuda, recipe, m, k, n):
    """O-62: replays are right, and write nothing else, after everything else was freed."""
    made = layer(recipe, k, n, cuda)
    x = torch.randn(m, k, device=cuda, dtype=BF16)
    g = torch.randn(m, n, device=cuda, dtype=BF16)
    graph, results = captured(made, x, g)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), 7, dtype=torch.uint8, device=cuda) for _ in range(32)]
    for i in range(100):
        torch.manual_seed(i + 1)
        x.normal_()
        g.normal_()
        replay(graph)
        if i % 10 == 0:
            for a, b in zip(results, step(made, x, g), strict=True):
                assert_same_bits(a, b, f"replay {i}")
    assert all(bool((t == 7).all()) for t in others)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [256, 1024])
def test_graphs_replayed_beside_each_other(cuda, recipe, size):
    """Graphs share nothing: three replay at once on streams of their own beside an eager layer,
    each right each time. Their grids meet at barriers, and at 1024 do not fit together."""
    nearest = rounded_to_nearest(recipe)
    layers = [nf.Linear(size, size, device=cuda, dtype=BF16, recipe=nearest) for _ in range(4)]
    xs = [torch.randn(size, size, device=cuda, dtype=BF16) for _ in layers]
    gs = [torch.randn(size, size, device=cuda, dtype=BF16) for _ in layers]
    right = [step(*operands) for operands in zip(layers, xs, gs, strict=True)]
    graphs = [captured(*operands) for operands in zip(layers[:3], xs[:3], gs[:3], strict=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for i in range(20):
        for _, results in graphs:
            for r in results:
                r.fill_(float("nan"))
        torch.cuda.synchronize()
        for (graph, _), stream in zip(graphs, streams[:3], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[3]):
            eager = step(layers[3], xs[3], gs[3])
        torch.cuda.synchronize()
        for got, want in zip([*(r for _, r in graphs), eager], right, strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), i


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", REPEATED, ids=str)
def test_o61_o62_o68_streams_graphs_and_no_sync(cuda: str, recipe: nf.Recipe) -> None:
    """O-61: another stream's input; O-62: a captured graph replays right after its memory was
    given to others; O-68: the host waits for nothing."""
    skip_where_it_does_not_run(recipe, cuda)
    made = layer(recipe, 256, 192, cuda)
    x = torch.randn(128, 256, device=cuda, dtype=BF16)
    g = torch.randn(128, 192, device=cuda, dtype=BF16)
    want = [t.clone() for t in step(made, x, g)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(made, x, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    value = x.clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(20):
            x.zero_()
            torch.cuda._sleep(1_000_000)
            x.copy_(value)
            assert_same_bits(made(x), want[0])
    torch.cuda.synchronize()
    graph, results = captured(made, x, g)
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7, device=cuda) for _ in range(8)]
    for _ in range(20):
        graph.replay()
    for a, b in zip(results, want, strict=True):
        assert_same_bits(a, b)
    assert all((t == 7).all() for t in others)


@pytest.mark.gpu
def test_o63_captures_do_not_pile_up(cuda, recipe):
    """O-63: free device memory after 50 captures is that after 5, within 64 MB."""
    made = layer(recipe, 256, 128, cuda)
    x = torch.randn(64, 256, device=cuda, dtype=BF16)
    g = torch.randn(64, 128, device=cuda, dtype=BF16)
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # else others allocate on the same device

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if not alone:
            return torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        return total - free

    for i in range(50):
        graph, results = captured(made, x, g)
        graph.replay()
        torch.cuda.synchronize()
        del graph, results
        if i == 4:
            after_5 = used()
    assert used() - after_5 < 64 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["ours", "a plain matmul"])
def test_o64_the_first_cuda_work_of_a_process(cuda, first, recipe):
    """O-64: works as the very first CUDA work, and after torch made its own handles."""
    out = python(f"""
        import torch, narrowfloat as nf
        torch.manual_seed(0)
        x, w = torch.randn(32, 64), torch.randn(48, 64)
        a, b = x.to("cuda"), w.to("cuda").requires_grad_()
        if {first!r} != "ours":
            (a @ b.t()).sum().item()
        y = nf.linear(a, b, None, {recipe!r})
        y.sum().backward()
        ref = nf.linear(x, w, None, {recipe!r})
        error = (y.detach().cpu() - ref).norm() / ref.norm()
        assert error < 1e-2, error
        (a @ b.t()).sum().item()
        print("right", bool(b.grad.isfinite().all()))
    """)
    assert out.strip() == "right True"


@pytest.mark.gpu
def test_o65_a_capture_leaves_no_flag_behind(cuda, recipe):
    """O-65: after a capture with cached weights, another module's graph follows its own weight."""
    a, b = (layer(recipe, 128, 64, cuda) for _ in range(2))
    x = torch.randn(32, 128, device=cuda, dtype=BF16)
    g = torch.randn(32, 64, device=cuda, dtype=BF16)
    graph_a, _ = captured(a, x, g, reuse=True)
    graph_b, results = captured(b, x, g)
    for i in range(4):
        torch.manual_seed(i + 1)
        with torch.no_grad():
            b.weight.normal_()
            b.bias.normal_()
        graph_a.replay()
        replay(graph_b)
        for got, right in zip(results, step(b, x, g), strict=True):
            assert_same_bits(got, right)


@pytest.mark.gpu
def test_o65_a_weight_held_in_a_capture(cuda, recipe):
    """O-65: a weight quantized inside the capture is quantized at each replay, and not kept for
    eager calls, where it would be what the last replay left."""
    made = layer(recipe, 128, 64, cuda)
    x = torch.randn(32, 128, device=cuda, dtype=BF16)
    g = torch.randn(32, 64, device=cuda, dtype=BF16)
    step(made, x, g)
    graph, results = captured(made, x, g, reuse=True)
    for i in range(3):
        torch.manual_seed(i + 1)
        with torch.no_grad():
            made.weight.normal_()
        right = step(made, x, g)
        replay(graph)
        for a, b in zip(results, right, strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(64, 256, 128), (33, 100, 65), (0, 64, 32)])
def test_o68_no_host_synchronization(cuda, recipe, shape, dtype):
    """O-68: forward and backward never wait for the device, and can be captured."""
    m, k, n = shape
    made = layer(recipe, k, n, cuda, dtype)
    x = torch.randn(m, k, device=cuda).to(dtype)
    g = torch.randn(m, n, device=cuda).to(dtype)
    right = step(made, x, g)  # warm: kernels are loaded, plans made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(made, x, g)
        nf.quantize(x, "e4m3" if recipe == "fp8" else recipe)
        with nf.reuse_weights(made):
            step(made, x, g)
            step(made, x, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(result, right, strict=True):
        assert_same_bits(a, b)
    graph, results = captured(made, x, g)
    replay(graph)
    for a, b in zip(results, right, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 100])
def test_o68_packed_weights_do_not_synchronize(cuda, tokens):
    """O-68: nor does a layer with packed weights, whichever way its GEMM runs."""
    made = PackedFP4Linear.from_linear(nn.Linear(256, 96, device=cuda, dtype=BF16), "nvfp4")
    x = torch.randn(tokens, 256, device=cuda, dtype=BF16)
    right = made(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = made(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(again, right)


@pytest.mark.gpu
def test_o68_returns_before_the_device_is_done(cuda, recipe):
    """O-68: torch's debug mode sees torch's own waits only; a device kept busy for about two
    seconds is still busy when forward and backward have returned."""
    made = layer(recipe, 256, 128, cuda)
    x = torch.randn(64, 256, device=cuda, dtype=BF16)
    g = torch.randn(64, 128, device=cuda, dtype=BF16)
    step(made, x, g)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    step(made, x, g)
    done = torch.cuda.Event()
    done.record()
    waited = done.query()
    torch.cuda.synchronize()
    assert not waited


# memory


@pytest.mark.gpu
def test_o67_memory_does_not_grow_with_steps(cuda, recipe):
    """O-67: 32 layers: allocated memory after 10 steps is that after 300, cached weights too."""
    model = nn.Sequential(*[layer(recipe, 64, 64, cuda) for _ in range(32)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(48, 64, device=cuda, dtype=BF16)

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def cached() -> None:
        with nf.reuse_weights(model):
            train()

    def infer() -> None:
        with torch.no_grad():
            model(x)

    for one, steps in ((infer, 300), (train, 300), (cached, 100)):
        for i in range(steps):
            one()
            if i == 9:
                torch.cuda.synchronize()
                after_10 = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() - after_10 < 1 << 20, one.__name__


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", EVERY_RECIPE, ids=str)
def test_o67_memory_does_not_grow(cuda: str, recipe: nf.Recipe) -> None:
    """O-67: 8 layers, and only y after a forward without gradients."""
    skip_where_it_does_not_run(recipe, cuda)
    model = nn.Sequential(*(layer(recipe, 256, 256, cuda) for _ in range(8)))
    x = torch.randn(512, 256, device=cuda, dtype=BF16)
    allocated = []
    for _ in range(100):
        model.zero_grad()
        model(x).sum().backward()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] - allocated[9] < 1 << 20
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        y = model(x)
    assert torch.cuda.memory_allocated() - before <= y.numel() * 2 + 512


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("packed", [False, True])
def test_o67_inference_leaves_nothing_but_y(cuda, mode, recipe, packed):
    """O-67: after a forward without gradients only y is allocated, with packed weights too."""
    made = layer(recipe, 1024, 512, cuda)
    if packed:
        if recipe == "fp8":
            pytest.skip("FP4 alone packs weights")
        made = PackedFP4Linear.from_linear(made, recipe)
    for tokens in (256, 32):
        x = torch.randn(tokens, 1024, device=cuda, dtype=BF16)
        with mode():
            made(x)
            gc.collect()  # what other tests left is not this one's
            before = torch.cuda.memory_allocated()
            y = made(x)
        assert torch.cuda.memory_allocated() - before == y.numel() * 2
        del y


@pytest.mark.gpu
@pytest.mark.parametrize("reuse", [False, True])
def test_o70_nothing_is_left_after_backward(cuda, recipe, reuse):
    """O-70: 16 layers: after backward no more is allocated than by bf16 layers."""

    def left(make, ours: bool) -> int:
        model = nn.Sequential(*[make() for _ in range(16)])
        x = torch.randn(256, 512, device=cuda, dtype=BF16)
        model(x).sum().backward()  # handles and workspaces of torch's own exist from here on
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        if reuse and ours:
            with nf.reuse_weights(model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before

    plain = left(lambda: nn.Linear(512, 512, device=cuda, dtype=BF16), False)
    assert left(lambda: layer(recipe, 512, 512, cuda), True) <= plain


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "mxfp4", "fp8_row", "fp8_block_bf16_wgrad"])
def test_o70_nothing_is_left_in_python(device, recipe):
    """O-70: nor does any tensor outlive the step in Python: none more after five steps than one."""
    skip_where_it_does_not_run(recipe, device)
    first, second = layer(recipe, 32, 64, device, F32), layer(recipe, 64, 32, device, F32)
    model = nn.Sequential(first, nn.ReLU(), second)
    x = torch.randn(16, 32, device=device)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(5):
        with nf.reuse_weights(model):
            model(x).sum().backward()
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        counts.append(tensors())
    assert counts[-1] <= counts[1], counts  # the first round is torch's own warm-up


# GEMMs of quantized operands


@pytest.mark.parametrize("out_dtype", [BF16, F32, F16])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_o69_each_scale_counts(device, formats, out_dtype):
    """O-69: each scale alone changes the result by exactly its factor."""
    for m, n, k in ((16, 32, 64), (17, 31, 33)):
        a, b = (
            nf.quantize(torch.randn(r, k, device=device), f).data
            for r, f in zip((m, n), formats, strict=True)
        )
        # small enough for fp16 and its normal range, e5m2's 57344 included
        one = torch.tensor(2.0**-18 if "e5m2" in formats else 2.0**-12, device=device)
        unit = torch.ones((), device=device)
        base = ops.scaled_mm(a, b, one, unit, out_dtype=out_dtype)
        ref = (a.double() @ b.double().t()) * one.double()
        assert relative_error(base, ref) < 2**-8
        for factor in (0.5, 2.0, 4.0):
            f = torch.tensor(factor, device=device)
            for scales in ((one * f, unit), (one, f)):
                d = ops.scaled_mm(a, b, *scales, out_dtype=out_dtype)
                normal = base.abs() > torch.finfo(out_dtype).tiny * 4  # exact below no more
                assert torch.equal(d[normal], (base * factor)[normal]), factor
        bias = torch.randn(n, device=device)
        with_bias = ops.scaled_mm(a, b, one, unit, bias, out_dtype)
        ref = ref + bias.double()
        assert relative_error(with_bias, ref) < 2**-8  # the bias is not scaled


@pytest.mark.parametrize("out_dtype", [BF16, F32, F16])
def test_o69_each_scale_of_fp4_counts(device, out_dtype):
    """O-69: the scale of packed weights changes their GEMM by exactly its factor, for few
    tokens and many, and no bias; so does the saved scale of x its weight gradient, and an
    FP4Tensor's scale its values."""
    w = PackedFP4Linear.from_linear(nn.Linear(96, 40, device=device), "nvfp4")
    one, bias = torch.full((1,), 2.0**-3, device=device), torch.randn(40, device=device)
    for tokens in (3, 40, 80):
        x = torch.randn(tokens, 96, device=device).to(BF16)
        base = fp4_weight_matmul_op(x, w.packed, one, None, 40, out_dtype, False)
        for factor in (0.5, 2.0, 4.0):
            d = fp4_weight_matmul_op(x, w.packed, one * factor, None, 40, out_dtype, False)
            normal = base.abs() > torch.finfo(out_dtype).tiny * 4
            assert base.any() and torch.equal(d[normal], (base * factor)[normal])
        d = fp4_weight_matmul_op(x, w.packed, one, bias, 40, out_dtype, False)
        assert relative_error(d, base.double() + bias.double()) < 2**-7
    x, w, dy = (torch.randn(s, device=device) for s in ((48, 64), (32, 64), (48, 32)))
    for format in ("nvfp4", "mxfp4"):
        recipe = rounded_to_nearest(format)
        spec = recipe.backward_spec | DW[out_dtype]
        *saved, scales = ops.linear_forward(x, w, None, recipe.forward_spec | SAVE_X)[1:]
        base = ops.linear_backward(dy, *saved, scales, None, None, 64, spec)[1]
        d = ops.linear_backward(dy, *saved, scales * 4, None, None, 64, spec)[1]
        normal = base.abs() > torch.finfo(out_dtype).tiny * 4
        assert base.any() and torch.equal(d[normal], (base * 4)[normal])
        q = nf.quantize(x, format)
        assert torch.equal(q._replace(scale=q.scale * 4).dequantize(), q.dequantize() * 4)


def test_o73_shapes_of_the_scale_of_packed_weights(device):
    """O-73: (), (1,) and (1,1) are one scale, eager and compiled."""
    made = PackedFP4Linear.from_linear(nn.Linear(64, 32, device=device), "nvfp4")
    x = torch.randn(4, 64, device=device).to(BF16)

    def multiply(scale: Tensor) -> Tensor:
        return fp4_weight_matmul_op(x, made.packed, scale, None, 32, F32, False)

    right = multiply(made.scale)
    for shape in ((), (1,), (1, 1)):
        scale = made.scale.reshape(shape)
        assert_same_bits(multiply(scale), right)
        torch._dynamo.reset()
        compiled = torch.compile(multiply, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(scale), right)
    with pytest.raises(ValueError, match="expected the scale"):
        multiply(torch.ones(2, device=device))


@pytest.mark.parametrize("tokens", [4, 80])
def test_o97_output_dtype_with_packed_weights(device, tokens):
    """O-97: what packed weights give has the dtype asked for; others are a TypeError that says
    which there are."""
    made = PackedFP4Linear.from_linear(nn.Linear(64, 32, device=device), "nvfp4")
    x = torch.randn(tokens, 64, device=device).to(BF16)
    for dtype in (BF16, F16, F32):
        y = fp4_weight_matmul_op(x, made.packed, made.scale, None, 32, dtype, False)
        assert y.dtype == dtype and y.isfinite().all() and y.any()
    for dtype in (torch.float8_e4m3fn, torch.float64, torch.int32):
        with pytest.raises(TypeError, match="out_dtype.*float32, bfloat16"):
            fp4_weight_matmul_op(x, made.packed, made.scale, None, 32, dtype, False)


def test_o97_output_dtype(device):
    """O-97: left out it is bf16; FP8 and others are a TypeError that names the argument."""
    a, b = (nf.quantize(torch.randn(n, 32, device=device)) for n in (16, 24))
    d = ops.scaled_mm(a.data, b.data, a.scale, b.scale)
    assert d.dtype == BF16 and d.shape == (16, 24)
    assert_close_as(d.float(), a.dequantize() @ b.dequantize().t())
    for dtype in (BF16, F16, F32):
        got = ops.scaled_mm(a.data, b.data, a.scale, b.scale, out_dtype=dtype)
        assert got.dtype == dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.int32, None):
        with pytest.raises(TypeError, match="out_dtype"):
            ops.scaled_mm(a.data, b.data, a.scale, b.scale, out_dtype=dtype)
    assert nf.fp8_mm(a.data, b.data).dtype == BF16
    with pytest.raises(TypeError, match="e5m2"):
        e5m2 = nf.quantize(torch.randn(16, 32, device=device), "e5m2")
        ops.scaled_mm(e5m2.data, e5m2.data, e5m2.scale, e5m2.scale)
    with pytest.raises(TypeError, match="float8"):
        ops.scaled_mm(a.dequantize(), b.data, a.scale, b.scale)


def test_o97_results_are_never_narrow(device, each_recipe):
    """O-97: no layer takes an output dtype: y has x's, and FP8 operands are a TypeError."""
    w = torch.randn(16, 32, device=device)
    q = nf.quantize(torch.randn(8, 32, device=device), "fp8_row")
    for bad in ((q.data, w), (w, q.data)):
        with pytest.raises(TypeError, match="expected [xw] in float32, bfloat16 or float16"):
            nf.linear(*bad, None, each_recipe)


@pytest.mark.parametrize("version", [120900, 130100, 130501, 130600])
def test_o96_mxfp8_on_sm120_with_old_and_new_libraries(version: int) -> None:
    """O-96: all GEMMs are TN, from copies whose contraction is contiguous, so that one route serves
    every version."""
    route = support.route("mx", support.SM120, version)
    assert route.name == "native"
    x, w = torch.randn(40, 72), torch.randn(24, 72)
    _, columns, _, _ = ops.linear_forward(x, w, None, nf.RECIPES["mxfp8"].forward_spec | SAVE_X)
    assert columns.shape == (formats.padded(72), formats.padded32(40)) and columns.is_contiguous()


# determinism


# x has no scale that the batch is in
ROWS_ALONE = [r for r in EVERY_RECIPE if r.fprop.a is not None and not r.fprop.a.of.tensor_scale]


@pytest.mark.parametrize("recipe", ROWS_ALONE, ids=str)
def test_o86_a_row_alone_and_in_batches(device: str, recipe: nf.Recipe) -> None:
    """O-86: without an option for it a row's bits may depend on the batch, as README says: by no
    more than one bf16 step of the row's largest value. Its codes and scales never do."""
    skip_where_it_does_not_run(recipe, device)
    format = recipe.fprop.a.of.format
    x = torch.randn(1024, 512, device=device, dtype=BF16)
    w = torch.randn(256, 512, device=device, dtype=BF16)
    alone = nf.linear(x[:1], w, None, recipe)
    bf16_step = 2.0 ** (math.floor(math.log2(alone.abs().max().item())) - 7)
    one = nf.quantize(x[:1], format)
    for m in (2, 17, 33, 128, 257, 1024):
        y = nf.linear(x[:m], w, None, recipe)
        assert (y[:1].float() - alone.float()).abs().max() <= bf16_step
        many = nf.quantize(x[:m], format)
        assert_same_bits(many.data[:1], one.data)
        assert_same_bits(many.scales[:1], one.scales)


@pytest.mark.parametrize("gemm", ["fprop", "wgrad"])
@pytest.mark.parametrize("recipe", REPEATED, ids=str)
def test_o87_long_sums_of_every_recipe(device: str, recipe: nf.Recipe, gemm: str) -> None:
    """O-87: K = 65536 and a small output, where a library would split K: equal bits each run, and
    the error of one fp32 sum."""
    skip_where_it_does_not_run(recipe, device)
    runs, long = (100, 65536) if device == "cuda" else (3, 8192)
    x, w = (torch.randn(64, long, device=device, dtype=BF16) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    try:
        if gemm == "fprop":
            results = [nf.linear(x, w, None, recipe) for _ in range(runs)]
        else:
            leaf = torch.zeros(64, 64, device=device, dtype=BF16, requires_grad=True)
            y = nf.linear(x.t().contiguous(), leaf, None, recipe)
            g = w.t().contiguous()
            results = [torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for _ in range(runs)]
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    want = x.double() @ w.double().t()
    want = want if gemm == "fprop" else want.t()
    kind = kinds(recipe)[0 if gemm == "fprop" else 2]
    assert relative_error(results[0], want) < max(TOLERANCE[kind], 0.08)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("which", ["fast", "exact", "weight gradient"])
def test_o87_long_sums_are_deterministic(device, which, dtype):
    """O-87: K = 65536 with a small output, where a library would split K: equal bits each run,
    and the error that one fp32 sum has."""
    runs = 100 if device == "cuda" else 3
    long = 65536
    a, b = (torch.randn(64, long, device=device).to(dtype) for _ in range(2))
    x, g = b.t().contiguous(), a.t().contiguous()
    w = torch.zeros(64, 64, device=device, dtype=dtype)
    torch.use_deterministic_algorithms(True)
    try:
        if which == "weight gradient":
            masks = (False, True, False)
            results = [nf.fp8_linear_backward(g, x, w, masks)[1] for _ in range(runs)]
        else:
            recipe = nf.Recipe(which, fprop=nf.Gemm("e4m3", "e4m3", which))
            results = [nf.linear(a, b, recipe=recipe) for _ in range(runs)]
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    qa = nf.quantize(a, "e5m2" if which == "weight gradient" else "e4m3")
    qb = nf.quantize(b)
    ref = qa.dequantize(F32).double() @ qb.dequantize(F32).double().t()
    if which == "fast" and device == "cuda":
        # about 14 bits of the running sum are kept over 2048 instructions, each cut towards zero
        limit = 0.2
    else:
        limit = 2**-7 if dtype == BF16 else 1e-3
    assert relative_error(results[0], ref) < limit


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_o87_long_sums_are_deterministic_in_fp4(device, format, dtype):
    """O-87: K = 65536 with a small output, in y and, given its draws, in dw and dx: equal bits each
    run, and the error that one fp32 sum has."""
    runs = 100 if device == "cuda" else 2
    long = 65536 if device == "cuda" else 4096  # the reference is slow
    a, b = (torch.randn(64, long, device=device).to(dtype) for _ in range(2))
    recipe = nf.fp4_recipe(format, format, weights_2d=False)
    x, g, w = b.t().contiguous(), a.t().contiguous(), torch.randn(64, 64, device=device).to(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(runs):
            leaf, weight = x.requires_grad_(), w.requires_grad_()
            y = nf.linear(leaf, weight, None, recipe)
            torch.manual_seed(7)
            gradients = torch.autograd.grad(y, (leaf, weight), g)
            results.append((nf.linear(a, b, None, recipe), *gradients))
            for t, right in zip(results[-1], results[0], strict=True):
                assert_same_bits(t.detach(), right.detach())
            del results[1:]
    finally:
        torch.use_deterministic_algorithms(False)
    qa, qb = nf.quantize(a, format), nf.quantize(b, format)
    ref = qa.dequantize(F32).double() @ qb.dequantize(F32).double().t()
    assert relative_error(results[0][0].detach(), ref) < (2**-7 if dtype == BF16 else 1e-3)


@pytest.mark.parametrize("tokens", [1, 33, 80])
def test_o87_packed_weights_are_deterministic(device, tokens):
    """O-87: K = 65536 over packed weights, where the GEMM splits K."""
    long = 65536 if device == "cuda" else 4096
    made = PackedFP4Linear.from_linear(nn.Linear(long, 64, False, device), "nvfp4")
    x = torch.randn(tokens, long, device=device)
    right = made(x)
    for _ in range(50 if device == "cuda" else 1):
        assert_same_bits(made(x), right)
    ref = x.to(BF16).double() @ made.dequantize().double().t()
    assert relative_error(right, ref) < 1e-3


# install


def test_o91_import_and_build_without_a_gpu(recipe):
    """O-91: no GPU visible: import, construct, state_dict and the CPU work; CUDA says why not."""
    out = python(
        f"recipe = {recipe!r}\n"
        + textwrap.dedent("""
        import torch
        import narrowfloat as nf
        assert not torch.cuda.is_initialized()
        made = nf.Linear(16, 32, recipe=recipe)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        nf.convert(model, recipe, head=True)
        print(sorted(made.state_dict()), made(torch.randn(2, 16)).shape[1])
        answer = nf.supported(recipe, "cuda")
        print(bool(answer), len(answer.reason) > 10)
        print(bool(nf.supported(recipe)), nf.supported(recipe).how)
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            x = torch.empty(4, 16, device="cuda")
            w = torch.empty(8, 16, device="cuda")
            try:
                nf.linear(x, w, None, recipe)
            except NotImplementedError as error:
                print(answer.reason in str(error) and f"recipe {recipe}" in str(error))
        assert not torch.cuda.is_initialized()
        """),
        CUDA_VISIBLE_DEVICES="",
    )
    assert out.splitlines() == ["['bias', 'weight'] 32", "False True", "True reference", "True"]


def test_o91_import_asks_no_device():
    """O-91: the import itself asks for no device, not even whether there is one."""
    out = python(
        """
        import torch
        asked = []
        for name in ("get_device_capability", "get_device_properties", "current_device",
                     "device_count", "init", "_lazy_init"):
            setattr(torch.cuda, name, lambda *a, _n=name, **k: asked.append(_n))
        import narrowfloat as nf
        nf.FP8Linear(16, 32).state_dict()
        print(asked)
        """
    )
    assert out.strip() == "[]"
