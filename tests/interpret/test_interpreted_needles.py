"""Needles through the kernels in Triton's interpreter, attention included; and each broken kernel loses one."""

import importlib
import shutil
import sys

import pytest
from needles import check
from test_interpreted_mutants import MUTANTS, OURS, ROOT, run

pytestmark = pytest.mark.usefixtures("short_waits")
GIVEN = [dict(world=2, query_len=4, depth=0.5, local=0), dict(world=8, query_len=1, depth=1.0)]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_every_needle_is_chosen_and_its_value_retrieved(given):
    check(**given)


def test_the_fused_form_finds_them_too():
    check(**GIVEN[0], form="two_launch", attend=False)


def find(cases) -> None:
    """`cases` was just imported with the package under test: import the needles with it too."""
    needles = importlib.import_module("needles")
    for given in GIVEN:
        needles.check(**given, attend=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_every_broken_kernel_loses_a_needle(name, tmp_path, monkeypatch):
    file, old, new, _ = MUTANTS[name]
    shutil.copytree(ROOT / "m3cp", tmp_path / "m3cp", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "m3cp" / "kernels" / file
    assert path.read_text().count(old) == 1 and "needles" not in OURS
    path.write_text(path.read_text().replace(old, new))
    monkeypatch.delitem(sys.modules, "needles")
    with pytest.raises(AssertionError, match="rows differ"):
        run(tmp_path, monkeypatch, find)
