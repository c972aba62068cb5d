"""Imports inside the package have no circles, counting those inside functions."""

from __future__ import annotations

import ast
import pathlib

import narrowfloat

ROOT = pathlib.Path(narrowfloat.__file__).parent


def imports_of(root: pathlib.Path) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, wherever in the file. __init__ files are
    left out: they only gather names."""
    files = {
        ".".join(f.relative_to(root).with_suffix("").parts): f
        for f in root.rglob("*.py")
        if not f.name.startswith("__init__")
    }
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        found[name] = set()
        package = name.split(".")[:-1]
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level == 0:
                continue
            above = package[: len(package) - (node.level - 1)]
            module = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".strip(".")
                found[name] |= {m for m in (inner, module) if m in files}
    return found


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """A circle's modules, empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(imports[module]):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for m in sorted(imports) if (circle := visit(m, []))), [])


def test_imports_have_no_circle() -> None:
    imports = imports_of(ROOT)
    assert {"recipe", "reference.linear", "modules"} <= set(imports)
    assert "autograd" in imports["modules"] and "spec" in imports["reference.linear"]
    assert circle_in(imports) == []


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
