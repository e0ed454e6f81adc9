"""Every test that the table of what is supported and the list of cases from life name exists, and the README holds the table."""

import ast
from pathlib import Path

import life
import pytest
from support import CASES, FUSED, ROWS, WAYS, case_table, fused_table, table

TESTS = Path(__file__).parent


def names_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


# Every case that decode, ranks, captures, numbers, memory, options, sweeps and fits answer for.
WANTED = """K01 K02 K05 K08 K10 K13 X02 X05 X07 X10 X14 G01 G04 G06 G08 N02 N03 N06 M01 M02 M07 C05 C09 B02 B04 B05 B06
P02 P03 P06 F01 F02 F05""".split()


def found(test: str) -> list[Path]:
    """Files that hold a test, given as file::name."""
    file, name = test.split("::")
    return [path for path in TESTS.rglob(file) if name in names_in(path)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_cell_is_backed_by_a_test_that_exists(row):
    for test in (row[2], row[4]):
        assert len(found(test)) == 1, f"{test}: {len(found(test))} such tests"


@pytest.mark.parametrize("what", FUSED)
def test_every_way_of_the_fused_forms_is_backed_by_tests_that_exist(what):
    assert len(FUSED[what]) == len(WAYS) and f"| {what} | `test_" in fused_table()
    for test in {test for pair in FUSED[what] for test in pair}:
        assert len(found(test)) == 1, f"{test}: {len(found(test))} such tests"


def test_the_readme_holds_this_table():
    assert table() in (TESTS.parent / "README.md").read_text()


@pytest.mark.parametrize("case", WANTED)
def test_every_case_from_life_has_a_test_that_exists_and_runs(case):
    what, tests = CASES.get(case, ("", ()))
    assert what and tests, f"case {case} has no test"
    for test in tests:
        file, name = test.split("::")
        assert len(found(test)) == 1, f"{case}, {test}: {len(found(test))} such tests"
        if file == "life.py":  # functions that other files run
            assert name in {f.__name__ for f in life.CASES_FROM_LIFE}, f"{name} is not in CASES_FROM_LIFE"
        elif name.startswith("run_"):  # a part that ranks run and report by name
            assert name.removeprefix("run_").replace("_", " ") in ranks_report(), f"{name} is never run"
        else:
            assert name.startswith("test_")
    assert f"| {case} | {what} | `{tests[0]}`" in case_table()


def ranks_report() -> set[str]:
    """Names of the parts that tests/gpu/test_gpu_ranks.py runs."""
    tree = ast.parse((TESTS / "gpu" / "test_gpu_ranks.py").read_text())
    (names,) = [ast.literal_eval(a.value) for a in tree.body if isinstance(a, ast.Assign) and ast.unparse(a.targets[0]) == "EXTRA"]
    return {name.replace("-", " ") for name in names}


def test_no_case_is_listed_that_nobody_asked_for():
    assert list(CASES) == WANTED
