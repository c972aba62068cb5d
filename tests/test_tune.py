"""Plans are measured when they may be, are right, and survive a file."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import relative_error

import narrowfloat as nf
from narrowfloat import _binary

BF16 = torch.bfloat16


class Module(types.SimpleNamespace):
    """What the compiled part offers, without a GPU."""

    def __init__(self, plans: list[tuple] | None = None) -> None:
        self.calls: list[tuple] = []
        super().__init__(
            plans=lambda: plans or [],
            cublaslt_version=lambda: 130100,
            driver_version=lambda: 13000,
            start_tuning=lambda older: self.calls.append(("start", older)),
            stop_tuning=lambda older: self.calls.append(("stop", older)),
            load_plan=lambda *plan: self.calls.append(("load", *plan)),
        )


PLAN = (0, "ab" * 88, "cd" * 64, "d [1, 2] = ...", 10.0, 8.0, 9, 7, 6)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module([PLAN])
    monkeypatch.setattr(_binary, "module", made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ["H200", "L4", "H200"][i])
    return made


def test_a_context_starts_and_stops(module: Module) -> None:
    with nf.tune():
        assert module.calls == [("start", False)]
    assert module.calls == [("start", False), ("stop", False)]
    with pytest.raises(KeyError), nf.tune(sm89=True):
        raise KeyError
    assert module.calls[2:] == [("start", True), ("stop", True)]


def test_a_file_goes_round(module: Module, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "plans.json"
    with nf.tune(file):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["plans.json"]
    (saved,) = json.loads(file.read_text())["plans"]
    numbers = [saved[name] for name in ("first_us", "us", "offered", "tried", "right")]
    assert numbers == [*PLAN[4:]]
    module.calls.clear()
    with nf.tune(file):  # for both devices of the name, before anything is measured
        assert module.calls == [
            ("load", 0, *PLAN[1:4]),
            ("load", 2, *PLAN[1:4]),
            ("start", False),
        ]
    assert nf.load_plans(file) == 1


def test_processes_may_save_at_once(module: Module, tmp_path: pathlib.Path) -> None:
    """Ranks that were given one file: whole files, no error, nothing beside."""
    file = tmp_path / "plans.json"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: nf.save_plans(file), range(400)))
    assert nf.load_plans(file) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["plans.json"]


@pytest.mark.parametrize("name", ["cublaslt", "driver"])
def test_plans_of_other_versions_are_refused(
    module: Module, tmp_path: pathlib.Path, name: str
) -> None:
    file = tmp_path / "plans.json"
    nf.save_plans(file)
    content = json.loads(file.read_text())
    content[name] += 1
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="load_plans: expected plans for .* got .*measure again"):
        nf.load_plans(file)
    assert not module.calls


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cublaslt": 1, "driver": 1, "plans": [1]}'])
def test_other_files_are_refused(module: Module, tmp_path: pathlib.Path, text: str) -> None:
    file = tmp_path / "plans.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="load_plans: expected a file of save_plans"):
        nf.load_plans(file)


DAMAGED = {
    "empty": "",
    "half": '{"cublaslt": 130100, "driver": 13000, "plans": [{"device": "H2',
    "other versions": '{"cublaslt": 1, "driver": 1, "plans": []}',
    "another's": '{"layers": [1, 2]}',
    "no text": b"\xff\xfe\x00\x80",
    "a short key": None,
    "no digits": None,
}


def damaged(kind: str, file: pathlib.Path) -> None:
    """A file of two plans with something wrong in the second one, or no such file."""
    text = DAMAGED[kind]
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return
    nf.save_plans(file)
    content = json.loads(file.read_text())
    first = content["plans"][0]
    content["plans"].append(first | {"key": first["key"][:-2] + ("" if "short" in kind else "xy")})
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_reported_and_ignored(
    module: Module, tmp_path: pathlib.Path, kind: str
) -> None:
    """Nothing of it is loaded; tune() measures as if it were not there, and replaces it whole."""
    file = tmp_path / "plans.json"
    damaged(kind, file)
    with pytest.raises(ValueError, match="load_plans: expected"):
        nf.load_plans(file)
    assert not module.calls
    with pytest.warns(UserWarning, match="tune: load_plans: expected .*measured anew"):
        with nf.tune(file):
            pass
    assert module.calls == [("start", False), ("stop", False)]
    assert nf.load_plans(file) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["plans.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupt_inside_leaves_a_whole_file(
    module: Module, tmp_path: pathlib.Path, error: type[BaseException]
) -> None:
    file = tmp_path / "plans.json"
    with pytest.raises(error), nf.tune(file):
        raise error
    assert module.calls == [("start", False), ("stop", False)]
    assert nf.load_plans(file) == 1


@pytest.mark.parametrize("where", ["write_text", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_while_saving_leaves_the_file_before(
    module: Module,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
) -> None:
    file = tmp_path / "plans.json"
    nf.save_plans(file)
    before = file.read_bytes()
    real = pathlib.Path.write_text

    def fails(self: pathlib.Path, *arguments: object) -> None:
        if where == "write_text":
            real(self, "{half of")
        raise error

    monkeypatch.setattr(pathlib.Path, where, fails)
    with pytest.raises(error):
        nf.save_plans(file)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plans.json"]


def test_deterministic_mode_refuses_to_measure(module: Module) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="use_deterministic_algorithms"), nf.tune():
            pass
    finally:
        torch.use_deterministic_algorithms(False)
    assert not module.calls


def test_without_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_binary, "module", None)
    monkeypatch.setattr(_binary, "problem", "it is not built")
    for call in (lambda: nf.save_plans("x"), lambda: nf.load_plans("x"), nf.tune().__enter__):
        with pytest.raises(NotImplementedError, match="it is not built"):
            call()


def test_the_binary_refuses_half_a_plan() -> None:
    if _binary.module is None:
        pytest.skip(f"no binary: {_binary.problem}")
    for key, algorithm in (("ab", PLAN[2]), (PLAN[1][:-1] + "g", PLAN[2]), ("", "")):
        with pytest.raises(ValueError, match="hexadecimal digits"):
            _binary.module.load_plan(0, key, algorithm, "")


# On a GPU


def gemms() -> set[str]:
    return {plan[3] for plan in _binary.module.plans()}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "fp8_block", "nvfp4"])
def test_a_layer_is_right_inside_and_after(cuda: str, recipe: str) -> None:
    """Shapes of which cuBLASLt offers split candidates too: a long contraction, a small output."""
    m, k, n = 1008, 4096, 144
    layer = nf.Linear(k, n, device=cuda, dtype=BF16, recipe=recipe)
    x, dy = (torch.randn(m, f, device=cuda, dtype=BF16) for f in (k, n))

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)  # of stochastic rounding
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        return [y.detach(), leaf.grad, layer.weight.grad]

    before, known = step(), gemms()
    with nf.tune():
        inside = step()
    found = gemms() - known
    assert len(found) == 3, found
    for _, _, _, gemm, first_us, us, offered, tried, right in _binary.module.plans():
        if gemm in found:
            assert offered >= tried >= right >= 1, (gemm, offered, tried, right)
            assert 0 < us <= first_us, (gemm, first_us, us)
    with nf.tune():
        step()
    assert gemms() == known | found, "measured twice"
    after = step()
    for a, b, c in zip(before, inside, after, strict=True):
        assert relative_error(b, a) < 4e-3
        assert torch.equal(b, c)


@pytest.mark.gpu
def test_a_capture_does_not_measure(cuda: str) -> None:
    layer = nf.Linear(320, 176, bias=False, device=cuda, dtype=BF16)
    x = torch.randn(208, 320, device=cuda, dtype=BF16)
    with torch.no_grad(), nf.tune():
        want = layer(x)  # a plan, measured
        known = gemms()
        y = torch.randn(96, 320, device=cuda, dtype=BF16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x)
            layer(y)
        graph.replay()
    assert gemms() == known
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_what_is_not_finite_is_not_measured(cuda: str) -> None:
    layer = nf.Linear(336, 160, bias=False, device=cuda, dtype=BF16)
    x = torch.full((224, 336), float("nan"), device=cuda, dtype=BF16)
    known = gemms()
    with torch.no_grad(), nf.tune():
        assert layer(x).isnan().all()
        assert gemms() == known
        assert layer(torch.randn_like(x)).isfinite().all()
        assert len(gemms()) == len(known) + 1


@pytest.mark.gpu
def test_another_process_takes_the_plans(cuda: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "plans.json"
    layer = nf.Linear(2064, 208, bias=False, device=cuda, dtype=BF16)
    x = torch.randn(272, 2064, device=cuda, dtype=BF16)
    with torch.no_grad(), nf.tune(file):
        want = layer(x)
    torch.save((layer.weight.detach().cpu(), x.cpu(), want.cpu()), tmp_path / "tensors.pt")
    code = (
        "import sys, torch, narrowfloat as nf\n"
        "w, x, want = (t.cuda() for t in torch.load(sys.argv[2]))\n"
        "assert nf.load_plans(sys.argv[1]) > 0\n"
        "assert torch.equal(nf.linear(x, w), want)\n"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "tensors.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_o87_a_long_contraction_is_the_same_each_time(cuda: str) -> None:
    """O-87: no partial sums in 16 bits as they come: 100 runs bit-equal, and no less exact than a
    sum in one piece."""
    m, n, k = 64, 64, 65536
    a, b = (torch.randn(s, k, device=cuda, dtype=BF16) for s in (m, n))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [nf.linear(a, b) for _ in range(100)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(run, runs[0]) for run in runs)
    q = [nf.quantize(t, "e4m3").dequantize(torch.float64) for t in (a, b)]
    ref = q[0] @ q[1].t()
    assert relative_error(runs[0], ref) < 2 * relative_error(ref.to(BF16), ref)
