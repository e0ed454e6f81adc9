"""Kernels broken on purpose: the check that should notice, run on a broken copy of the package, must fail."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("m3cp", "cases", "problems", "life")
pytestmark = pytest.mark.usefixtures("short_waits")


def case(name: str, world: int):
    """A check of the table of cases, by name."""
    return lambda cases: cases.check(next(c for c in cases.CASES if c.name == name), path="cp", world=world)


def written(name: str):
    return lambda cases: cases.check_written(next(c for c in cases.CASES if c.name == name).problem, 1)


# name: (file, text, broken text, the check that must notice)
MUTANTS = {
    "k / P per shard": ("candidates.py", "TOPK=shape.topk, KEEP", "TOPK=max(1, shape.topk // shard.world), KEEP", case("topk 7", 2)),
    "owner = b // P": ("score.py", "block = i_local * world + rank", "block = i_local + rank * world", case("topk 7", 2)),
    "heads merged together": ("merge.py", "(first_head + i_head).to(tl.int64)", "(first_head + i_head * 0).to(tl.int64)", case("dense pages", 2)),
    "queries not shared": ("tile.py", "(o_head // LOCAL_HEADS * REPLICAS).to(tl.int64)", "(o_head * 0).to(tl.int64)", case("dense pages", 2)),
    "replicas counted as heads": ("tile.py", "(o_head // LOCAL_HEADS * REPLICAS)", "(o_head // LOCAL_HEADS)", case("dense pages", 8)),
    "mask by the group's longest row": ("tile.py", "< n_column[None, :])", "< tl.max(n_column, 0))", case("a late winner", 1)),
    "NaN wins": ("tile.py", " & (dots == dots)", "", written("NaN and infinities among the keys")),
}  # fmt: skip


def run(folder: Path, monkeypatch, check) -> None:
    """Import the package from `folder` in the place of the one that is loaded, and run the check on it."""
    for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    cases = importlib.import_module("cases")
    decode = importlib.import_module("m3cp.decode")
    assert Path(decode.__file__).is_relative_to(folder)
    try:
        check(cases)
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
            del sys.modules[name]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_noticed(name, tmp_path, monkeypatch):
    file, old, new, check = MUTANTS[name]
    shutil.copytree(ROOT / "m3cp", tmp_path / "m3cp", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "m3cp" / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1, f"the mutant's text occurs {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new))
    with pytest.raises(AssertionError, match="rows differ|rank 0 of 1"):
        run(tmp_path, monkeypatch, check)


def test_the_same_checks_pass_on_an_unbroken_copy(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "m3cp", tmp_path / "m3cp", ignore=shutil.ignore_patterns("__pycache__"))
    run(tmp_path, monkeypatch, lambda cases: [check(cases) for *_, check in MUTANTS.values()])
