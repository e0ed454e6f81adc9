"""The analysis side runs where neither torch nor triton exists, and importing the package is light."""

import subprocess
import sys
from pathlib import Path

ANALYSIS = ("shapes", "shard", "traffic", "records", "fit", "policy", "plots", "serving", "notebook", "engines", "explore", "dashboard", "widgets", "recording", "lesson", "review", "report", "targets", "predictions")
PACKAGE = Path(__file__).parent.parent / "m3cp"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)


def test_analysis_imports_neither_torch_nor_triton():
    names = [n for n in ANALYSIS if (PACKAGE / f"{n}.py").exists()]
    assert {"shapes", "shard", "traffic", "records", "fit", "plots"} <= set(names)
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import importlib
for name in {names!r}:
    importlib.import_module("m3cp." + name)
try:
    import torch
except ImportError:
    print("blocked as meant")
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "blocked as meant" in done.stdout


def test_importing_the_package_is_light():
    done = run(
        "import sys, m3cp; print([n for n in ('numpy', 'pandas', 'scipy', 'torch', 'triton', 'matplotlib', 'lmfit') if n in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_pandas_and_scipy_come_only_when_used():
    done = run(
        "import sys, m3cp.fit; print([n for n in ('pandas', 'scipy', 'lmfit', 'matplotlib') if n in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
