"""Kernels broken on purpose: this suite, run on a broken copy of the package, must fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# name: (file, text, broken text, the test that must notice)
MUTANTS = {
    "k / P per shard": ("candidates.py", "TOPK=shape.topk, KEEP", "TOPK=max(1, shape.topk // shard.world), KEEP", "test_cp_chooses_as_the_oracle[topk 12]"),
    "owner = b // P": ("score.py", "block = i_local * world + rank", "block = i_local + rank * world", "test_every_world[cp-2]"),
    "heads merged together": ("merge.py", "(first_head + i_head).to(tl.int64)", "(first_head + i_head * 0).to(tl.int64)", "test_every_world[cp-2]"),
    "queries not shared": ("tile.py", "(o_head // LOCAL_HEADS * REPLICAS).to(tl.int64)", "(o_head * 0).to(tl.int64)", "test_gathered_queries_are_read_in_place_like_replicated_ones"),
    "mask by the group's longest row": ("tile.py", "< n_column[None, :])", "< tl.max(n_column, 0))", "test_cp_chooses_as_the_oracle[a late winner]"),
    "NaN wins": ("tile.py", " & (dots == dots)", "", "test_scores_are_written_where_they_decide_and_nowhere_else[NaN and infinities among the keys]"),
}  # fmt: skip


def run(folder: Path, which: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [*command, f"tests/interpret/test_interpreted_kernels.py::{which}"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_fails_on_a_broken_kernel(name, tmp_path):
    file, old, new, which = MUTANTS[name]
    for part in ("m3cp", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "gpu"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "m3cp" / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1, f"the mutant's text occurs {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new))
    done = run(tmp_path, which)
    assert done.returncode == 1 and "1 failed" in done.stdout, f"not noticed: {done.stdout[-800:]}{done.stderr[-800:]}"
