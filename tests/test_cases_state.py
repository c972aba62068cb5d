"""Public failures of the kind "state" do not happen, O-77 to O-85; CASES.md tells of each."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from conftest import assert_same_bits
from torch import multiprocessing, nn

import narrowfloat as nf
from narrowfloat import formats

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, F16, F32]


def layer(recipe: str, k: int, n: int, bias: bool = True, **where) -> nf.Linear:
    """As a user makes it: FP8Linear and FP4Linear have their recipes."""
    if recipe == "mxfp4":
        return nf.FP4Linear(k, n, bias, recipe="mxfp4", **where)
    return {"fp8": nf.FP8Linear, "nvfp4": nf.FP4Linear}[recipe](k, n, bias, **where)


def use(made: nn.Module, device: str) -> torch.Tensor:
    """One forward and backward, as training would; returns y."""
    dtype = made.weight.dtype
    torch.manual_seed(3)
    y = made(torch.randn(16, made.in_features, device=device).to(dtype))
    y.sum().backward()
    made.zero_grad(set_to_none=True)
    return y.detach()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [False, True])
def test_o77_state_dict_of_nn_linear(device, recipe, used, dtype, bias):
    """O-77: strict loads both ways, before and after use; keys are weight and bias alone."""
    plain = nn.Linear(32, 48, bias, device, dtype)
    for ours in (
        layer(recipe, 32, 48, bias, device=device, dtype=dtype),
        nf.Linear(32, 48, bias, device, dtype, recipe=recipe),
    ):
        if used:
            use(ours, device)
        state = ours.state_dict()
        assert list(state) == (["weight", "bias"] if bias else ["weight"])
        plain.load_state_dict(state, strict=True)
        assert_same_bits(plain.weight, ours.weight)
        with torch.no_grad():
            plain.weight.normal_()
        result = ours.load_state_dict(plain.state_dict(), strict=True)
        assert not result.missing_keys and not result.unexpected_keys
        assert_same_bits(ours.weight, plain.weight)
        x = torch.randn(4, 32, device=device).to(dtype)
        want = nf.linear(x, plain.weight, plain.bias, recipe)
        assert_same_bits(ours(x).detach(), want.detach())


def test_o77_state_dict_of_a_converted_model(device, recipe):
    """O-77: a converted model's keys and bytes are those of the model it was."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)).to(device)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    other = copy.deepcopy(model)
    nf.convert(model, recipe, head=True)
    after = model.state_dict()
    assert list(after) == list(before)
    for name, t in after.items():
        assert_same_bits(t, before[name], name)
    other.load_state_dict(after, strict=True)
    with nf.reuse_weights(model):
        model(torch.randn(4, 16, device=device))
        assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("used", [False, True])
def test_o79_deepcopy(device, recipe, used, dtype):
    """O-79: a copy before or after a forward is independent; both train."""
    made = layer(recipe, 32, 48, device=device, dtype=dtype)
    if used:
        use(made, device)
    twin = copy.deepcopy(made)
    assert type(twin) is type(made) and twin.recipe == made.recipe
    assert twin.weight.data_ptr() != made.weight.data_ptr()
    y = use(made, device)
    assert_same_bits(use(twin, device), y)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.randn(4, 32, device=device).to(dtype)).sum().backward()
    optimizer.step()
    assert made.weight.grad is None
    assert_same_bits(use(made, device), y)
    assert not torch.equal(use(twin, device), y)


def test_o79_deepcopy_inside_reuse_weights(device, recipe):
    """O-79: a copy made while weights are cached shares nothing of the cache."""
    made = layer(recipe, 32, 48, device=device)
    x = torch.randn(8, 32, device=device)
    with nf.reuse_weights(made):
        y = made(x).detach()
        twin = copy.deepcopy(made)
        assert_same_bits(twin(x).detach(), y)
        with torch.no_grad():
            twin.weight.mul_(-1)
            twin.bias.zero_()
            made.bias.zero_()
        assert torch.equal(twin(x), -made(x))  # but for the sign of a zero
        shallow = copy.copy(made)
        assert_same_bits(shallow(x).detach(), made(x).detach())
    with torch.no_grad():
        twin.weight.mul_(2)
        assert_same_bits(twin(x), nf.linear(x, twin.weight, twin.bias, recipe))
        assert_same_bits(shallow(x), nf.linear(x, made.weight, made.bias, recipe))


