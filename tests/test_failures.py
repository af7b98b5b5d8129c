"""docs/failures.md says which failures stand as tests: each is there, and each named test exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "failures.md"
CASES = {
    *("A01", "A03", "A04", "A06", "A07", "A08", "A10", "A12", "X01", "X02", "X03", "X04"),
    *("A13", "A15", "A16", "A17", "A19", "A22", "X05", "X06", "X07", "X08"),
    *("A23", "A25", "A27", "A28", "X09", "X10"),
    *("A90", "A92", "X36"),
    *("A29", "A31", "A32", "A33", "X11", "X12"),
    *("A34", "A35", "A37", "A39", "A40", "A41", "A42", "A45", "X13", "X14", "X15", "X16", "X17", "X18"),
    *("A46", "A47", "A49", "X19", "X20", "A77"),
    *("A50", "A51", "A54", "A55", "A57", "A58", "X21", "X22", "X23", "X24"),
    *("A59", "A61", "A63", "A65", "A66", "A67", "A68", "X25", "X26", "X27", "X28"),
    *("A69", "A71", "A72", "X29", "X30"),
    *("A73", "A75", "A76", "X31"),
    *("A79", "A80", "A82", "A83", "A85", "A86", "X32", "X33"),
    *("A87", "A89", "X34", "X35"),
}


def _rows() -> Iterator[tuple[str, list[str]]]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| ([AX]\d\d) \|", line):
            yield match[1], re.findall(r"`([^`]+)`", line)


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_case_stands_once_with_tests_that_are_there() -> None:
    rows = list(_rows())
    assert sorted(case for case, _ in rows) == sorted(CASES)
    assert f"\n{len(CASES)} cases" in PAGE.read_text(encoding="utf-8")
    for case, named in rows:
        assert named, case
        for name in named:
            file, _, function = name.partition("::")
            assert (TESTS / file).is_file(), f"{case}: {file} is not there"
            if file.endswith(".py"):
                assert function in _functions(TESTS / file), f"{case}: {name} is not there"
