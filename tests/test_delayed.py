"""Delayed scaling is what reference/delayed.py says: each tensor read once, nothing saturated, each
micro-batch counted and none twice."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from conftest import assert_same_bits, capture
from torch.utils.checkpoint import checkpoint

import narrowfloat as nf
from narrowfloat import _binary, amax_history, ops
from narrowfloat.cast import Cast
from narrowfloat.formats import E4M3, E5M2
from narrowfloat.reference import delayed, linear, tensor
from narrowfloat.reference.delayed import FIRST, MARK
from narrowfloat.spec import (
    BACKWARD_JOINS,
    DW,
    FORWARD_JOINS,
    NEED_DX,
    SAVE_X,
    W_MEASURED,
    both,
)

RECIPE = nf.RECIPES["fp8_delayed"]
UNGUARDED = nf.Recipe("unguarded", delayed=nf.Delayed(guard=False))


def row_of(layer: nf.Linear, tensor: int, at: int = 0) -> float:
    """Of x, w, dy: the amax that the scale covers (0), what the calls joined (1), the steps (4)."""
    return layer.scale_history.view(torch.float32)[tensor, at].item()


def layer_of(device: str, recipe: nf.Recipe = RECIPE, **kwargs) -> nf.Linear:
    return nf.Linear(64, 48, device=device, dtype=torch.bfloat16, recipe=recipe, **kwargs)


def draw(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def gradients(layer: nf.Linear, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def test_the_first_step_measures(device: str) -> None:
    """With no history yet, and without one at all, a layer is the recipe fp8 bit for bit."""
    layer = layer_of(device)
    plain = copy.deepcopy(layer)
    plain.recipe = nf.RECIPES["fp8"]
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    for a, b in zip(gradients(layer, x, dy), gradients(plain, x, dy), strict=True):
        assert_same_bits(a, b, "first step")
    y = nf.linear(x, layer.weight, layer.bias, "fp8_delayed")
    assert_same_bits(y.detach(), plain(x).detach(), "no history")


def test_a_tensor_within_its_scale_keeps_it(device: str) -> None:
    """The second step takes the first one's scales, and so does not measure its own."""
    layer = layer_of(device)
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    gradients(layer, 4 * x, 4 * dy)
    nf.step(layer)
    covered = [row_of(layer, i) for i in range(3)]
    y, dx, dw, _ = gradients(layer, x, dy)
    operands = {"x": (x, E4M3), "w": (layer.weight.detach(), E4M3), "dy": (dy, E5M2)}
    scale = {
        name: tensor.pad(torch.stack(tensor.scale_from_amax(torch.tensor(c), fmt)), (0, 2)).to(
            device
        )
        for c, (name, (_, fmt)) in zip(covered, operands.items(), strict=True)
    }
    rows, columns = {}, {}
    for name, (t, fmt) in operands.items():
        how = Cast(fmt.name)
        made = ops.quantize_op(t, both(how, how).pack(), scale[name])
        rows[name], columns[name] = made[0], made[2]

    def multiplied(
        a: str, of_a: dict, b: str, of_b: dict, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return ops.scaled_mm_op(of_a[a], of_b[b], scale[a], scale[b], bias, torch.bfloat16, False)

    bias = layer.bias.detach()
    assert_same_bits(y, multiplied("x", rows, "w", rows, bias)[:40, :48], "y")
    assert_same_bits(dx, multiplied("dy", rows, "w", columns)[:40, :64], "dx")
    assert_same_bits(dw, multiplied("dy", columns, "x", columns)[:48, :64], "dw")


@pytest.mark.parametrize("guard", [True, False])
def test_a_tensor_that_outgrew_its_scale(device: str, guard: bool) -> None:
    recipe = nf.Recipe("mine", delayed=nf.Delayed(guard=guard))
    layer = layer_of(device, recipe)
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    gradients(layer, x, dy)
    nf.step()
    grown = gradients(layer, 64 * x, 64 * dy)
    plain = copy.deepcopy(layer)
    plain.recipe = nf.RECIPES["fp8"]
    want = gradients(plain, 64 * x, 64 * dy)
    for a, b in zip(grown[:3], want[:3], strict=True):
        error = ((a.double() - b.double()).norm() / b.double().norm()).item()
        # w kept its scale, which here is that of its own amax
        assert error == 0 if guard else error > 0.5, (guard, error)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("guard", [True, False])
def test_what_is_not_finite_surfaces_and_does_not_count(
    device: str, value: float, guard: bool
) -> None:
    layer = layer_of(device, nf.Recipe("mine", delayed=nf.Delayed(guard=guard)))
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    gradients(layer, x, dy)
    nf.step()
    before = layer.scale_history.clone()
    bad_x, bad_dy = x.clone(), dy.clone()
    bad_x[3, 5] = bad_dy[3, 5] = value
    y, dx, dw, _ = gradients(layer, bad_x, bad_dy)
    assert not y[3].isfinite().any()
    assert not dx[3].isfinite().any()
    assert not dw.isfinite().all()
    assert (layer.scale_history[[0, 2]] == before[[0, 2]]).all(), "it counted"
    nf.step()
    y = gradients(layer, x, dy)[0]
    assert y.isfinite().all(), "the histories are poisoned"


def test_micro_batches_count_once_together(device: str) -> None:
    """Several calls a step are one entry, the largest; a second roll, and a step without a call,
    change nothing."""
    layer = layer_of(device)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-4)
    for step in range(3):
        largest = 0.0
        for scale in (1.0, 3.0, 2.0):
            x = scale * (step + 1) * draw(device, 40, 64)
            largest = max(largest, x.abs().max().item())
            layer(x).sum().backward()
        assert row_of(layer, 0, 1) == largest
        optimizer.step()
        optimizer.zero_grad()
        assert row_of(layer, 0, FIRST) == largest
        assert row_of(layer, 0, 1) == 0
        rolled = layer.scale_history.clone()
        nf.step(layer)
        optimizer.step()
        assert (layer.scale_history == rolled).all()
    steps = layer.scale_history.view(torch.float32)[0, FIRST : FIRST + 4]
    assert (steps[:3] > 0).all()
    assert steps[3] == 0
    assert row_of(layer, 0) == steps.max().item()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(device: str, reentrant: bool) -> None:
    """The recomputed forward has the scales of the first one, and its amax is not another step."""
    layer = layer_of(device)
    plain = copy.deepcopy(layer)
    for _ in range(3):
        x, dy = draw(device, 40, 64), draw(device, 40, 48)
        want = gradients(plain, x, dy)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        checkpoint(layer, leaf, use_reentrant=reentrant).backward(dy)
        for a, b in zip([leaf.grad, layer.weight.grad], want[1:3], strict=True):
            assert_same_bits(a, b, "gradient")
        assert (layer.scale_history == plain.scale_history).all()
        nf.step()