def test_o79_moving_average(device, recipe):
    """O-79: torch's averaged model over ours: both then train."""
    made = layer(recipe, 32, 48, device=device)
    average = torch.optim.swa_utils.AveragedModel(
        made, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    x = torch.randn(8, 32, device=device)
    weights = []
    for _ in range(3):
        optimizer.zero_grad()
        made(x).square().sum().backward()
        optimizer.step()
        average.update_parameters(made)
        weights.append(made.weight.detach().clone())
        y = average(x)
        want = nf.linear(x, average.module.weight, average.module.bias, recipe)
        assert_same_bits(y.detach(), want.detach())
    # the average starts at the first weights: w0/4 + w1/4 + w2/2
    expected = (weights[0] + weights[1]) / 4 + weights[2] / 2
    torch.testing.assert_close(average.module.weight.detach(), expected)
    average(x).sum().backward()
    assert average.module.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["pickle", "torch.save", "state_dict"])
@pytest.mark.parametrize(
    "recipe",
    [
        nf.Recipe("mine", dgrad=nf.Gemm("e5m2", "e4m3", "fast")),
        nf.fp4_recipe("mine", rotate_wgrad=False, four_over_six="both"),
        nf.fp4_recipe("mine", "mxfp4", stochastic_dy=False),
    ],
    ids=["fp8", "nvfp4", "mxfp4"],
)
def test_o80_round_trips(device, how, dtype, recipe):
    """O-80: pickled modules and saved states come back with the same bytes and dtypes."""
    made = nf.Linear(32, 48, device=device, dtype=dtype, recipe=recipe)
    y = use(made, device)
    buffer = io.BytesIO()
    if how == "pickle":
        back = pickle.loads(pickle.dumps(made))
    elif how == "torch.save":
        torch.save(made, buffer)
        buffer.seek(0)
        back = torch.load(buffer, weights_only=False)
    else:
        torch.save(made.state_dict(), buffer)
        buffer.seek(0)
        back = nf.Linear(32, 48, device=device, dtype=dtype, recipe=recipe)
        back.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert type(back) is nf.Linear and back.recipe == recipe
    for name, t in made.state_dict().items():
        assert_same_bits(back.state_dict()[name], t, name)
        assert back.state_dict()[name].device == t.device
    assert_same_bits(use(back, device), y)
    buffer.seek(0)
    if how != "pickle":
        there = torch.load(buffer, weights_only=how == "state_dict", map_location="cpu")
        state = there if how == "state_dict" else there.state_dict()
        assert all(t.device.type == "cpu" and t.dtype == dtype for t in state.values())


def test_o80_pickle_inside_reuse_weights(device, recipe):
    """O-80: what is cached is no part of a pickle."""
    made = layer(recipe, 256, 256, device=device)
    size = len(pickle.dumps(made))
    with nf.reuse_weights(made):
        use(made, device)
        inside = pickle.dumps(made)
    assert abs(len(inside) - size) < 4096
    assert_same_bits(use(pickle.loads(inside), device), use(made, device))


def _child(inbox, outbox) -> None:
    made = inbox.get(timeout=60)
    outbox.put((type(made).__name__, made.recipe.name, made.weight.detach().sum().item()))


