"""Decides that every case number cited in tests has a row in CASES.md, and that its tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TEXT = (TESTS / "CASES.md").read_text()
CITED = re.compile(r"\b([OR])-(\d+)(?: to \1-(\d+))?")  # O-07, R-13 to R-19
IN_A_NAME = re.compile(r"^test((?:_(?:to_)?[or]\d\d)+)(?=_|$)")  # test_o27_o29_..., test_r13_to_r19
RANGE_IN_A_NAME = re.compile(r"([or])(\d\d)(?:_to_\1(\d\d))?")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def numbers(pattern: re.Pattern[str], text: str) -> set[str]:
    return {
        f"{part.upper()}-{number:02}"
        for part, first, last in pattern.findall(text)
        for number in range(int(first), int(last or first) + 1)
    }


def functions_of(source: str) -> set[str]:
    """The test functions that pytest collects; methods of classes are not looked for."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(source).body
    return {n.name for n in body if isinstance(n, functions) and n.name.startswith("test")}


def cited_in(source: str) -> set[str]:
    names = [found[1] for name in functions_of(source) if (found := IN_A_NAME.match(name))]
    return numbers(CITED, source).union(*(numbers(RANGE_IN_A_NAME, name) for name in names))


def rows_of(text: str) -> dict[str, list[str]]:
    """Number -> the cells after it."""
    lines = re.findall(r"^\| ([OR]-\d\d) \| (.*) \|$", text, re.M)
    assert len(lines) == len(re.findall(r"^\|\s*[OR]-", text, re.M)), "a row is not | O-00 | ... |"
    rows = {number: cells.split(" | ") for number, cells in lines}
    assert len(rows) == len(lines), "a number has two rows"
    return rows


SOURCES = {
    f.relative_to(TESTS).as_posix(): f.read_text()
    for f in sorted(TESTS.rglob("*.py"))
    if f != Path(__file__).resolve()  # its own examples are no citations
}
DEFINED = {name: functions_of(source) for name, source in SOURCES.items()}
ROWS = rows_of(TEXT)


@pytest.mark.parametrize("file", SOURCES)
def test_every_number_cited_has_a_row(file: str) -> None:
    missing = sorted(cited_in(SOURCES[file]) - set(ROWS))
    assert not missing, f"{file} cites {missing}, which have no row in tests/CASES.md"


def test_every_test_named_exists() -> None:
    wrong = []
    for file, name in sorted(set(NAMED.findall(TEXT))):
        if name not in DEFINED.get(file, ()):
            now = [other for other in DEFINED if name in DEFINED[other]]
            wrong.append(f"{file}::{name} (there is one in {now or 'no file'})")
    assert not wrong, "tests/CASES.md names tests that are not there:\n" + "\n".join(wrong)


@pytest.mark.parametrize("number", ROWS)
def test_a_row_is_whole(number: str) -> None:
    """Its cells are all there, and the last names tests, or says why there are none."""
    *cells, tests = ROWS[number]
    assert len(cells) == (3 if number[0] == "O" else 4) and all(cell.strip() for cell in cells)
    only_tests = not re.sub(NAMED, "", tests).strip(", ")
    assert only_tests or re.fullmatch(r"none: .+", tests), tests


def test_numbers_follow_each_other() -> None:
    for part in "OR":
        found = [int(number[2:]) for number in ROWS if number[0] == part]
        assert sorted(found) == list(range(1, len(found) + 1)), part


def test_citations_are_found() -> None:
    source = """
def test_o27_o29_surfaces(): 'O-01, R-02 and O-04 to O-06'
def test_r13_to_r15(): ...
def test_order_o31_is_no_case(): ...
"""
    want = "O-01 O-04 O-05 O-06 O-27 O-29 R-02 R-13 R-14 R-15"
    assert cited_in(source) == set(want.split())
    assert functions_of(source) == {
        "test_o27_o29_surfaces",
        "test_r13_to_r15",
        "test_order_o31_is_no_case",
    }