def test_evaluation_leaves_no_trace(device: str) -> None:
    layer = layer_of(device)
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    gradients(layer, x, dy)
    nf.step()
    before = layer.scale_history.clone()
    with torch.no_grad():
        layer(100 * x)
    frozen = layer.requires_grad_(False)
    frozen(100 * x)
    with torch.inference_mode():
        frozen(100 * x)
    assert (layer.scale_history == before).all()


@pytest.mark.parametrize(
    ("use", "margin", "want"), [("max", 0, 8.0), ("latest", 0, 2.0), ("max", 2, 32.0)]
)
def test_what_a_history_says(device: str, use: str, margin: int, want: float) -> None:
    recipe = nf.Recipe("mine", delayed=nf.Delayed(length=3, use=use, margin=margin))
    layer = layer_of(device, recipe)
    x = torch.zeros(16, 64, dtype=torch.bfloat16, device=device)
    for largest in (99.0, 8.0, 4.0, 2.0):  # the first is four steps ago
        x[0, 0] = largest
        layer(x).sum().backward()
        nf.step(layer)
    assert row_of(layer, 0) == want


def test_memory_that_nobody_wrote_is_no_history() -> None:
    """meta, then to_empty(), as deferred initialization does it."""
    with torch.device("meta"):
        layer = layer_of("meta")
    layer.to_empty(device="cpu")
    layer.scale_history.fill_(0x4B4B4B4B)
    torch.nn.init.normal_(layer.weight), torch.nn.init.zeros_(layer.bias)
    plain = copy.deepcopy(layer)
    plain.recipe = nf.RECIPES["fp8"]
    x, dy = torch.randn(40, 64), torch.randn(40, 48)
    for a, b in zip(gradients(layer, x, dy), gradients(plain, x, dy), strict=True):
        assert_same_bits(a, b, "first step")
    assert (layer.scale_history[:, 2] == MARK).all()


