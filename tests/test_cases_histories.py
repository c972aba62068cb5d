"""The amax histories of delayed scaling: whose step rolls them, what may not change them, how they
are saved. One test for each sample of R-20 to R-23 (CASES.md) and their kind."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import assert_same_bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import narrowfloat as nf
from narrowfloat import amax_history
from narrowfloat.reference.delayed import FIRST

UNGUARDED = nf.Recipe("unguarded", delayed=nf.Delayed(guard=False))


def layer_of(recipe: str | nf.Recipe = "fp8_delayed", device: str = "cpu") -> nf.Linear:
    return nf.Linear(64, 64, device=device, recipe=recipe)


def steps_of(layer: nf.Linear) -> int:
    """How often x's history has rolled."""
    return int((layer.scale_history[0, FIRST:] != 0).sum())


def run(*layers: nn.Module) -> None:
    for layer in layers:
        device = next(layer.parameters()).device
        layer(torch.randn(8, 64, device=device)).square().mean().backward()


# ---- what has no memory ----


def fake_mode(layer: nf.Linear) -> None:
    """Made, run and stepped under a FakeTensorMode."""
    with FakeTensorMode():
        made = nf.Linear(64, 64, recipe="fp8_delayed")
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        for _ in range(2):
            made(torch.randn(8, 64)).sum().backward()
            optimizer.step()
        nf.step(made)
    kept.append(made)


def fake_copy(layer: nf.Linear) -> None:
    """The layer itself, with fake parameters in the place of its own."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(p) for name, p in layer.named_parameters()}
        with torch.no_grad():
            torch.func.functional_call(layer, fakes, (torch.randn(8, 64),))
            nf.step()


def fake_cuda(layer: nf.Linear) -> None:
    """Likewise on a device that is not there, where the layer's history does not fit."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {n: torch.empty(p.shape, device="cuda") for n, p in layer.named_parameters()}
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(nf.support, "require", lambda *_: None)
            torch.func.functional_call(layer, fakes, (torch.empty(8, 64, device="cuda"),))


def meta(layer: nf.Linear) -> None:
    made = nf.Linear(64, 64, device="meta", recipe="fp8_delayed")
    made(torch.randn(8, 64, device="meta")).sum().backward()
    torch.optim.SGD(made.parameters(), 0.1).step()
    kept.append(made)


def transforms(layer: nf.Linear) -> None:
    with torch.no_grad():
        for call in (torch.func.grad, torch.func.vmap):
            layer.scale_history = None  # to be begun inside
            with pytest.raises(NotImplementedError):
                call(lambda x: layer(x).sum())(torch.randn(8, 64))


def deleted(layer: nf.Linear) -> None:
    made = layer_of()
    run(made)
    del made
    gc.collect()


def moved_class(layer: nf.Linear) -> None:
    """A layer that is nn.Linear again."""
    made = layer_of()
    made.__class__ = nn.Linear
    for name in ("recipe", "scale_history"):
        delattr(made, name)
    kept.append(made)


def copied(layer: nf.Linear) -> None:
    made = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    run(*made)
    kept.extend(made)


def threads(layer: nf.Linear) -> None:
    """Layers that are made in threads while others step."""

    def work() -> None:
        for _ in range(20):
            made = layer_of()
            run(made)
            torch.optim.SGD(made.parameters(), 0.1).step()

    others = [threading.Thread(target=work) for _ in range(3)]
    for thread in others:
        thread.start()
    for _ in range(50):
        nf.step()
    for thread in others:
        thread.join()


kept: list[nn.Module] = []  # alive while later steps are taken
BEFORE = [fake_mode, fake_copy, fake_cuda, meta, transforms, deleted, moved_class, copied, threads]


@pytest.mark.parametrize("before", BEFORE, ids=lambda f: f.__name__)
def test_r20_later_steps_are_as_ever(before: Callable[[nf.Linear], None]) -> None:
    layer, plain = layer_of(), layer_of()
    plain.load_state_dict(layer.state_dict())
    try:
        before(layer)
        torch.manual_seed(1)
        for each in (layer, plain):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            torch.manual_seed(1)
            for _ in range(3):
                run(each)
                optimizer.step()
                optimizer.zero_grad()
        assert amax_history.outlives_its_call(layer.scale_history)
        assert_same_bits(layer.scale_history, plain.scale_history)
        assert_same_bits(layer.weight.detach(), plain.weight.detach())
        nf.step()
    finally:
        kept.clear()


def test_r20_a_step_inside_a_fake_mode_changes_no_real_history() -> None:
    layer = layer_of().requires_grad_(False)  # rolls with any optimizer
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    before = layer.scale_history.clone()
    fake_mode(layer)
    kept.clear()
    assert_same_bits(layer.scale_history, before)
    with FakeTensorMode():
        nf.step(layer)  # asked for, it is done
    assert steps_of(layer) == 1


