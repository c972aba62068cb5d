"""Decides that the right devices are taken and the others refused with reasons; and the table."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import narrowfloat as nf
from narrowfloat import _binary, support

Cards = Callable[..., None]
FP8 = nf.RECIPES["fp8"]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    """cards((9, 0), (8, 0)): pretends that CUDA devices of these capabilities are here."""
    known, known_fp4 = set(support.ready), set(support.ready_fp4)

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(support._binary, "problem", None)
        monkeypatch.setattr(support._binary, "module", None)  # as if compiled for every chip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        support.ready.clear()
        support.ready.update({torch.device("cpu"), torch.device("meta")})
        support.ready_fp4.clear()
        support.ready_fp4.update(support.ready)

    yield pretend
    for found, before in ((support.ready, known), (support.ready_fp4, known_fp4)):
        found.clear()
        found.update(before)


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
    assert torch.device("cuda", 0) in support.ready


@pytest.mark.parametrize("name", sorted(set(nf.RECIPES) - {"fp8"}))
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


@pytest.mark.parametrize("name", sorted(set(nf.RECIPES) - {"fp8"}))
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_fp4_beside_an_old_library(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    """What cuBLASLt cannot do is said, not called native: the binary takes bf16 operands then."""
    cards(capability)
    number = capability[0] * 10 + capability[1]
    asked: list[tuple[int, int]] = []

    def has_fp4(capability: int, version: int) -> bool:
        asked.append((capability, version))
        return version >= 120804

    for version, how in ((120600, "emulation"), (120804, "native"), (130100, "native")):
        library = types.SimpleNamespace(
            archs=lambda: "sm_100f sm_120f",
            cublaslt_version=lambda version=version: version,
            has_fp4=has_fp4,
        )
        monkeypatch.setattr(support._binary, "module", library)
        answer = nf.supported(name, 0)
        assert answer and answer.how == how and asked[-1] == (number, version)
        assert ("cuBLASLt 120600 has no FP4 products" in answer.reason) == (how == "emulation")
        assert answer.reason.endswith("; not run on hardware")
        assert nf.supported("fp8", 0).how == "native"
    monkeypatch.setattr(
        support._binary,
        "module",
        types.SimpleNamespace(
            archs=lambda: "sm_100f sm_120f", cublaslt_version=lambda: 120600, has_fp4=has_fp4
        ),
    )
    with pytest.warns(support.EmulationWarning, match="cuBLASLt 120600"):
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
    assert torch.device("cuda", 0) not in support.ready


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
        fp4 = isinstance(recipe, nf.FP4Recipe)
        own = [x for x in lines if name in re.split(r"[|, ]+", x.split("|")[1])]
        assert len(own) == len(support.ARCHITECTURES) + 2
        for row in support.ARCHITECTURES:
            mine = [x for x in own if f"| {row.sm} |" in x]
            assert len(mine) == 1 and row.chips in mine[0]
            assert ("native" if row.native(fp4) else "exact emulation") in mine[0]
            assert mine[0].endswith(f"| {row.ran(fp4)} |")
        assert any("| CPU | | reference" in x for x in own)
    assert len(lines) == 2 + 2 * (len(support.ARCHITECTURES) + 2)


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
def test_the_binary_takes_fp4_tensor_cores_where_the_table_has_them() -> None:
    """From the versions of the library on that have them: 12.8, and its update 1 for sm120."""
    has = _binary.module.has_fp4
    for row in support.ARCHITECTURES:
        for major, minor in row.capabilities:
            capability = major * 10 + minor
            assert has(capability, 130100) == row.has_fp4, row.sm
            assert not has(capability, 120802)
    assert has(100, 120803) and not has(120, 120803) and has(120, 120804)
