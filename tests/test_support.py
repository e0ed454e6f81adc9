"""The README's table of what is supported is the one that names its tests, and every named test exists."""

import ast
from pathlib import Path

import pytest
from support import ROWS, table

TESTS = Path(__file__).parent


def names_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_cell_is_backed_by_a_test_that_exists(row):
    for test in (row[2], row[4]):
        file, name = test.split("::")
        found = [path for path in TESTS.rglob(file) if name in names_in(path)]
        assert len(found) == 1, f"{test}: {len(found)} such tests"


def test_the_readme_holds_this_table():
    assert table() in (TESTS.parent / "README.md").read_text()