def test_o80_multiprocessing_queue(recipe):
    """O-80: a module goes through a queue to another process (of the CPU) unchanged."""
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    made = layer(recipe, 16, 32)
    child = context.Process(target=_child, args=(inbox, outbox), daemon=True)
    child.start()
    try:
        inbox.put(made)
        answer = outbox.get(timeout=120)
    finally:
        child.join(timeout=60)
        if child.is_alive():
            child.kill()
    assert answer == (type(made).__name__, recipe, made.weight.detach().sum().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", ["e4m3", "e5m2"])
def test_o80_quantized_tensors(device, quantized, dtype):
    """O-80: a QuantizedTensor's parts save and load with their dtypes and bytes."""
    q = nf.quantize(torch.randn(5, 33, device=device).to(dtype), quantized)
    buffer = io.BytesIO()
    torch.save({"data": q.data, "scale": q.scale}, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=True)
    assert_same_bits(back["data"], q.data)
    assert_same_bits(back["scale"], q.scale)
    again = nf.QuantizedTensor(back["data"], back["scale"], q.format, q.dtype)
    assert_same_bits(again.dequantize(), q.dequantize())
    torch.save(tuple(q), buffer := io.BytesIO())
    buffer.seek(0)
    whole = nf.QuantizedTensor(*torch.load(buffer, weights_only=True))
    assert whole.dtype == dtype and whole.format == quantized
    assert_same_bits(whole.dequantize(), q.dequantize())
    assert_same_bits(copy.deepcopy(q).dequantize(), q.dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_o80_o82_quantized_fp4_tensors(device, format, dtype, tmp_path):
    """O-80, O-82: an FP4Tensor's parts go through torch.save and, as uint8, through safetensors
    (file and memory) with their bytes; an odd width comes back."""
    q = nf.quantize(torch.randn(5, 33, device=device).to(dtype), format)

    def same(data, scales, scale) -> None:
        again = nf.FP4Tensor(data, scales, scale, q.format, q.dtype, q.width)
        for a, b in ((data, q.data), (scale, q.scale)):
            assert_same_bits(a, b)
        assert_same_bits(scales.view(torch.uint8), q.scales.view(torch.uint8))
        assert scales.dtype == q.scales.dtype
        assert_same_bits(again.dequantize(), q.dequantize())

    torch.save({"data": q.data, "scales": q.scales, "scale": q.scale}, buffer := io.BytesIO())
    buffer.seek(0)
    same(**torch.load(buffer, weights_only=True))
    torch.save(tuple(q), buffer := io.BytesIO())
    buffer.seek(0)
    assert_same_bits(
        nf.FP4Tensor(*torch.load(buffer, weights_only=True)).dequantize(), q.dequantize()
    )
    assert_same_bits(copy.deepcopy(q).dequantize(), q.dequantize())
    safetensors = pytest.importorskip("safetensors.torch")
    parts = {
        "data": q.data.contiguous(),
        "scales": q.scales.view(torch.uint8).contiguous(),
        "scale": q.scale.contiguous(),
    }
    safetensors.save_file(parts, tmp_path / "q.safetensors")
    for back in (
        safetensors.load_file(tmp_path / "q.safetensors"),
        safetensors.load(safetensors.save(parts)),
    ):
        back = {name: t.to(device) for name, t in back.items()}
        same(back["data"], back["scales"].view(q.scales.dtype), back["scale"])


@pytest.mark.parametrize("format", sorted(formats.SCALED_FORMATS))
def test_o80_o82_o85_quantized_tensors(device, format, caplog):
    """O-80, O-82, O-85: parts save and load with their bytes; repr; numpy through uint8."""
    q = nf.quantize(torch.randn(5, 133, device=device), format)
    torch.save(tuple(q), buffer := io.BytesIO())
    buffer.seek(0)
    back = nf.BlockTensor(*torch.load(buffer, weights_only=True))
    assert back.data.dtype == q.data.dtype and back.scales.dtype == q.scales.dtype
    assert_same_bits(back.dequantize(), q.dequantize())
    assert_same_bits(copy.deepcopy(q).dequantize(), q.dequantize())
    with caplog.at_level(logging.INFO):
        logging.getLogger(__name__).info("%r", q)
    assert "BlockTensor" in caplog.text
    assert q.data.view(torch.uint8).cpu().numpy().shape == (5, 133)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_o81_meta_device(device, recipe, bias, dtype):
    """O-81: built on meta, materialized, initialized: nothing is left on meta."""
    with torch.device("meta"):
        made = layer(recipe, 32, 48, bias, dtype=dtype)
    assert made.weight.is_meta and not list(made.buffers())
    made.to_empty(device=device)
    made.reset_parameters()
    for t in made.state_dict().values():
        assert t.device.type == device and t.dtype == dtype
    assert made.weight.isfinite().all() and made.weight.float().std() > 0.01
    y = use(made, device)
    assert y.isfinite().all()
    x = torch.randn(4, 32, device=device).to(dtype)
    assert_same_bits(made(x).detach(), nf.linear(x, made.weight, made.bias, recipe).detach())


def test_o81_forward_on_meta(recipe):
    """O-81: supported() promises shapes on meta: forward and backward give them."""
    assert nf.supported(recipe, "meta")
    with torch.device("meta"):
        made = layer(recipe, 32, 48, dtype=BF16)
        x = torch.empty(2, 4, 32, dtype=BF16, requires_grad=True)
    y = made(x)
    assert y.is_meta and y.shape == (2, 4, 48) and y.dtype == BF16
    y.sum().backward()
    assert x.grad.is_meta and x.grad.shape == x.shape
    assert made.weight.grad.is_meta and made.weight.grad.shape == (48, 32)


def test_o81_convert_on_meta(device, recipe):
    """O-81: a model is converted on meta and then loaded."""
    source = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    nf.convert(model, recipe, head=True)
    model.load_state_dict(source.state_dict(), assign=True)
    assert not any(t.is_meta for t in model.state_dict().values())
    x = torch.randn(4, 16, device=device)
    nf.convert(source, recipe, head=True)
    assert_same_bits(model(x).detach(), source(x).detach())


def test_o77_to_o81_state(device, each_recipe):
    """O-77, O-79, O-80, O-81: states, copies, pickles and meta."""
    made = nf.Linear(32, 48, device=device, recipe=each_recipe)
    plain = nn.Linear(32, 48, device=device)
    plain.load_state_dict(made.state_dict(), strict=True)
    x = torch.randn(5, 32, device=device)
    made(x).sum().backward()
    assert set(made.state_dict()) == {"weight", "bias"}
    twin = copy.deepcopy(made)
    torch.save(made, buffer := io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, loaded):
        assert other.recipe == made.recipe
        assert_same_bits(other(x), made(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert made.weight.any()
    with torch.device("meta"):
        empty = nf.Linear(32, 48, recipe=each_recipe)
        shapes = torch.empty(2, 4, 32, requires_grad=True)
        y = empty(shapes)
        y.sum().backward()
    assert y.is_meta and y.shape == (2, 4, 48) and shapes.grad.shape == shapes.shape
    empty.to_empty(device=device)
    empty.reset_parameters()
    assert empty(x).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_o85_repr_numpy_and_logging(device, recipe, dtype, caplog):
    """O-85: repr, logging and .numpy() of all state work; quantized bytes are offered as uint8."""
    pytest.importorskip("numpy")
    made = layer(recipe, 32, 48, device=device, dtype=dtype)
    use(made, device)
    assert recipe in made.extra_repr() and recipe in repr(made)
    assert "in_features=32, out_features=48, bias=True" in repr(made)
    assert "mine" in repr(nf.Linear(4, 4, recipe=nf.Recipe("mine")))
    for name, t in made.state_dict().items():
        t = t.cpu()
        array = (t.float() if dtype == BF16 else t).numpy()  # numpy has no bf16: as nn.Linear
        assert array.shape == t.shape, name
    hash(made)
    hash(made.recipe)
    q = nf.quantize(made.weight, "e4m3" if recipe == "fp8" else recipe)
    with caplog.at_level(logging.INFO):
        logging.getLogger(__name__).info(
            "%s %r %s", made, q, nf.plan(nn.Sequential(nn.Linear(2, 2)))
        )
    assert type(made).__name__ in caplog.text and type(q).__name__ in caplog.text
    array = q.data.view(torch.uint8).cpu().numpy()
    width = 32 if recipe == "fp8" else 16  # two codes a byte
    assert array.shape == (48, width) and array.dtype.name == "uint8"
    back = torch.from_numpy(array.copy()).view(q.data.dtype)
    assert_same_bits(back, q.data)