def test_what_a_layer_is_to_others(device: str) -> None:
    """The state_dict stays nn.Linear's; copies have histories of their own, which roll; a cast
    leaves them be; another recipe does without."""
    layer = layer_of(device)
    assert list(layer.state_dict()) == ["weight", "bias"]
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    gradients(layer, x, dy)
    copied, loaded = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    assert copied.scale_history.data_ptr() != layer.scale_history.data_ptr()
    nf.step()
    for other in (layer, copied, loaded):
        assert row_of(other, 0) == x.abs().max().item()
    layer.half()
    assert layer.scale_history.dtype == torch.int32
    assert row_of(layer, 0) == x.abs().max().item()
    layer.recipe = nf.Recipe("longer", delayed=nf.Delayed(length=40))
    gradients(layer, x.half(), dy.half())
    assert layer.scale_history.shape == (3, FIRST + 40)
    layer.recipe = nf.RECIPES["fp8"]
    layer.start_history()
    assert "scale_history" not in dict(layer.named_buffers())


def test_layers_that_are_gone_are_not_followed(device: str) -> None:
    gc.collect()
    before = len(amax_history._followed)
    layer = layer_of(device)
    assert len(amax_history._followed) == before + 1
    del layer
    gc.collect()
    assert len(amax_history._followed) == before


def test_convert(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)).to(device)
    nf.convert(model, "fp8_delayed", head=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        model(torch.randn(24, 32, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer in model:
        assert (layer.scale_history.view(torch.float32)[:, FIRST : FIRST + 3] > 0).all()


def test_it_learns(device: str) -> None:
    """A regression ends where fp8's does."""
    torch.manual_seed(0)
    x = torch.randn(256, 32, device=device)
    target = torch.tanh(x @ torch.randn(32, 16, device=device))
    ends = {}
    for recipe in ("fp8", "fp8_delayed"):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            nf.Linear(32, 64, recipe=recipe), torch.nn.GELU(), nf.Linear(64, 16, recipe=recipe)
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(150):
            loss = torch.nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[recipe] = loss.item()
    assert ends["fp8_delayed"] < 1.15 * ends["fp8"]
    assert ends["fp8"] < 0.2


def test_compiled_as_eager(device: str) -> None:
    """One graph; the histories change in it, forward and backward."""
    layer = layer_of(device)
    compiled_layer = copy.deepcopy(layer)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(compiled_layer, fullgraph=True, backend=backend)
    for step in range(3):
        x, dy = (step + 1) * draw(device, 40, 64), draw(device, 40, 48)
        want = gradients(layer, x, dy)
        compiled_layer.zero_grad()
        leaf = x.clone().requires_grad_()
        compiled(leaf).backward(dy)
        got = [leaf.grad, compiled_layer.weight.grad]
        for a, b in zip(got, want[1:3], strict=True):
            assert_same_bits(a, b, "gradient")
        assert (compiled_layer.scale_history == layer.scale_history).all()
        nf.step()


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("recipe", [RECIPE, UNGUARDED], ids=str)
def test_opcheck(device: str, recipe: nf.Recipe, joins: bool) -> None:
    rows = amax_history.fresh(recipe.delayed, device)
    x, w, dy = draw(device, 24, 64), draw(device, 48, 64), draw(device, 24, 48)
    spec = recipe.forward_spec | recipe.save_x | recipe.keep_w
    forward = (x, w, None, rows, spec | (FORWARD_JOINS if joins else 0))
    _, columns, _, scales = ops.delayed_linear_forward(*forward)
    spec = recipe.backward_spec | W_MEASURED | NEED_DX | (BACKWARD_JOINS if joins else 0)
    backward = (dy, columns, scales, w, rows, 64, spec)
    # torch cannot compare FP8 as test_schema does: what is written to is looked at here
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for op, arguments in (
        (ops.delayed_linear_forward, forward),
        (ops.delayed_linear_backward, backward),
    ):
        torch.library.opcheck(op.overload, arguments, test_utils=checks)
        rows.zero_()
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        op(*arguments)
        for a, b in zip(arguments, before, strict=True):
            if isinstance(a, torch.Tensor):
                same = torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                assert same != (a is rows and joins)


@pytest.mark.parametrize(
    "wrong",
    [{"length": 0}, {"length": 1025}, {"use": "mean"}, {"margin": -1}, {"margin": 65}],
)
def test_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="Delayed: expected"):
        nf.Delayed(**wrong)


def test_create_graph_is_refused(device: str) -> None:
    layer = layer_of(device)
    y = layer(draw(device, 16, 64).requires_grad_())
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        torch.autograd.grad(y.sum(), layer.weight, create_graph=True)


def test_reuse_weights_measures_them_anew(device: str) -> None:
    layer = layer_of(device)
    plain = copy.deepcopy(layer)
    x, dy = draw(device, 40, 64), draw(device, 40, 48)
    for _ in range(2):
        want = gradients(plain, x, dy)
        with nf.reuse_weights(layer):
            got = gradients(layer, x, dy)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b, "inside reuse_weights")
        nf.step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16, 16), (40, 64, 48), (300, 520, 136), (4096, 1024, 2048)])