# ---- whose step ----

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "groups": lambda p: torch.optim.SGD([{"params": [each], "lr": 0.01} for each in p]),
    "derived": lambda p: type("Mine", (torch.optim.SGD,), {})(p, 0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_r21_a_step_rolls_its_own_layers(device: str, kind: str) -> None:
    """Two optimizers over a model each, and one over neither."""
    one, other, plain = layer_of(device=device), layer_of(device=device), nn.Linear(64, 64)
    optimizers = [OPTIMIZERS[kind](list(m.parameters())) for m in (one, other)]
    neither = torch.optim.SGD(plain.parameters(), 0.1)
    run(one, other, plain)
    neither.step()
    assert steps_of(one) == steps_of(other) == 0
    for expected in ((1, 0), (1, 1)):
        optimizers[sum(expected) - 1].step()
        assert (steps_of(one), steps_of(other)) == expected
    run(other)
    optimizers[0].step()
    neither.step()
    assert (steps_of(one), steps_of(other)) == (1, 1)
    nf.step()
    assert (steps_of(one), steps_of(other)) == (1, 2)


def test_r21_one_parameter_is_enough(device: str) -> None:
    """An optimizer of biases alone; two of one layer; a tied and a parametrized weight."""
    layer = layer_of(device=device)
    for parameter in (layer.bias, layer.weight):
        run(layer)
        before = steps_of(layer)
        torch.optim.SGD([parameter], 0.01).step()
        assert steps_of(layer) == before + 1
    tied, computed = layer_of(device=device), layer_of(device=device)
    tied.weight = layer.weight
    parametrizations.weight_norm(computed)
    run(layer, tied, computed)
    torch.optim.SGD([layer.weight], 0.01).step()
    assert (steps_of(layer), steps_of(tied), steps_of(computed)) == (3, 1, 0)
    torch.optim.SGD(computed.parameters(), 0.01).step()
    assert steps_of(computed) == 1


def test_r21_a_frozen_layer_rolls_with_what_trains_beside_it(device: str) -> None:
    frozen, adapter = (
        layer_of(device=device).requires_grad_(False),
        nn.Linear(64, 64, device=device),
    )
    optimizer = torch.optim.SGD(adapter.parameters(), 0.01)
    for count in (1, 2):
        frozen(adapter(torch.randn(8, 64, device=device))).sum().backward()
        optimizer.step()
        assert steps_of(frozen) == count


def test_r21_closures_and_compiled_steps() -> None:
    """A step is one, however often it calls the closure."""
    layer, x = layer_of(), torch.randn(8, 64)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert steps_of(layer) == 1
    sgd = torch.optim.SGD(layer.parameters(), 0.01)
    compiled = torch.compile(sgd.step, backend="eager")
    run(layer)
    compiled()
    assert steps_of(layer) == 2


def test_r21_copies_of_parameters_need_the_call() -> None:
    """Documented in step(): whoever steps copies ends the step himself."""
    layer = layer_of()
    master = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    optimizer = torch.optim.SGD(master, 0.01)
    run(layer)
    optimizer.step()
    assert steps_of(layer) == 0
    nf.step(layer)
    assert steps_of(layer) == 1


# ---- distributed ----


def _of_a_rank(rank: int, file: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(layer_of(UNGUARDED), nn.BatchNorm1d(64), layer_of(UNGUARDED))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    generator = torch.Generator().manual_seed(rank)
    factor = 100.0 if rank else 1.0
    errors = []
    for _ in range(4):
        x = factor * torch.randn(32, 64, generator=generator)
        y = model[0](x)
        want = nn.functional.linear(x, model[0].weight, model[0].bias)
        errors.append(((y - want).norm() / want.norm()).item())
        ddp(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = nf.delayed_state(ddp)
    torch.save((errors, state, dict(ddp.module.named_buffers())), f"{out}{rank}")
    dist.destroy_process_group()


def test_r22_each_rank_has_its_own() -> None:
    """DDP broadcasts its buffers at each forward (a BatchNorm's here), not the histories."""
    with tempfile.TemporaryDirectory() as folder:
        files = os.path.join(folder, "store"), os.path.join(folder, "rank")
        torch.multiprocessing.spawn(_of_a_rank, files, nprocs=2)
        ranks = [torch.load(files[1] + str(rank)) for rank in range(2)]
    for errors, state, buffers in ranks:
        assert max(errors) < 0.05
        assert list(state) == ["0.scale_history", "2.scale_history"]
        assert all(name.startswith("1.") for name in buffers)
    rows = [state["0.scale_history"].view(torch.float32)[0] for _, state, _ in ranks]
    assert (rows[1][FIRST : FIRST + 4] > 20 * rows[0][FIRST : FIRST + 4]).all()


def test_r22_averages_of_a_model_have_their_own(device: str) -> None:
    """AveragedModel averages buffers, which histories are not."""
    layer = layer_of(device=device)
    averaged = torch.optim.swa_utils.AveragedModel(layer, use_buffers=True)
    run(layer)
    nf.step(layer)
    averaged.update_parameters(layer)
    averaged.update_parameters(layer)
    assert not averaged.module.scale_history[0, FIRST:].any()
    assert list(layer.named_buffers()) == []
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_r22_histories_go_where_the_layer_goes() -> None:
    layer = layer_of()
    run(layer)
    nf.step(layer)
    before = layer.scale_history.clone()
    assert_same_bits(layer.bfloat16().double().float().scale_history, before)
    assert layer.to("meta").scale_history.is_meta
    layer.to_empty(device="cpu")
    assert layer.scale_history.device.type == "cpu"
    layer.share_memory()
    assert layer.scale_history.is_shared()


# ---- saving ----


def model_of(device: str = "cpu", length: int = 16) -> nn.Sequential:
    recipe = nf.Recipe("mine", delayed=nf.Delayed(length=length))
    torch.manual_seed(3)
    return nn.Sequential(layer_of(recipe), nn.GELU(), layer_of("fp8"), layer_of(recipe)).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = (step + 1) * torch.randn(32, 64, generator=generator)
        x = x.to(next(model.parameters()).device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def test_r23_a_resumed_run_is_the_uninterrupted_one(device: str) -> None:
    whole = model_of(device)
    want = train(whole, adamw(whole), range(8))
    model = model_of(device)
    optimizer = adamw(model)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), nf.delayed_state(model)), file)
    file.seek(0)
    weights, moments, histories = torch.load(file)  # weights_only: tensors alone
    resumed = model_of(device)
    for parameter in resumed.parameters():
        nn.init.zeros_(parameter)
    optimizer = adamw(resumed)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    addresses = [m.scale_history.data_ptr() for m in (resumed[0], resumed[3])]
    nf.load_delayed_state(resumed, histories)
    assert addresses == [m.scale_history.data_ptr() for m in (resumed[0], resumed[3])]
    assert train(resumed, optimizer, range(4, 8)) == want[4:]
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())
    for key, history in nf.delayed_state(resumed).items():
        assert_same_bits(history, nf.delayed_state(whole)[key])


