"""Which devices are taken, which are refused and for what reasons; and the support table."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor

import narrowfloat as nf
from narrowfloat import _binary, formats, ops, support
from narrowfloat.cast import KINDS

FP4 = sorted(n for n, r in nf.RECIPES.items() if r.kinds == ("fp4",))

Cards = Callable[..., None]
FP8 = nf.RECIPES["fp8"]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    """cards((9, 0), (8, 0)): pretends that CUDA devices of these capabilities are here."""
    known = dict(support._ready)

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(support._binary, "problem", None)
        monkeypatch.setattr(support._binary, "module", None)  # as if compiled for every chip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        support._ready.clear()

    yield pretend
    support._ready.clear()
    support._ready.update(known)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_native(cards: Cards, capability: tuple[int, int]) -> None:
    cards(capability)
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda", 0)):
        answer = nf.supported("fp8", device)
        assert answer and answer.ok and answer.how == "native"
        assert "cuBLASLt" in answer.reason
        ran = "run on an H200" if capability == (9, 0) else "not run on hardware"
        assert answer.reason.endswith("; " + ran)
    support.require(FP8, torch.device("cuda", 0))
    assert torch.device("cuda", 0) in support.ready(("fp8",))


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_native_fp4(cards: Cards, capability: tuple[int, int], name: str) -> None:
    cards(capability)
    answer = nf.supported(name, 0)
    assert answer and answer.how == "native"
    assert "FP4 tensor cores" in answer.reason and "cuBLASLt" in answer.reason
    assert answer.reason.endswith("; not run on hardware")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        support.require(nf.RECIPES[name], torch.device("cuda", 0))


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_fp4_beside_an_old_library(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    """What cuBLASLt cannot do is said, not called native: the binary takes bf16 operands then."""
    cards(capability)
    for version, how in ((130100, "native"), (120804, "native"), (120600, "emulation")):
        library = types.SimpleNamespace(
            archs=lambda: "sm_100f sm_120f", cublaslt_version=lambda version=version: version
        )
        monkeypatch.setattr(support._binary, "module", library)
        answer = nf.supported(name, 0)
        assert answer and answer.how == how
        assert ("FP4 before cuBLASLt 12.8" in answer.reason) == (how == "emulation")
        assert answer.reason.endswith("; not run on hardware")
        assert nf.supported("fp8", 0).how == "native"
    with pytest.warns(support.EmulationWarning, match="FP4 before cuBLASLt 12.8"):
        support.require(nf.RECIPES[name], torch.device("cuda", 0))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_emulated_fp4_warns_once(cards: Cards, capability: tuple[int, int]) -> None:
    cards(capability, capability)
    answer = nf.supported("nvfp4", 0)
    assert answer and answer.ok and answer.how == "emulation"
    assert "no FP4 tensor cores" in answer.reason and "bf16" in answer.reason
    for name in ("nvfp4", "mxfp4"):  # the second is quiet
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            support.require(nf.RECIPES[name], torch.device("cuda", 0))
            support.require(nf.RECIPES[name], torch.device("cuda", 0))
            support.require(FP8, torch.device("cuda", 0))
        assert len(caught) == (name == "nvfp4")
        for each in caught:
            assert each.category is support.EmulationWarning
            assert "recipe nvfp4 on cuda:0" in str(each.message)
    with pytest.warns(support.EmulationWarning, match="cuda:1"):
        support.require(nf.RECIPES["mxfp4"], torch.device("cuda", 1))


@pytest.mark.parametrize("name", sorted(nf.RECIPES))
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5), (11, 0), (6, 1)])
def test_refused_by_every_recipe(cards: Cards, capability: tuple[int, int], name: str) -> None:
    cards(capability)
    answer = nf.supported(name, "cuda")
    assert not answer and f"recipe {name} needs" in answer.reason
    with pytest.raises(NotImplementedError, match=f"recipe {name}, got cuda:0"):
        support.require(nf.RECIPES[name], torch.device("cuda", 0))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5), (11, 0), (6, 1)])
def test_refused_with_the_sm_and_the_list(cards: Cards, capability: tuple[int, int]) -> None:
    cards(capability)
    answer = nf.supported("fp8", "cuda")
    assert not answer and not answer.ok and answer.how == "no"
    assert f"cuda:0 is sm_{capability[0]}{capability[1]}" in answer.reason
    for row in support.ARCHITECTURES:
        assert row.sm in answer.reason
    with pytest.raises(NotImplementedError, match="recipe fp8, got cuda:0") as e:
        support.require(FP8, torch.device("cuda", 0))
    assert answer.reason in str(e.value)
    assert torch.device("cuda", 0) not in support.ready(("fp8",))


def test_each_device_decides_for_itself(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards((8, 0), (9, 0))
    assert not nf.supported("fp8", 0) and nf.supported("fp8", 1)
    assert not nf.supported("fp8", "cuda")  # the current one
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert nf.supported("fp8", "cuda") and nf.supported("fp8")
    support.require(FP8, torch.device("cuda", 1))
    with pytest.raises(NotImplementedError, match="cuda:0 is sm_80"):
        support.require(FP8, torch.device("cuda", 0))
    absent = nf.supported("fp8", 2)
    assert not absent and "no cuda:2" in absent.reason and "2 CUDA" in absent.reason


@pytest.mark.parametrize("kind", ["xpu", "mps", "xla"])
def test_other_kinds_of_device(kind: str) -> None:
    answer = nf.supported("fp8", kind)
    assert not answer and answer.how == "no"
    assert answer.reason == f"{kind} devices have no kernels here (cuda, cpu)"
    with pytest.raises(NotImplementedError, match=f"got {kind}.*have no kernels"):
        support.require(FP8, torch.device(kind))


def test_cpu_and_meta(cards: Cards) -> None:
    cards()
    for device in ("cpu", "meta"):
        answer = nf.supported("fp8", device)
        assert answer and answer.how == "reference"
        support.require(FP8, torch.device(device))
    assert nf.supported("fp8") == nf.supported("fp8", "cpu") == nf.supported(FP8)


def test_without_a_binary(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards((9, 0))
    monkeypatch.setattr(support._binary, "problem", "narrowfloat._C: the reason (the cure)")
    answer = nf.supported("fp8", "cuda")
    assert not answer and answer.reason == "narrowfloat._C: the reason (the cure)"
    with pytest.raises(NotImplementedError, match=r"the reason \(the cure\)"):
        support.require(FP8, torch.device("cuda", 0))
    assert nf.supported("fp8", "cpu")


def test_no_cuda_device(cards: Cards) -> None:
    cards()
    answer = nf.supported("fp8", "cuda")
    assert not answer and "python -m narrowfloat" in answer.reason


def test_a_device_is_asked_once(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards((9, 0))
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: asked.append(i) or (9, 0))
    for _ in range(3):
        support.require(FP8, torch.device("cuda", 0))
    assert asked == [0]


@pytest.mark.parametrize(
    ("archs", "runs", "fails"),
    [
        (
            "sm_89 sm_90a sm_100f sm_120f compute_120",
            [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)],
            [(8, 0), (8, 6), (11, 0)],
        ),
        ("sm_90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("sm_100a sm_120a", [(10, 0), (12, 0)], [(10, 3), (12, 1)]),
        ("sm_90 compute_90", [(9, 0), (10, 0), (12, 1)], [(8, 9)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
        ("", [], [(9, 0)]),
    ],
)
def test_compiled_for(
    archs: str, runs: list[tuple[int, int]], fails: list[tuple[int, int]]
) -> None:
    assert all(support.compiled_for(archs, c) for c in runs)
    assert not any(support.compiled_for(archs, c) for c in fails)


# ---- the table ----


def test_table_has_every_recipe_and_architecture() -> None:
    lines = support.support_table().splitlines()
    assert len({line.count("|") for line in lines}) == 1  # as many cells everywhere
    assert lines[1] == "| --- | --- | --- | --- | --- |"
    for name, recipe in nf.RECIPES.items():
        own = [x for x in lines if name in re.split(r"[|, ]+", x.split("|")[1])]
        assert len(own) == len(support.ARCHITECTURES)
        own_kinds = recipe.kinds
        for row in support.ARCHITECTURES:
            mine = [x for x in own if f"| {row.sm} |" in x]
            assert len(mine) == 1 and row.chips in mine[0]
            routes = [support.route(kind, row) for kind in own_kinds]
            order = ("no", "emulation", "native")  # the worst of its kinds is what it is
            how = min((r.how for r in routes), key=order.index)
            assert all(r.cell in mine[0] for r in routes if r.how == how)
            tested = "" if how == "no" else f"{support.ran(row, support.needs_of(recipe))} "
            assert mine[0].endswith(f" | {tested}|")
    assert lines[-2:] == [
        "| every recipe | other GPUs | | no | |",
        f"| every recipe | CPU | | {support._REFERENCE} | run |",
    ]
    by_recipes: dict[str, list[str]] = {}
    for line in lines[2:-2]:
        names, _, rest = line.partition(" | ")
        by_recipes.setdefault(names, []).append(rest)
    alike = ["\n".join(rest) for rest in by_recipes.values()]
    assert len(set(alike)) == len(alike)  # recipes that run alike share their lines


def test_what_was_not_run_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe is run where all its kinds are, and where it mixes them, mixing too."""
    row = support.SM90
    mixed = nf.MixedRecipe("mixed", "fp8", "mxfp8", "fp8")
    one_in_bf16 = nf.Recipe("one", wgrad=nf.Gemm(None, None))
    for what, yes in (
        ({"fp8"}, {"fp8"}),
        ({"fp8", "mx"}, {"fp8", "mxfp8"}),
        ({"fp8", "mixed"}, {"fp8", "one"}),
        ({"fp8", "mx", "mixed"}, {"fp8", "mxfp8", "one", "mixed"}),
    ):
        monkeypatch.setitem(support.RAN, row, ("run there", frozenset(what)))
        for recipe in (nf.RECIPES["fp8"], nf.RECIPES["mxfp8"], one_in_bf16, mixed):
            want = "run there" if recipe.name in yes else "not run on hardware"
            assert support.ran(row, support.needs_of(recipe)) == want, (what, recipe)