def test_kernels_equal_the_reference(cuda: str, shape: tuple, dtype: torch.dtype) -> None:
    """Codes, scales and histories over steps that grow, shrink and break; small tensors, in one
    launch, and large ones, in two."""
    m, k, n = shape
    for recipe in (UNGUARDED, RECIPE):
        guarded = recipe.delayed.guard
        here = amax_history.fresh(nf.Delayed(length=3), cuda)
        there = here.cpu()
        for factor in (1.0, 0.5, 8.0, float("nan"), 1.0, 1e-3):
            x, w = factor * torch.randn(m, k), torch.randn(n, k)
            dy = factor * torch.randn(m, n)
            x, w, dy = (t.to(dtype) for t in (x, w, dy))
            spec = recipe.forward_spec | FORWARD_JOINS | SAVE_X | recipe.keep_w
            back = recipe.backward_spec | BACKWARD_JOINS | NEED_DX | DW[dtype] | W_MEASURED
            _, columns, _, scales = ops.delayed_linear_forward(
                x.to(cuda), w.to(cuda), None, here, spec
            )
            rows = [r.clone() for r in there]
            of_x, of_w = (
                delayed.scale_by_history(t, E4M3, r, guarded, joins=True)
                for t, r in zip((x, w), rows, strict=False)
            )
            want = linear.quantize(x, both(None, Cast("e4m3")).pack(), of_x)[2]
            assert_same_bits(columns.cpu(), want, "x columns")
            assert_same_bits(scales.cpu(), torch.cat([of_x, of_w]), "scales")
            delayed.scale_by_history(dy, E5M2, rows[2], guarded, joins=True)
            there = torch.stack(rows)
            ops.delayed_linear_backward(dy.to(cuda), columns, scales, w.to(cuda), here, k, back)
            assert_same_bits(here.cpu(), there, "history")
            stream = torch.cuda.current_stream().cuda_stream
            _binary.module.roll_histories([here.data_ptr()], 3, here.shape[1], False, 0, stream)
            delayed.roll(there, False, 0)
            assert_same_bits(here.cpu(), there, "rolled history")


@pytest.mark.gpu
def test_a_captured_step_counts_once_a_replay(cuda: str) -> None:
    layer = layer_of(cuda)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    x, dy = draw(cuda, 40, 64), draw(cuda, 40, 48)

    def whole_step() -> None:
        layer.zero_grad(set_to_none=False)
        layer(x).backward(dy)
        optimizer.step()

    graph, _ = capture(whole_step)
    layer.scale_history.zero_()
    want = []
    for i in range(4):
        x.copy_((i + 1) * draw(cuda, 40, 64))
        want.insert(0, x.abs().max().item())
        graph.replay()
        steps = layer.scale_history.view(torch.float32)[0, FIRST : FIRST + i + 1].tolist()
        assert steps == want
