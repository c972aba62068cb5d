"""Whether README.md says what is there: names, examples, targets, links, tables."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowfloat as nf
from narrowfloat import support

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "README.md").exists():
    pytest.skip("the tests do not lie in a checkout of the source", allow_module_level=True)

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)  # (language, text)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found, f"README.md has no section {title}"
    return found[1]


def between(begin: str, end: str) -> str:
    assert README.count(begin) == README.count(end) == 1, (begin, end)
    assert README.index(begin) < README.index(end)
    return README[README.index(begin) + len(begin) : README.index(end)]


def api_rows() -> dict[str, str]:
    """Name -> how its row calls it, such as `plan` -> `plan(model, recipe="fp8")`."""
    cells = re.findall(r"^\| `([^`]+)` \|", section("API"), re.M)
    names = [re.match(r"\w+", cell)[0] for cell in cells]  # type: ignore[index]
    assert len(set(names)) == len(names), "a name has two rows"
    return dict(zip(names, cells, strict=True))


# ---- the API table ----


def test_every_public_name_has_its_row() -> None:
    assert sorted(api_rows()) == sorted(nf.__all__)


@pytest.mark.parametrize("name", sorted(n for n, cell in api_rows().items() if "(" in cell))
def test_a_row_calls_its_name_as_it_is_defined(name: str) -> None:
    call = ast.parse(api_rows()[name], mode="eval").body
    assert isinstance(call, ast.Call)
    stated: dict[str, Any] = {}
    for argument in call.args:
        assert isinstance(argument, ast.Name)
        stated[argument.id] = inspect.Parameter.empty
    for keyword in call.keywords:
        stated[str(keyword.arg)] = ast.literal_eval(keyword.value)
    parameters = inspect.signature(getattr(nf, name)).parameters
    defined = {p.name: getattr(p.default, "name", p.default) for p in parameters.values()}
    if name == "linear":
        del defined["cached"], defined["history"], defined["layer"]  # for Linear's own use
    assert stated == defined


def test_the_command_line_is_named() -> None:
    assert "`python -m narrowfloat`" in section("API")


# ---- the examples ----


def test_examples_run(device: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One after another in one namespace, as a reader would type them."""
    blocks = [text for language, text in BLOCKS if language == "python"]
    assert len(blocks) >= 3
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen: dict[str, Any] = {"__name__": "readme"}
    for number, text in enumerate(blocks, 1):
        exec(compile(text, f"README.md, Python block {number}", "exec"), seen)
    assert "2 linear layers in fp8, 1 left" in capsys.readouterr().out
    assert seen["device"] == device
    assert seen["report"].converted == ["2"]
    assert seen["loss"].isfinite()
    assert seen["y"].shape == seen["z"].shape == (32, 48)
    assert seen["error"] < 0.05
    assert seen["layer"].recipe.fprop.fast, "the recipe of the example is not fast"


# ---- what it points to ----


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z][a-z ]*):(?!=)", makefile, re.M)
    targets = {name for rule in rules for name in rule.split()}
    code = "\n".join([text for _, text in BLOCKS] + re.findall(r"`([^`\n]+)`", PROSE))
    named = set(re.findall(r"\bmake ([a-z]+)\b(?!\+)", code))  # apt-get install make g++
    assert named <= targets, named - targets
    assert {"env", "build", "demo", "test", "lint", "format", "bench", "wheel"} <= named


def test_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", PROSE, re.M)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(([^)\s]+)\)", PROSE)
    assert links
    for link in links:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert path or anchor in anchors, link
    for path in re.findall(r"`((?:src|benchmarks|examples|tests|tools)/[^`\s]*)`", PROSE):
        assert (ROOT / path).exists(), path


# ---- the tables that others write ----


def test_support_table_is_the_one_that_the_package_prints() -> None:
    written = between("<!-- support table -->", "<!-- /support table -->")
    assert written.strip() == support.support_table()


def test_default_recipe_is_the_one_in_its_table() -> None:
    recipe = nf.RECIPES["fp8"]
    assert recipe == nf.Recipe()
    for field in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, field)
        row = re.search(rf"^\| `{field}` \|.*$", section("Recipes"), re.M)
        assert row, field
        _, _, a, b, accumulate = [cell.strip() for cell in row[0].strip("|").split("|")]
        casts = (nf.Cast(operand.split(": ")[1]) for operand in (a, b))  # one scale a tensor
        assert (*casts, accumulate) == (gemm.a, gemm.b, gemm.accumulate), field