def test_r23_in_the_middle_of_a_step(device: str) -> None:
    """Between two micro-batches: what they measured is saved too, and the copy stays as it is."""
    model = model_of(device)
    run(model)
    state = nf.delayed_state(model)
    kept_state = {key: history.clone() for key, history in state.items()}
    other = model_of(device)
    nf.load_delayed_state(other, state)
    nf.step(model), nf.step(other)
    for a, b in zip(
        nf.delayed_state(model).values(), nf.delayed_state(other).values(), strict=True
    ):
        assert_same_bits(a, b)
        assert a[:, FIRST].any()
    for key in state:
        assert_same_bits(state[key], kept_state[key])


def test_r23_wrappers_leave_no_trace_in_the_names() -> None:
    model = model_of()
    keys = ["0.scale_history", "3.scale_history"]
    assert list(nf.delayed_state(model)) == keys
    assert list(nf.delayed_state(torch.compile(model))) == keys
    assert list(nf.delayed_state(nn.DataParallel(model))) == keys
    assert list(nf.delayed_state(nn.ModuleDict({"module": model}))) == [f"module.{k}" for k in keys]
    assert list(nf.delayed_state(model[0])) == ["scale_history"]
    assert nf.delayed_state(model[2]) == {}
    nf.load_delayed_state(model[2], {})
    model[0] = checkpoint_wrapper(model[0])
    assert list(nf.delayed_state(model)) == keys
    twice = nn.Sequential(model, model)
    assert list(nf.delayed_state(twice)) == [f"0.{k}" for k in keys]


def test_r23_what_does_not_fit_is_refused() -> None:
    """Before anything is changed."""
    model, longer = model_of(), model_of(length=40)
    run(longer)
    state = nf.delayed_state(longer)
    with pytest.raises(ValueError, match=r"expected 0.scale_history as torch.int32 \(3, 20\) .*44"):
        nf.load_delayed_state(model, state)
    run(model)
    good = nf.delayed_state(model)
    model = model_of()
    for wrong in (
        {k: good[k] for k in list(good)[:1]},
        good | {"7.scale_history": good["0.scale_history"]},
        {},
    ):
        with pytest.raises(ValueError, match="expected a history for each of the 2 layers"):
            nf.load_delayed_state(model, wrong)
        assert not model[0].scale_history.any()
        nf.load_delayed_state(model_of(), wrong, strict=False)
    for wrong in (good["0.scale_history"].float(), good["0.scale_history"].view(-1)[:20]):
        with pytest.raises(ValueError, match="0.scale_history as torch.int32"):
            nf.load_delayed_state(model, good | {"0.scale_history": wrong})
    assert not model[3].scale_history.any()


def test_r23_distributed_checkpoints(tmp_path: Any) -> None:
    """torch.distributed.checkpoint writes them, and reads them into what delayed_state() gives."""
    from torch.distributed import checkpoint

    model, other = model_of(), model_of()
    run(model)
    nf.step(model)
    checkpoint.save({"histories": nf.delayed_state(model)}, checkpoint_id=tmp_path / "saved")
    state = {"histories": nf.delayed_state(other)}
    checkpoint.load(state, checkpoint_id=tmp_path / "saved")
    nf.load_delayed_state(other, state["histories"])
    for a, b in zip(
        nf.delayed_state(model).values(), nf.delayed_state(other).values(), strict=True
    ):
        assert_same_bits(a, b)
