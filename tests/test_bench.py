"""Whether the benchmarks count rightly: statistics, limits, rows, tables, a smoke run."""

import contextlib
import dataclasses
import json
import math
import operator
import pathlib
import sys

import pytest
import torch

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
if not BENCHMARKS.is_dir():  # a source archive may come without them
    pytest.skip("benchmarks/ is not there", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import bench  # noqa: E402
import layer  # noqa: E402
import measure  # noqa: E402
import picture  # noqa: E402
import record  # noqa: E402
import subjects_fork  # noqa: E402
import subjects_tune  # noqa: E402
import variants  # noqa: E402
from measure import Contender, Device, Kernel  # noqa: E402

FACTS = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "cublaslt": "13.1.0",
    "commit": "0123456789abcdef",
    "date": "2026-11-29T12:00:00Z",
}
LINEAR = {
    "recipe": "fp8",
    "mode": "eager",
    "weights": "requantized",
    "tokens": 16384,
    "in": 8192,
    "out": 8192,
    "bias": True,
    "ms": 5.7,
    "bf16_ms": 9.9,
    "ratio": 1.73456789,
    "limit_ms": 5.5,
    "of_limit": 0.9650,
}


# Statistics


def test_ratio_is_the_median_of_the_pairs_not_the_ratio_of_medians():
    ours, theirs = [1.0, 2.0, 10.0], [2.0, 3.0, 40.0]
    assert measure.pairwise_ratio(ours, theirs) == 2.0  # of 2, 1.5, 4; the medians give 1.5
    # a clock that drifts by as much for both changes nothing
    assert measure.pairwise_ratio([1.0, 1.5, 2.0], [1.7, 2.55, 3.4]) == pytest.approx(1.7)