def test_every_kind_has_a_route_on_every_architecture_and_version() -> None:
    assert set(support.TABLE) == set(KINDS)
    for kind, rows in support.TABLE.items():
        assert tuple(rows) == support.ARCHITECTURES, kind
        for row, routes in rows.items():
            assert [r.since for r in routes] == sorted((r.since for r in routes), reverse=True)
            assert routes[-1].since == 0  # an older library has an answer too
            assert support.route(kind, row) is routes[0]
            assert support.route(kind, row, 120000) is routes[-1]


def test_readme_holds_the_table() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    start, end = "<!-- support table -->", "<!-- /support table -->"
    assert text.count(start) == text.count(end) == 1
    table = text.split(start)[1].split(end)[0].strip()
    assert table == support.support_table(), (
        "README's support table is not the one of support.py; paste this between its markers:\n"
        + support.support_table()
    )


def test_a_binary_without_code_for_the_chip(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards((12, 0), (9, 0))
    narrow = types.SimpleNamespace(archs=lambda: "sm_90a")
    monkeypatch.setattr(support._binary, "module", narrow)
    refused = nf.supported("fp8", 0)
    assert not refused and "sm_90a" in refused.reason and "sm_120" in refused.reason
    assert nf.supported("fp8", 1)


@pytest.mark.skipif(_binary.module is None, reason="no binary")
@pytest.mark.parametrize("version", [120000, 120800, 120803, 120804, 120900, 130100, 140000])
def test_the_binary_decides_as_the_table_says(version: int) -> None:
    for kind, rows in support.TABLE.items():
        for row in support.ARCHITECTURES:
            for major, minor in row.capabilities:
                capability = major * 10 + minor
                name = support.route(kind, row, version).name
                assert rows[row]
                if kind == "fp4":
                    assert _binary.module.has_fp4(capability, version) == (name == "native")
                elif kind in formats.SCALINGS:
                    if not hasattr(_binary.module, "block_route"):
                        pytest.skip("the binary is older than block_route")
                    code = formats.SCALINGS[kind].code
                    assert _binary.module.block_route(code, capability, version) == name, (
                        kind,
                        row.sm,
                        version,
                    )


# ---- rowwise and blockwise scaling ----

EVERY = [(8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
# with the newest library: how, and words of the reason
EXPECTED = {
    "fp8_row": {
        8: ("native", "unit scales, then a pass that scales"),
        9: ("native", "FP8 tensor cores of Hopper"),
        10: ("native", "unit scales, then a pass that scales"),
        12: ("native", "unit scales, then a pass that scales"),
    },
    "fp8_block": {
        8: ("no", "sm_89.*sm_90 alone; fp8_block_pow2 runs"),
        9: ("native", "FP8 tensor cores of Hopper"),
        10: ("no", "sm_10[03].*sm_90 alone; fp8_block_pow2 runs"),
        12: ("no", "sm_12[01].*sm_90 alone; fp8_block_pow2 runs"),
    },
    "fp8_block_pow2": {
        8: ("emulation", "has no tensor cores that scale blocks.*bf16"),
        9: ("native", "FP8 tensor cores of Hopper"),
        10: ("native", "as MXFP8"),
        12: ("native", "as MXFP8"),
    },
    "mxfp8": {
        8: ("emulation", "has no tensor cores that scale blocks.*bf16"),
        9: ("emulation", "has no tensor cores that scale blocks.*bf16"),
        10: ("native", "FP8 tensor cores of Blackwell"),
        12: ("native", "FP8 tensor cores of Blackwell"),
    },
}
EXPECTED["fp8_block_bf16_wgrad"] = EXPECTED["fp8_block"]
EXPECTED["fp8_block_row_wgrad"] = EXPECTED["fp8_block"]
EXPECTED["fp8_block_backward"] = EXPECTED["fp8_block"]
EXPECTED["nvfp4_mxfp8_backward"] = {
    8: ("emulation", "has no tensor cores that scale blocks and FP4 tensor cores.*bf16"),
    9: ("emulation", "has no tensor cores that scale blocks and FP4 tensor cores.*bf16"),
    10: ("native", "FP8 tensor cores and FP4 tensor cores of Blackwell"),
    12: ("native", "FP8 tensor cores and FP4 tensor cores of Blackwell"),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("capability", EVERY)
def test_blocks_run_where_the_table_says(
    cards: Cards, capability: tuple[int, int], name: str
) -> None:
    cards(capability)
    how, words = EXPECTED[name][capability[0]]
    answer = nf.supported(name, 0)
    assert answer.how == how and answer.ok == bool(answer) == (how != "no")
    assert re.search(words, answer.reason)
    device = torch.device("cuda", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "no":
            sm = f"sm_{capability[0]}{capability[1]}"
            with pytest.raises(NotImplementedError, match=f"recipe {name} does not run on {sm}"):
                support.require(nf.RECIPES[name], device)
            assert device not in support.ready(nf.RECIPES[name].kinds)
        else:
            row = support.ARCHITECTURES[[8, 9, 10, 12].index(capability[0])]
            assert answer.reason.endswith(
                "; " + support.ran(row, support.needs_of(nf.RECIPES[name]))
            )
            for _ in range(2):  # once a device
                support.require(nf.RECIPES[name], device)
            assert device in support.ready(nf.RECIPES[name].kinds)
    assert len(caught) == (how == "emulation")
    assert support.never(name, capability) == (how == "no")


@pytest.mark.parametrize(
    ("name", "capability", "version", "how", "words"),
    [
        ("fp8_row", (9, 0), 120804, "native", "unit scales"),
        ("fp8_block", (9, 0), 120804, "no", "sm_90.*take cuBLASLt 12.9"),
        ("fp8_block_pow2", (9, 0), 120804, "emulation", "no blocks before cuBLASLt 12.9"),
        ("fp8_block_pow2", (10, 0), 120600, "emulation", "no MXFP8 before cuBLASLt 12.8"),
        ("mxfp8", (10, 3), 120600, "emulation", "no MXFP8 before cuBLASLt 12.8"),
        ("mxfp8", (12, 0), 120803, "emulation", "no MXFP8 before cuBLASLt 12.9"),
        ("mxfp8", (12, 0), 120900, "native", "FP8 tensor cores"),
        ("nvfp4", (12, 0), 120803, "emulation", "no FP4 before cuBLASLt"),
        ("fp8", (9, 0), 120000, "native", "FP8 tensor cores"),
    ],
)
def test_the_library_that_is_loaded_decides(
    cards: Cards,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    version: int,
    how: str,
    words: str,
) -> None:
    cards(capability)
    module = types.SimpleNamespace(
        archs=lambda: "sm_89 sm_90a sm_100f sm_120f", cublaslt_version=lambda: version
    )
    monkeypatch.setattr(support._binary, "module", module)
    answer = nf.supported(name, 0)
    assert answer.how == how and re.search(words, answer.reason), answer.reason
    assert not support.never(name, capability)


@pytest.mark.parametrize(
    ("said", "how"), [("native", "native"), ("epilogue", "native"), ("bf16", "emulation")]
)
def test_the_binary_is_asked(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, said: str, how: str
) -> None:
    cards((12, 1))
    asked: list[tuple[int, int, int]] = []
    module = types.SimpleNamespace(
        archs=lambda: "sm_120f",
        cublaslt_version=lambda: 130100,
        block_route=lambda *question: asked.append(question) or said,
    )
    monkeypatch.setattr(support._binary, "module", module)
    assert nf.supported("mxfp8", 0).how == how
    assert asked == [(formats.MX.code, 121, 130100)]
    module.block_route = lambda *question: ""
    refused = nf.supported("mxfp8", 0)
    assert not refused and "sm_121" in refused.reason
    assert nf.supported(nf.BlockRecipe("all bf16", "bf16", "bf16", "bf16"), 0).how == "native"


def test_a_mixed_recipe_is_what_its_worst_gemm_is(cards: Cards) -> None:
    cards((9, 0), (10, 0))
    mixed = nf.BlockRecipe("mixed", "block", "mx", "bf16")
    assert nf.supported(mixed, 0).how == "emulation"
    refused = nf.supported(mixed, 1)
    assert refused.how == "no" and "recipe mixed does not run on sm_100" in refused.reason
    assert nf.supported(nf.BlockRecipe("m", "row", "block", "bf16"), 0).how == "native"
    assert nf.supported(nf.BlockRecipe("m", "row", "block_pow2", "mx"), 1).how == "native"
    with pytest.warns(support.EmulationWarning, match="recipe mixed on cuda:0"):
        support.require(mixed, torch.device("cuda", 0))
    kinds = nf.MixedRecipe("kinds", "fp8", "fp8_bf16_wgrad", "fp8_bf16_wgrad")
    assert kinds.kinds == nf.RECIPES["fp8_bf16_wgrad"].kinds == ("fp8",)
    assert nf.supported(kinds, 0).how == nf.supported("fp8_bf16_wgrad", 1).how == "native"
    assert nf.MixedRecipe("none", *["bf16"] * 3).kinds == ("bf16",)
    one = nf.MixedRecipe("one", "mxfp4", "fp8_row", "fp8_block")
    assert one.kinds == ("row", "block", "fp4")
    assert not nf.supported(one, 1) and nf.supported(one, 0).how == "emulation"


def test_an_operand_left_in_bf16_is_emulated(cards: Cards) -> None:
    """Everywhere, and said once, whatever ran before."""
    cards((8, 9), (9, 0), (10, 0), (12, 0))
    support.require(nf.RECIPES["fp8"], torch.device("cuda", 0))
    for gemm, how in ((nf.Gemm("e4m3", None), "emulation"), (nf.Gemm(None, None), "native")):
        recipe = nf.Recipe("one", fprop=gemm)
        assert {nf.supported(recipe, index).how for index in range(4)} == {how}
        assert recipe.kinds == (("fp8",) if how == "native" else ("fp8", "fp8_bf16"))
    recipe = nf.Recipe("w", fprop=nf.Gemm("e4m3", None))
    with pytest.warns(support.EmulationWarning, match="no tensor cores that multiply FP8 by bf16"):
        support.require(recipe, torch.device("cuda", 0))
    assert torch.device("cuda", 0) in support.ready(recipe.kinds)


def test_one_warning_for_mixes_of_the_same_kinds(cards: Cards) -> None:
    cards((9, 0))
    for fprop, dgrad, warns in (("nvfp4", "mxfp8", 1), ("mxfp4", "mxfp8", 0), ("mxfp4", "bf16", 1)):
        mixed = nf.MixedRecipe("mixed", fprop, dgrad, "bf16")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                support.require(mixed, torch.device("cuda", 0))
        assert len(caught) == warns, fprop


@pytest.mark.parametrize("name", sorted({*EXPECTED, "fp8", "fp8_delayed", "nvfp4"}))
def test_nothing_unsupported_is_launched(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """O-95: linear, matmul and a layer refuse before any operator is called."""
    capabilities = [*EVERY, (8, 6)]
    cards(*capabilities)
    called: list[str] = []

    def no_launch(*_: object) -> None:
        called.append("launched")
        raise KeyboardInterrupt

    for operator in ("linear_forward", "delayed_linear_forward", "quantize_op"):
        monkeypatch.setattr(ops, operator, no_launch)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *_: None)
    for index, capability in enumerate(capabilities):
        with FakeTensorMode():
            x = torch.empty(8, 16, device=f"cuda:{index}")
            w = torch.empty(32, 16, device=f"cuda:{index}")
        runs = nf.supported(name, index).ok
        sm = f"sm_{capability[0]}{capability[1]}"
        for call in (
            lambda x, w: nf.linear(x, w, None, name),
            lambda x, w: nf.matmul(x, w.t(), name),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", support.EmulationWarning)
                if runs:
                    with pytest.raises(KeyboardInterrupt):
                        call(x, w)
                else:
                    with pytest.raises(NotImplementedError, match=f"recipe {name}.*{sm}"):
                        call(x, w)
        assert bool(called) == runs
        called.clear()