@pytest.mark.parametrize("ours, theirs", [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_refuses_what_is_not_in_pairs(ours, theirs):
    with pytest.raises(ValueError, match="as many times"):
        measure.pairwise_ratio(ours, theirs)


@pytest.mark.parametrize(
    "set_bytes, free, kept, sets",
    [
        (6 * 2**20, math.inf, 0, 32),  # 1024 cubed: 201 MB
        (1.4e9, 141e9, 2.8e9, 4),  # the largest: at least four
        (1.4e9, 10e9, 2.8e9, 2),  # where memory allows
        (1.4e9, 1e9, 2.8e9, 1),
        (1, math.inf, 0, 256),
    ],
)
def test_enough_sets_rotate(set_bytes, free, kept, sets):
    assert measure.sets_for(set_bytes, free, kept) == sets


def test_contenders_take_turns_and_what_is_reset_is_not_timed():
    seen = []
    a = Contender(lambda i: seen.append(("a", i)), lambda i: seen.append(("reset", i)))
    b = Contender(lambda i: seen.append(("b", i)))
    times = measure.interleave(Device("cpu"), [a, b], 0.01, sets=3)
    assert len(times) == 2 and len(times[0]) == len(times[1]) >= 10
    assert all(t >= 0 for side in times for t in side)
    order = [name for name, _ in seen]
    assert order == ["a", "reset", "b"] * (len(order) // 3)
    assert [i for name, i in seen if name == "a"][:3] == [0, 1, 2]  # every set before the clock


def test_the_two_sides_are_on_different_sets():
    xs = [torch.ones(2, 3).mul_(s).requires_grad_() for s in range(4)]
    inputs = layer.Inputs(xs, [torch.ones(2, 5)] * 4)
    modules = [torch.nn.Linear(3, 5) for _ in range(4)]
    ours = layer.trainer(modules, inputs)
    theirs = layer.trainer(modules[:1], inputs, offset=2)
    ours.run(1)
    assert [x.grad is not None for x in xs] == [False, True, False, False]
    assert modules[1].weight.grad is not None and modules[0].weight.grad is None
    ours.reset(1)
    theirs.run(1)
    assert [x.grad is not None for x in xs] == [False, False, False, True]
    theirs.reset(1)
    assert all(x.grad is None for x in xs)
    assert all(p.grad is None for m in modules for p in m.parameters())


# The limit


@pytest.mark.parametrize(
    "rows, columns, bytes_", [(True, True, 6), (True, False, 5), (False, True, 5)]
)
def test_least_bytes_of_quantizing(rows, columns, bytes_):
    assert measure.quantize_bytes(1000, rows, columns) == 1000 * bytes_


def test_least_bytes_of_a_layer():
    tokens, inputs, outputs = 16384, 8192, 28672
    x, w, dy = tokens * inputs, inputs * outputs, tokens * outputs
    assert measure.layer_bytes(tokens, inputs, outputs, reused=True) == 6 * x + 6 * dy
    assert measure.layer_bytes(tokens, inputs, outputs, reused=False) == 6 * x + 6 * dy + 8 * w
    for recipe, side in (("fp8_row", 6), ("fp8_block", 4 + 1 / 16)):
        w_bytes = 8 if recipe == "fp8_row" else 6
        moved = measure.layer_bytes(tokens, inputs, outputs, reused=False, recipe=recipe)
        assert moved == side * (x + dy) + w_bytes * w


def test_limit_of_a_known_layer():
    # 16384 x 8192 x 8192, reused: GEMMs 1.70 + 2 x 1.83 ms; x and dy .189 ms each at 4.25 TB/s
    moved = measure.layer_bytes(16384, 8192, 8192, reused=True)
    assert measure.limit_ms(5.36, moved, 4250) == pytest.approx(5.36 + 2 * 0.18949, abs=1e-3)


@pytest.mark.parametrize(
    "name, gemm",
    [
        ("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", True),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", True),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", True),
        ("void narrowfloat::quantize_kernel<__nv_bfloat16>(narrowfloat::QuantizeArgs)", False),
        ("narrowfloat::(anonymous namespace)::amax(float*)", False),
        ("void at::native::vectorized_elementwise_kernel<4, ...>(...)", False),
        ("Memset (Device)", False),
        ("Memcpy DtoD (Device -> Device)", False),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", False),
    ],
)
def test_which_kernels_are_gemms(name, gemm):
    assert measure.is_gemm(name) == gemm


def _profile(ours, theirs, rounds):
    """Kernels of `rounds` turns of each, us given per round, in no order."""
    kernels, at = [Kernel(-5.0, 99.0, "nvjet_before")], 0.0
    for r in range(rounds):
        for turn in (ours, theirs):
            for name, us in [("spin_kernel(long)", 1.0), *turn(r)]:
                kernels.append(Kernel(at, us, name))
                at += us + 1
    return kernels[::-1]


def test_gemm_time_is_ours_alone_after_the_clocks_have_settled():
    def ours(r):
        slow = 100.0 if r < 3 else 1.0
        return [("narrowfloat::quantize", 7.0), ("nvjet_a", 10 * slow), ("nvjet_b", 20.0)]

    def theirs(_):
        return [("nvjet_c", 500.0), ("at::native::reduce_kernel", 3.0)]

    kernels = _profile(ours, theirs, rounds=9)
    assert measure.gemm_ms(kernels, contenders=2) == pytest.approx(0.030)
    assert measure.gemm_ms(kernels, contenders=2, iterations=3) == pytest.approx(0.010)


@pytest.mark.parametrize("ours", [[], [("narrowfloat::quantize", 7.0)]])
def test_gemm_time_refuses_a_profile_without_gemms(ours):
    kernels = _profile(lambda _: ours, lambda _: [("nvjet", 5.0)], 3)
    with pytest.raises(RuntimeError, match="expected GEMM kernels"):
        measure.gemm_ms(kernels, contenders=2)
    with pytest.raises(RuntimeError, match="expected GEMM kernels"):
        measure.gemm_ms([], contenders=2)


# Rows and the file


def test_a_row_has_the_fields_of_its_bench_and_no_others():
    row = record.row("linear", **LINEAR)
    assert list(row) == ["bench", *record.KEYS["linear"], *record.VALUES["linear"]]
    assert row["ratio"] == 1.7346 and row["bench"] == "linear"
    for fields in ({k: v for k, v in LINEAR.items() if k != "ms"}, {**LINEAR, "more": 1}):
        with pytest.raises(ValueError, match="expected the fields"):
            record.row("linear", **fields)
    with pytest.raises(ValueError, match="finite ratio"):
        record.row("linear", **{**LINEAR, "ratio": math.nan})


def test_fields_are_those_that_others_read():
    expected = {
        "quantize": "kernel rows cols gbps copy_gbps ratio",
        "host": "recipe us_per_layer bf16_us_per_layer ratio",
        "memory": "recipe bytes bf16_bytes ratio",
        "train": "recipe params steps seeds loss bf16_loss gap_percent gap_error_percent",
        "model": "recipe width blocks tokens ratio",
        "decode": "recipe tokens in out ratio",
        "linear": "recipe mode weights tokens in out bias ms bf16_ms ratio limit_ms of_limit",
    }
    for name, fields in expected.items():
        assert [*record.KEYS[name], *record.VALUES[name]] == fields.split()


def test_the_file_keeps_what_there_is_after_each_row(tmp_path, capsys):
    path = tmp_path / "h200" / "run.json"
    results = record.Results(path, FACTS)
    results.add(record.row("memory", recipe="fp8", bytes=1, bf16_bytes=2, ratio=0.5))
    assert json.loads(path.read_text())["rows"][0]["ratio"] == 0.5
    results.add(record.row("linear", **LINEAR))
    content = json.loads(path.read_text())
    assert content["machine"] == FACTS and [r["bench"] for r in content["rows"]] == [
        "memory",
        "linear",
    ]
    assert not list(path.parent.glob("*.tmp"))
    assert "of limit 0.96 met" in capsys.readouterr().out

    again = record.Results(path, {**FACTS, "date": "later"})
    again.add(record.row("linear", **{**LINEAR, "ratio": 1.8}))
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 and rows[1]["ratio"] == 1.8
    with pytest.raises(ValueError, match="commit"):
        record.Results(path, {**FACTS, "commit": "another"})


def test_an_empty_file_is_json():
    assert json.loads(record.to_json({"machine": FACTS, "rows": []}))["rows"] == []


def test_names_of_machines():
    assert record.gpu_slug("NVIDIA H200") == "h200"
    assert record.gpu_slug("NVIDIA GeForce RTX 5090") == "geforce-rtx-5090"
    assert record.cublaslt_version(130100) == "13.1.0"
    assert record.cublaslt_version(120804) == "12.8.4"
    assert record.cublaslt_version(None) is None
    assert list(record.machine(torch.device("cpu"))) == list(record.MACHINE)


def test_a_stated_commit_wins_over_git(monkeypatch):
    monkeypatch.setattr(record, "_output", lambda *_: None)
    assert record.commit("abc") == "abc" and record.commit() == "unknown"
    answers = {"rev-parse": "f00d", "status": " M setup.py"}
    monkeypatch.setattr(record, "_output", lambda _, verb, *__: answers[verb])
    assert record.commit("abc") == "abc" and record.commit() == "f00d-dirty"
    answers["status"] = ""
    assert record.commit() == "f00d"


# Bars and tables


@pytest.mark.parametrize(
    "changed, field, wanted",
    [
        ({}, "ratio", "1.72 met"),
        ({"ratio": 1.70}, "ratio", "1.72 near"),
        ({"ratio": 1.60}, "ratio", "1.72 missed"),
        ({"weights": "reused"}, "ratio", "1.76 near"),
        ({"of_limit": 0.5}, "of_limit", "0.96 missed"),
        ({"of_limit": None}, "of_limit", ""),
        ({"mode": "graph"}, "ratio", ""),
        ({"recipe": "torchao_rowwise"}, "ratio", ""),
        ({"mode": "graph", "tokens": 1024, "in": 1024, "out": 1024}, "ratio", "0.7 met"),
    ],
)
def test_bars(changed, field, wanted):
    row = record.row("linear", **{**LINEAR, **changed})
    assert record.verdict(row, field, "h200") == wanted
    assert record.verdict(row, field, "l4") == ""


def test_bars_where_less_is_better():
    row = record.row("host", recipe="fp8", us_per_layer=1.0, bf16_us_per_layer=1.0, ratio=1.1)
    assert record.verdict(row, "ratio", "h200") == "1.15 met"
    assert record.verdict({**row, "ratio": 1.16}, "ratio", "h200") == "1.15 near"
    assert record.verdict({**row, "ratio": 1.3}, "ratio", "h200") == "1.15 missed"


def test_tables_take_the_newest_of_each_row(tmp_path):
    assert record.tables(record.read(tmp_path)) == record.NOTHING
    for day, ratio in (("2026-11-30", 1.9), ("2026-11-29", 1.1)):
        facts = {**FACTS, "date": f"{day}T00:00:00Z", "commit": f"{day}-commit"}
        rows = [record.row("linear", **{**LINEAR, "ratio": ratio})]
        if day == "2026-11-29":
            rows.append(record.row("memory", recipe="fp8", bytes=1, bf16_bytes=2, ratio=0.5))
        results = record.Results(tmp_path / "h200" / f"{day}.json", facts)
        results.add(*rows)
    (tmp_path / "h200" / "other.json").write_text('{"something": "else"}')
    text = record.tables(record.read(tmp_path))
    assert "### NVIDIA H200" in text and "1.900" in text and "1.100" not in text
    assert "2026-11-30 on 2026-11-30" in text and "2026-11-29 on 2026-11-29" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "ratio 1.72 met; of limit 0.96 met" in text


def test_a_table_goes_between_the_markers_and_nowhere_else():
    page = f"before\n\n{record.BEGIN}\n\nold\n\n{record.END}\nafter\n"
    once = record.into(page, "new")
    assert once == f"before\n\n{record.BEGIN}\n\nnew\n\n{record.END}\nafter\n"
    assert record.into(once, "new") == once
    with pytest.raises(ValueError, match="markers"):
        record.into("nothing here", "new")


def test_of_a_training_the_most_seeds_are_shown_and_a_brief_table_is_the_users(tmp_path):
    results = record.Results(tmp_path / "h200" / "a.json", FACTS)
    for seeds, loss in ((1, 1.25), (3, 1.5), (2, 1.75)):
        fields = dict.fromkeys(record.VALUES["train"], loss)
        results.add(record.row("train", recipe="fp8", params=1, steps=2, seeds=seeds, **fields))
    for mode in ("eager", "graph"):
        shown = {"mode": mode, "weights": "requantized", "bias": False}
        results.add(record.row("linear", **{**LINEAR, **shown}))
    found = record.read(tmp_path)
    text, brief = record.tables(found), record.tables(found, brief=True)
    assert "1.5000" in text and "1.2500" not in text and "1.7500" not in text
    assert "graph" in text and "graph" not in brief and "eager" in brief and "train" not in brief


@pytest.mark.parametrize("folder, brief", [(BENCHMARKS, False), (BENCHMARKS.parent, True)])
def test_the_readmes_show_what_is_committed(folder, brief):
    page = (folder / "README.md").read_text()
    current = record.into(page, record.tables(record.read(), brief))
    assert page == current, "run: python benchmarks/bench.py table"


# The command


def test_shapes_are_read():
    assert bench.shape("8192x4096x14336") == (8192, 4096, 14336)
    assert bench.shape("16384X8192") == (16384, 8192)
    for text in ("4096", "1x2x3x4", "axb", "0x4", "-1x4"):
        with pytest.raises(bench.argparse.ArgumentTypeError):
            bench.shape(text)


@pytest.mark.parametrize("argv", [["nonsense"], ["linear", "--seconds", "0"], ["--shapes", "4"]])
def test_wrong_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        bench.arguments(argv)
    assert "expected" in capsys.readouterr().err


def test_default_subjects():
    assert bench.arguments([]).subjects == ["quantize", "linear", "host", "memory"]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_smoke_run_on_the_cpu(tmp_path, threads, capsys):
    path = tmp_path / "smoke.json"
    subjects = ["quantize", "gemm", "linear", "host", "memory", "model"]
    code = bench.main([*subjects, "--device", "cpu", "--out", str(path), "--commit", "abc"])
    assert code == 0, capsys.readouterr().err
    content = json.loads(path.read_text())
    assert list(content["machine"]) == list(record.MACHINE)
    rows = content["rows"]
    assert {r["bench"] for r in rows} == set(subjects)
    for row in rows:
        name = row["bench"]
        assert list(row) == ["bench", *record.KEYS[name], *record.VALUES[name]]
        assert row["ratio"] > 0 or name == "host"  # a difference of two noisy times
    linear = {(r["mode"], r["weights"], r["bias"]) for r in rows if r["bench"] == "linear"}
    assert linear == {
        ("eager", "requantized", False),
        ("eager", "reused", False),
        ("graph", "requantized", False),
        ("eager", "requantized", True),
        ("eager", "reused", True),
    }
    (memory,) = (r for r in rows if r["bench"] == "memory")
    assert memory["ratio"] < 0.53


def test_a_failure_costs_its_own_row(tmp_path, threads, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(layer.LinearCase, "graph", broken)
    path = tmp_path / "smoke.json"
    assert bench.main(["linear", "--device", "cpu", "--out", str(path)]) == 1
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert "FAILED linear 64x32x48 graph" in capsys.readouterr().err


def test_picture_takes_the_newest_of_what_was_trained_and_timed(tmp_path):
    layer = {**picture.LAYER, **picture.CONDITIONS, "bench": "linear"}
    trained = {"bench": "train", "seeds": 2, "gap_error_percent": 0.1}
    older = [
        {**layer, "recipe": "a", "ratio": 1.5},
        {**layer, "recipe": "only timed", "ratio": 1.1},
        {**trained, "recipe": "a", "gap_percent": 2.0},
        {**trained, "recipe": "only trained", "gap_percent": 2.0},
        {**trained, "recipe": "bf16", "gap_percent": None},
    ]
    newer = [
        {**layer, "recipe": "a", "ratio": 1.6},
        {**layer, "recipe": "a", "ratio": 9.0, "bias": True},
        {**layer, "recipe": "a", "ratio": 9.0, "tokens": 1},
    ]
    elsewhere = [{**layer, "recipe": "a", "ratio": 7.0}]
    found = [("h200", {"rows": older}), ("h200", {"rows": newer}), ("l4", {"rows": elsewhere})]
    (point,) = picture.points(found, "h200")
    assert point == picture.Point("a", 1.6, 2.0, 0.1, 2)
    pytest.importorskip("matplotlib")
    picture.draw([point, point._replace(seeds=1, error_percent=None)], "a GPU", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


# Subjects that the smoke run leaves out


def test_step_runs_every_contender(tmp_path, threads, capsys):
    path = tmp_path / "step.json"
    arguments = ["step", "--device", "cpu", "--models", "llama-8B", "--compiled"]
    assert bench.main([*arguments, "--out", str(path)]) == 0, capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    found = {(r["recipe"], r["mode"]) for r in rows}
    assert found == {
        ("bf16", "eager"),
        *((recipe, mode) for recipe in ("fp8", "fp8_delayed") for mode in ("eager", "compiled")),
    }
    for row in rows:
        wanted = [*record.KEYS["step"], *record.VALUES["step"], "kernels"]
        assert list(row) == ["bench", *wanted]


@pytest.mark.parametrize("subject", ["quantize", "quantize_fp4", "quantize_block"])
def test_every_quantizing_kernel_runs_and_counts_its_bytes(monkeypatch, tmp_path, subject):
    """What a call writes is no more than what it is said to move, less one read of x."""
    seen = []

    def take(self, kernel, shape, calls, moved, seconds):
        rows, cols = shape
        written = sum(t.nbytes for t in calls[0]())
        assert 0 < written - 32 <= moved / len(calls) - 2 * rows * cols, kernel
        seen.append(kernel)

    monkeypatch.setattr(bench.Run, "take_quantize", take)
    path = tmp_path / "quantize.json"
    arguments = [subject, "--device", "cpu", "--shapes", "128x128", "--out", str(path)]
    assert bench.main([*arguments, "--commit", "abc"]) == 0
    assert len(set(seen)) == len(seen) >= 4


@pytest.fixture
def tiny_demo(monkeypatch, tmp_path):
    for needed in ("tqdm", "matplotlib"):
        pytest.importorskip(needed)
    demo = subjects_fork.demo()
    for i in range(60):
        (tmp_path / f"module{i}.py").write_text(f"value = {i}\n" * 20)
    size = dataclasses.replace(
        demo.SIZES["cpu"], layers=1, width=32, heads=2, context=16, batch=4, steps=16, warmup=2
    )
    monkeypatch.setattr(demo, "roots", lambda: {"text": tmp_path})
    monkeypatch.setitem(demo.SIZES, "cpu", dataclasses.replace(size, eval_batches=1))


def test_a_fork_differs_from_the_baseline_by_its_recipe_alone(tiny_demo, threads, tmp_path):
    path = tmp_path / "fork.json"
    arguments = ["fork", "--device", "cpu", "--out", str(path), "--commit", "abc"]
    assert bench.main([*arguments, "--train-args", "--recipes fp8 nvfp4 --seeds 0 1"]) == 0
    rows = {(r["recipe"], r["seed"]): r for r in json.loads(path.read_text())["rows"]}
    assert set(rows) == {(r, s) for r in ("fp32", "fp8", "nvfp4") for s in (0, 1)}
    for (recipe, _), row in rows.items():
        assert (row["first"], row["last"]) == (8, 10)
        gaps = row["gap_percent"], row["train_gap_percent"]
        # of the baseline a second branch is the first one again
        assert all((gap == 0) == (recipe == "fp32") for gap in gaps), row
        if recipe == "fp32":  # in plain PyTorch either way
            assert row["weights_gap_percent"] == 0
        else:
            assert row["weights_gap_percent"] != row["train_gap_percent"]
        assert all(abs(gap) < 5 for gap in gaps)
    assert rows["fp8", 0]["bf16_loss"] != rows["fp8", 1]["bf16_loss"]


def test_variants_leave_in_bf16_what_their_name_says(monkeypatch):
    import narrowfloat

    monkeypatch.setattr(narrowfloat, "RECIPES", known := {})
    variants.register()
    operands = {
        "x": ("fprop.a", "wgrad.b"),
        "w": ("fprop.b", "dgrad.b"),
        "dy": ("dgrad.a", "wgrad.a"),
    }
    operands |= {p: (f"{p}.a", f"{p}.b") for p in ("fprop", "dgrad")}
    places = [f"{gemm}.{side}" for gemm in ("fprop", "dgrad", "wgrad") for side in "ab"]
    assert set(known) == {f"{name}_in_bf16" for name in operands}
    for name, left in operands.items():
        for place in places:
            found = operator.attrgetter(place)(known[f"{name}_in_bf16"])
            assert (found is None) == (place in left), (name, place)


def test_tune_has_a_row_for_each_plan_that_a_gemm_finds(monkeypatch, tmp_path):
    import narrowfloat

    plans = [{"key": "known", "first_us": 1, "us": 1, "offered": 1, "tried": 1, "right": 1}]

    def gemm(key, **found):
        return lambda: plans.append({**plans[0], "key": key, **found})

    made = {"fprop": gemm("a", first_us=6.0, us=4.0, offered=8), "dgrad": gemm("a")}
    monkeypatch.setattr(subjects_tune, "LAYERS", {"fp8": ((128, 64, 32),)})
    monkeypatch.setattr(subjects_tune, "_gemms", lambda *_: made)
    monkeypatch.setattr(narrowfloat, "tune", contextlib.nullcontext)
    monkeypatch.setattr(
        narrowfloat, "save_plans", lambda file: file.write_text(json.dumps({"plans": plans}))
    )
    path = tmp_path / "tune.json"
    assert bench.main(["tune", "--device", "cpu", "--out", str(path), "--commit", "abc"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["product"] == "fprop" and row["ratio"] == 1.5 and row["offered"] == 8
    assert (row["tokens"], row["in"], row["out"]) == (128, 64, 32)


def test_tune_asks_for_one_gemm_at_a_time(monkeypatch):
    from narrowfloat import ops
    from narrowfloat.spec import Backward

    class OnTheCPU:
        def randn(self, *shape, grad=False):
            return torch.randn(shape).requires_grad_(grad)

    seen = []
    for name in ("linear_forward", "linear_backward"):
        inner = getattr(ops, name)

        def noted(*arguments, name=name, inner=inner):
            seen.append((name, arguments[{"linear_forward": 3, "linear_backward": 7}[name]]))
            return inner(*arguments)

        monkeypatch.setattr(ops, name, noted)
    made = subjects_tune._gemms(OnTheCPU(), "fp8_fast", 32, 16, 48)
    seen.clear()
    for call in made.values():
        call()
    names = [name for name, _ in seen]
    assert names == ["linear_forward", "linear_backward", "linear_backward"]
    dgrad, wgrad = (Backward.unpack(spec) for _, spec in seen[1:])
    assert dgrad.need_dx and dgrad.dw_dtype is None and not wgrad.need_dx and wgrad.dw_dtype
    assert dgrad.fast_dgrad and wgrad.fast_wgrad
